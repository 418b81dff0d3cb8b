"""Parameters by pattern: a name, the path of a module around it, or a glob of either (* matches any characters)."""

import difflib
from fnmatch import fnmatchcase

from torch import nn

from train_loop.errors import ModelError


def match_parameters(model: nn.Module, pattern: str, *, setting: str) -> set[int]:
    """Return the ids of the parameters that a pattern matches; a tied one by any of its names.

    Raises ModelError for a pattern of a setting that matches nothing.
    """
    named = list(model.named_parameters(remove_duplicate=False))
    found = {id(parameter) for name, parameter in named if _covers(pattern, name)}
    if not found:
        names = [name for name, _ in named]
        modules = [name for name, _ in model.named_modules() if name]
        near = difflib.get_close_matches(pattern, [*names, *modules], n=3) or names[:3]
        raise ModelError(f"{setting} {pattern} matches no parameter; choose for example {', '.join(near)}")
    return found


def _covers(pattern: str, name: str) -> bool:
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[:depth]), pattern) for depth in range(1, len(parts) + 1))
