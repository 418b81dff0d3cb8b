"""Calls of a model for new tokens alone, with a cache of earlier ones; a small copy shows for which models it is right.

transformers' cache has the keys and values of all heads of a module. Ranks that share sequences split heads only inside
of attention, which then keeps them itself.

n: rows, T: tokens of a call, K: columns so far, V: vocabulary.
"""

import functools
import inspect
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from train_loop.model.families.causal.attention import attention_inputs, divert_attention, register_attention
from train_loop.model.families.causal.build import config_of, embeddings_of
from train_loop.model.families.causal.heads import head_of
from train_loop.model.families.causal.positions import apply_counted, apply_longrope, longrope_limit, position_inputs
from train_loop.model.families.causal.small_copy import SmallCopyError, compute_on_copy, special_tokens
from train_loop.model.families.family import SPLIT_ATTENTION, Attention
from train_loop.model.families.states import AttentionStates, KeepingAttention

log = logging.getLogger(__name__)
_LENGTHS, _NEW = (5, 11), 9
"""Tokens of the two rows of the check, and tokens that are added to each: windows of small copies are shorter."""
_TOLERANCE = 1e-4
"""Largest relative difference of logits from rounding in float32."""


def prefill(
    model: nn.Module, columns: Mapping[str, Tensor], arguments: Mapping[str, Any], last: Tensor
) -> tuple[Tensor, AttentionStates]:
    """Return the logits [n, V] of column `last` [n] of a rank's part of each row, and the states of all columns.

    `columns` has `input_ids` and `position_ids` [n, T/P] of the part, and `length` [n] of the whole row.
    """
    states = AttentionStates()
    with _kept_by_attention(model, states), _read_by_head(model, last):
        logits: Tensor = model(
            input_ids=columns["input_ids"], position_ids=columns["position_ids"], use_cache=False, **arguments
        ).logits
    states.align(columns["length"])
    # Some models do not call their head.
    of_rows = logits if logits.shape[1] == 1 else logits.take_along_dim(last[:, None, None], 1)
    return of_rows[:, 0], states


def extend(model: nn.Module, columns: Mapping[str, Tensor], cache: Any) -> tuple[Tensor, Any]:
    """Return the logits [n, V] after the last column, and the cache with the new columns.

    `columns` has `input_ids` and `position_ids` [n, T] of the new columns, and `is_token` [n, K], which is 0 at
    padding on the left. `cache` is None for the first call, or comes from `prefill`.
    """
    last: dict[str, Any] = {"logits_to_keep": 1} if _keeps_some_logits(type(model).forward) else {}
    kept = cache if isinstance(cache, AttentionStates) else None
    if kept is not None or cache is None:
        cache = DynamicCache(config=config_of(model))
    if kept is not None:
        cache.layers = [_Elsewhere(kept.columns) for _ in cache.layers]
    with nullcontext() if kept is None else _kept_by_attention(model, kept):
        out = model(
            input_ids=columns["input_ids"],
            attention_mask=columns["is_token"],
            position_ids=columns["position_ids"],
            past_key_values=cache,
            use_cache=True,
            **last,
        )
    return out.logits[:, -1], out.past_key_values if kept is None else kept


class _Elsewhere(DynamicLayer):  # type: ignore[misc]
    """A layer of transformers' cache without states, of which models read the number of columns for their masks."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self._columns = columns

    def get_seq_length(self) -> int:
        """Return the number of columns that attention has kept."""
        return self._columns

    def update(self, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Return the new columns alone, to which attention adds the others."""
        return key, value


@contextmanager
def _kept_by_attention(model: nn.Module, states: AttentionStates) -> Iterator[None]:
    """Let a model's attention add its keys and values to the states in one forward pass."""
    attention = split_of(model)
    assert attention is not None, "ranks share sequences"
    states.begin()
    attention.states = states
    try:
        yield
    finally:
        attention.states = None


def split_of(model: nn.Module) -> KeepingAttention | None:
    """Return the attention by which ranks share sequences; None if they do not."""
    found = (getattr(module, SPLIT_ATTENTION, None) for module in model.modules())
    return next((one for one in found if one is not None), None)


