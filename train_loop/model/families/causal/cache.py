"""Calls of a model for new tokens alone, with a cache of earlier ones; a small copy shows for which models it is right.

n: rows, T: tokens of a call, K: columns so far, V: vocabulary.
"""

import functools
import inspect
import json
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import DynamicCache

from train_loop.model.families.causal.attention import register_attention
from train_loop.model.families.causal.build import config_of, embeddings_of
from train_loop.model.families.causal.positions import apply_counted, apply_longrope, longrope_limit
from train_loop.model.families.causal.small_copy import SmallCopyError, compute_on_copy, special_tokens

log = logging.getLogger(__name__)
_LENGTHS, _NEW = (5, 11), 9
"""Tokens of the two rows of the check, and tokens that are added to each: windows of small copies are shorter."""
_TOLERANCE = 1e-4
"""Largest relative difference of logits from rounding in float32."""


def extend(model: nn.Module, columns: Mapping[str, Tensor], cache: Any) -> tuple[Tensor, Any]:
    """Return the logits [n, V] after the last column, and the cache with the new columns.

    `columns` has `input_ids` and `position_ids` [n, T] of the new columns, and `is_token` [n, K], which is 0 at
    padding on the left. `cache` is None for the first call.
    """
    last: dict[str, Any] = {"logits_to_keep": 1} if _keeps_some_logits(type(model).forward) else {}
    out = model(
        input_ids=columns["input_ids"],
        attention_mask=columns["is_token"],
        position_ids=columns["position_ids"],
        past_key_values=DynamicCache(config=config_of(model)) if cache is None else cache,
        use_cache=True,
        **last,
    )
    return out.logits[:, -1], out.past_key_values


@functools.lru_cache
def _keeps_some_logits(forward: Callable[..., Any]) -> bool:
    return "logits_to_keep" in inspect.signature(forward).parameters


def is_exact(model: nn.Module, positions: int) -> bool:
    """Return whether a cache gives the logits of calls with whole rows of up to `positions` tokens.

    States that padding would change, and longrope's other factors for long rows, are reasons against it.
    """
    limit, config = longrope_limit(model), config_of(model).to_dict()
    if limit is not None and positions > limit:
        return False
    # An FSDP unit has a class of FSDP2's before its own.
    kind: Any = next(kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))
    return _is_exact(kind, json.dumps(config), positions)


@functools.lru_cache(maxsize=64)
def _is_exact(kind: Any, config: str, positions: int) -> bool:
    try:
        difference = compute_on_copy(kind, json.loads(config), _measure, length=positions)
    except SmallCopyError as error:
        log.debug("%s cannot be called with a cache: %s", kind.__name__, error)
        return False
    return difference < _TOLERANCE


def _measure(model: nn.Module) -> float:
    """Return the relative difference of logits between rows with a cache in one batch, and whole rows alone."""
    register_attention(model)
    apply_longrope(model, part=0, parts=1)
    apply_counted(model, part=0, parts=1)
    special = special_tokens(config_of(model).to_dict())
    plain = [token for token in range(embeddings_of(model).num_embeddings) if token not in special]
    rows = [torch.tensor([(plain * 8)[3 * size : 3 * size + size + _NEW]]) for size in _LENGTHS]
    width = max(_LENGTHS)
    is_token = torch.stack([torch.arange(width) >= width - size for size in _LENGTHS]).long()
    first = torch.stack(
        [torch.cat([row.new_zeros(width - n), row[0, :n]]) for row, n in zip(rows, _LENGTHS, strict=True)]
    )
    columns = {"input_ids": first, "is_token": is_token, "position_ids": (is_token.cumsum(1) - 1).clamp(min=0)}
    with torch.no_grad():
        expected = [model(input_ids=row, use_cache=False).logits[0] for row in rows]
        found, cache = [], None
        for step in range(_NEW):
            logits, cache = extend(model, columns, cache)
            found.append(logits)
            columns = {
                "input_ids": torch.stack([row[0, n + step] for row, n in zip(rows, _LENGTHS, strict=True)])[:, None],
                "is_token": torch.nn.functional.pad(columns["is_token"], (0, 1), value=1),
                "position_ids": columns["position_ids"][:, -1:] + 1,
            }
    whole = torch.stack([one[n - 1 : n - 1 + _NEW] for one, n in zip(expected, _LENGTHS, strict=True)])
    return float((torch.stack(found, 1) - whole).norm() / whole.norm())
