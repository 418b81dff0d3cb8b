"""Parameters that each rank holds whole: `strategy.ignored_params`."""

import difflib
from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from train_loop.errors import ModelError


def whole_parameters(model: nn.Module, patterns: Sequence[str]) -> set[int]:
    """Return the ids of the parameters that patterns match: a name, the path of a module around it, or a glob of them.

    In a glob * matches any characters. Raises ModelError for a pattern that matches nothing.
    """
    found = set[int]()
    for pattern in patterns:
        own = {id(p) for name, p in model.named_parameters(remove_duplicate=False) if _covers(pattern, name)}
        if not own:
            names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
            modules = [name for name, _ in model.named_modules() if name]
            near = difflib.get_close_matches(pattern, [*names, *modules], n=3) or names[:3]
            raise ModelError(f"ignored_params {pattern} matches no parameter; choose for example {', '.join(near)}")
        found |= own
    return found


def _covers(pattern: str, name: str) -> bool:
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[:depth]), pattern) for depth in range(1, len(parts) + 1))