@contextmanager
def _read_by_head(model: nn.Module, columns: Tensor) -> Iterator[None]:
    """Let a model's head read one column [n] of each row: logits of a whole part of a long row need much memory."""
    rows, head = torch.arange(len(columns), device=columns.device), head_of(model)

    def cut(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return inputs[0][rows, columns][:, None], *inputs[1:]

    # Hooks of shared layers make other kinds of tensors.
    hook = None if head is None else head.register_forward_pre_hook(cut, prepend=True)
    try:
        yield
    finally:
        if hook is not None:
            hook.remove()


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
    return _is_exact(kind, json.dumps(config), positions, split_of(model) is not None)


@functools.lru_cache(maxsize=64)
def _is_exact(kind: Any, config: str, positions: int, is_split: bool) -> bool:
    measure = partial(_measure, is_split=is_split)
    try:
        difference = compute_on_copy(kind, json.loads(config), measure, length=positions)
    except SmallCopyError as error:
        log.debug("%s cannot be called with a cache: %s", kind.__name__, error)
        return False
    return difference < _TOLERANCE


def _measure(model: nn.Module, *, is_split: bool) -> float:
    """Return the relative difference of logits between rows with a cache in one batch, and whole rows alone."""
    register_attention(model)
    apply_longrope(model, part=0, parts=1)
    apply_counted(model, part=0, parts=1)
    special = special_tokens(config_of(model).to_dict())
    plain = [token for token in range(embeddings_of(model).num_embeddings) if token not in special]
    rows = [torch.tensor([(plain * 8)[3 * size : 3 * size + size + _NEW]]) for size in _LENGTHS]
    with torch.no_grad():
        expected = [model(input_ids=row, use_cache=False).logits[0] for row in rows]
        begin = _begin_split if is_split else _begin
        (logits, cache), is_token = begin(model, [row[0, :n] for row, n in zip(rows, _LENGTHS, strict=True)])
        found = [logits]
        for step in range(_NEW - 1):
            is_token = F.pad(is_token, (0, 1), value=1)
            columns = {
                "input_ids": torch.stack([row[0, n + step] for row, n in zip(rows, _LENGTHS, strict=True)])[:, None],
                "is_token": is_token,
                "position_ids": torch.tensor(_LENGTHS)[:, None] + step,
            }
            logits, cache = extend(model, columns, cache)
            found.append(logits)
    whole = torch.stack([one[n - 1 : n - 1 + _NEW] for one, n in zip(expected, _LENGTHS, strict=True)])
    return float((torch.stack(found, 1) - whole).norm() / whole.norm())


def _begin(model: nn.Module, rows: Sequence[Tensor]) -> tuple[tuple[Tensor, Any], Tensor]:
    """Return the first logits and the cache of rows that are padded on the left, and their `is_token`."""
    width = max(map(len, rows))
    ids = torch.stack([F.pad(row, (width - len(row), 0)) for row in rows])
    is_token = torch.stack([torch.arange(width) >= width - len(row) for row in rows]).long()
    positions = (is_token.cumsum(1) - 1).clamp(min=0)
    return extend(model, {"input_ids": ids, "is_token": is_token, "position_ids": positions}, None), is_token


def _begin_split(model: nn.Module, rows: Sequence[Tensor]) -> tuple[tuple[Tensor, Any], Tensor]:
    """Return the same of rows that are padded on the right, by the attention of one rank that keeps its states."""
    attention = _OneRank(divert_attention(model))
    for module in model.modules():
        setattr(module, SPLIT_ATTENTION, attention)
    # Parts of equal size have padding.
    width, lengths = max(map(len, rows)) + 1, torch.tensor([len(row) for row in rows])
    ids = torch.stack([F.pad(row, (0, width - len(row))) for row in rows])
    positions = torch.arange(width).expand(len(rows), width)
    arguments = attention_inputs(model, positions) | position_inputs(model, ids, positions, lengths)
    columns = {"input_ids": ids, "position_ids": positions, "length": lengths}
    is_token = (torch.arange(width) >= width - lengths[:, None]).long()
    return prefill(model, columns, arguments, lengths - 1), is_token


class _OneRank:
    """The attention of a rank that has all heads, and keeps keys and values as Ulysses does."""

    def __init__(self, inner: Attention) -> None:
        self._inner = inner
        self.states: AttentionStates | None = None

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *inputs: Any, **named: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the attention of a module."""
        if self.states is not None:
            key, value = self.states.add(key, value)
        return self._inner(module, query, key, value, *inputs, **named)
