"""Frozen parameters, which are not trained."""

import difflib
from collections.abc import Sequence

from torch import nn

from train_loop.errors import ModelError


def freeze(model: nn.Module, prefixes: Sequence[str]) -> None:
    """Freeze every parameter below one of the prefixes; model.layers.1 does not match model.layers.10.

    A parameter with several names, such as that of tied embeddings, is frozen by any of them. Raises ModelError if a
    prefix matches nothing, or if no parameter is left to train.
    """
    named = list(model.named_parameters(remove_duplicate=False))
    for prefix in prefixes:
        matched = [parameter for name, parameter in named if f"{name}.".startswith(f"{prefix}.")]
        if not matched:
            raise ModelError(f"freeze_module_prefix {prefix} matches no parameter; {_choices(model, prefix)}")
        for parameter in matched:
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for _, parameter in named):
        raise ModelError(
            f"freeze_module_prefix {', '.join(prefixes)} leaves no parameter to train; name fewer modules, for example "
            "without the last one"
        )


def _choices(model: nn.Module, prefix: str) -> str:
    """Return prefixes that would match, as a phrase: those similar to the given one, and the outermost ones."""
    names = [name for name, module in model.named_modules() if name and any(True for _ in module.parameters())]
    near = difflib.get_close_matches(prefix, names, n=3)
    return f"choose for example {', '.join(dict.fromkeys([*near, *(n for n in names if n.count('.') < 2)]))}"
