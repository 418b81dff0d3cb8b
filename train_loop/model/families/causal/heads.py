"""Heads of labels of transformers' models: the scores of rows, and the tensors that belong to a head."""

from collections.abc import Mapping
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from train_loop.errors import ModelError
from train_loop.model.families.causal.build import base_of, config_of, output_of, token_head_of

_OF_ROWS, _OF_TOKENS = "ForSequenceClassification", "ForTokenClassification"
"""Ends of the names of classes with a head of labels, also after FSDP2 has changed them."""
_TOLERANCE = 1e-4
"""Largest relative difference of scores from rounding in float32."""


def read_at_ends(model: Any) -> None:
    """Make a head of rows read each row's last token, in place; other models stay.

    transformers would read the last token that is not `pad_token_id`, which may be one of the text.
    """
    if pools(model):
        model.forward = MethodType(_scores, model)


def _scores(model: Any, *, ends: Tensor | None = None, **arguments: Any) -> Any:
    """Return the scores [B, labels] at positions `ends` [B], or without them those of all tokens [B, T, labels]."""
    hidden = base_of(model)[0](**arguments).last_hidden_state
    if ends is not None:
        hidden = hidden[torch.arange(len(ends), device=ends.device), ends]
    for module in _after_layers(model):
        hidden = module(hidden)
    return output_of(hidden)


def measure_scores(model: Any, row: Tensor) -> float:
    """Return the relative difference between transformers' scores of a row [1, T] and those of its last token here.

    From then on a head of rows reads any token, as in this loop. The difference of other heads is 0.
    """
    if not pools(model):
        return 0.0
    with torch.no_grad():
        try:
            own = type(model).forward(model, input_ids=row, use_cache=False).logits
        finally:
            read_at_ends(model)
        found = model(input_ids=row, use_cache=False).logits[:, -1]
    return float((found - own).norm() / own.norm())


def check_scores(difference: float, model: Any) -> None:
    """Raise ModelError if a head of rows does not read the last token, which alone has seen all others in a decoder."""
    if not difference < _TOLERANCE:
        raise ModelError(
            f"{type(model).__name__} is not supported: its scores of a row are not those of the row's last token; "
            "choose a decoder, for example qwen3 or llama"
        )


def pools(model: nn.Module) -> bool:
    """Return whether a model gives one result per row."""
    return type(model).__name__.endswith(_OF_ROWS)


def has_labels(model: nn.Module) -> bool:
    """Return whether a model's logits are of labels."""
    return type(model).__name__.endswith((_OF_ROWS, _OF_TOKENS))


def head_of(model: Any) -> nn.Module | None:
    """Return the linear map to logits of tokens or of labels; None if there is none."""
    if not has_labels(model):
        return token_head_of(model)
    maps = [part for one in _after_layers(model) for part in one.modules() if isinstance(part, nn.Linear)]
    return maps[-1] if maps else None


def _after_layers(model: Any) -> list[nn.Module]:
    """Return the modules between the layers and the scores. Some models state the linear map before the others."""
    base, _ = base_of(model)
    own = [one for one in model.children() if one is not base]
    return sorted(own, key=lambda one: isinstance(one, nn.Linear))


def names_outside(model: Any) -> set[str]:
    """Return the names of the tensors that are not of the base model: those of its head."""
    _, prefix = base_of(model)
    return {name for name in model.state_dict() if not name.startswith(prefix)}


def check_labels(model: Any, stored: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ModelError if a folder's head, given by the shapes of its tensors, has another number of labels."""
    head, labels = head_of(model), config_of(model).num_labels
    weight = next(name for name, module in model.named_modules() if module is head) + ".weight"
    if stored.get(weight, (labels,))[0] != labels:
        raise ModelError(
            f"the folder's own head {weight} has {stored[weight][0]} labels, and model.head has {labels}; "
            f"choose a head of {stored[weight][0]} labels, or give the folder of a language model"
        )
