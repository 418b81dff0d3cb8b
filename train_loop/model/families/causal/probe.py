"""A probe of a model's forward pass without weights: one call on the meta device, which computes nothing.

It shows whether the attention comes from the registry, with how many heads, and whether the head is the last operation.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from train_loop.errors import ModelError
from train_loop.model.families.after_head import HeadWatch, Step
from train_loop.model.families.anatomy import Anatomy
from train_loop.model.families.causal.attention import attention_replaced
from train_loop.model.families.causal.build import config_of
from train_loop.model.families.causal.config import why_not_called
from train_loop.model.families.causal.experts import route_on_meta
from train_loop.model.families.causal.positions import PositionLimits, TableWatch, apply_counted, fix_dynamic
from train_loop.model.families.causal.separation import (
    Separation,
    check_slices,
    measure_copy,
    position_limit,
)
from train_loop.model.families.family import HEAD_BIAS, AttentionUse
from train_loop.model.families.kept import ChangedResults, count_kept
from train_loop.model.lora.adapters import leave_out_parameters
from train_loop.plan import KeptBytes
from train_loop.spec import JobSpec

_LENGTH = 8
_COUNTED = 256
"""Most tokens of the row in which kept bytes are counted: a chunk of state-space layers."""
_WARNING = "warn_if_padding_and_no_attention_mask"
"""Method of models that looks at the values of tokens, which tensors on meta do not have."""

_SPLIT = ("position_ids", HEAD_BIAS)
"""Arguments of attention that are not by head, or that Ulysses splits."""
_ADAPTERS = "lang_adapter"
"""Method of XMOD's layers that selects rows by their values; a run has rows of one language."""


@dataclass(frozen=True)
class ModelProbe:
    """Properties of a model that its forward pass shows."""

    model: str
    """Name of the model's class."""
    attention: dict[str, AttentionUse]
    """Modules whose attention came from the transformers registry, by name."""
    by_head: bool
    """True if attention also gets tensors with a value per head, such as biases."""
    layers: int
    after_head: tuple[Step, ...] | None
    """Steps from the output embeddings to the logits, such as a scale; None if they are not known."""
    positions: PositionLimits
    separation: Separation
    changes_results: bool = False
    """True if layers change results in place that `selective` keeps."""


def probe(anatomy: Anatomy, dtype: torch.dtype = torch.float32, *, sequence_length: int | None = None) -> ModelProbe:
    """Call a copy of a model on the meta device once, in the dtype of training, for sequences of a length.

    Raises ModelError if the model does not accept this loop's call.
    """
    original, name = anatomy.model, type(anatomy.model).__name__
    separation = measure_copy(original, sequence_length)
    if not separation.takes_masks:
        original.takes_only_tokens = True  # type: ignore[assignment]
    copied, dynamic = _copy(anatomy, dtype)
    model, head, config = copied.model, copied.head, config_of(original)
    watch, after = _AttentionWatch(model), HeadWatch()
    # Only a model of embeddings has no head.
    hook = None if head is None else head.register_forward_hook(lambda _, __, out: after.follow(out))
    columns, arguments = _call(model, _LENGTH)
    tables, changes = TableWatch(columns["position_ids"]), ChangedResults(copied.layers)
    try:
        with torch.no_grad(), changes, tables, after, attention_replaced(model, watch):
            logits = anatomy.family.call(model, columns, arguments)
        steps = after.steps(logits)
    except Exception as error:  # errors of a forward pass have no common class
        if separation.takes_masks:
            raise ModelError(
                f"{name} cannot be called with input_ids, position_ids and an attention mask of [1, 1, T, T], as this "
                f"loop does{why_not_called(error, config)}; choose another model or config"
            ) from error
        steps = None  # it needs the values of tokens, as XLNet does
    finally:
        if hook is not None:
            hook.remove()
    _check_heads(name, watch.uses)
    limits = (*tables.rows, *position_limit(original, sequence_length))
    return ModelProbe(
        name,
        watch.uses,
        watch.by_head,
        layers=anatomy.depth,
        after_head=steps,
        positions=PositionLimits(min(limits, default=None), dynamic, getattr(config, "keep_window_size", None)),
        separation=separation,
        changes_results=changes.found,
    )


def _copy(anatomy: Anatomy, dtype: torch.dtype) -> tuple[Anatomy, int | None]:
    """Return a copy of a model that can be called on meta, and the positions for which rope_type=dynamic is right.

    The model itself may keep tensors of its first call, which are on meta here.
    """
    model = copy.deepcopy(anatomy.model).to(dtype)
    for module in model.modules():
        if hasattr(module, _WARNING):
            setattr(module, _WARNING, lambda *_: None)
    choose_language(model)
    apply_counted(model, part=0, parts=1)
    route_on_meta(model)
    leave_out_parameters(model)
    return anatomy.family.anatomy(model), fix_dynamic(model)


def choose_language(model: nn.Module) -> None:
    """Make layers of XMOD pass one adapter, so that they need no values."""
    for module in model.modules():
        if hasattr(module, _ADAPTERS):
            setattr(module, _ADAPTERS, partial(_adapt, module))


def _adapt(module: Any, languages: Tensor, states: Tensor) -> Tensor:
    adapted: Tensor = next(iter(module.adapter_modules.values()))(states)
    return adapted


def _call(model: nn.Module, length: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return columns of a row on meta, and the mask of a model that takes masks."""
    tokens = torch.zeros(1, length, dtype=torch.int64, device="meta")
    mask = torch.ones(1, 1, length, length, dtype=torch.bool, device="meta")
    columns = {"input_ids": tokens, "position_ids": torch.zeros_like(tokens)}
    return columns, {} if getattr(model, "takes_only_tokens", False) else {"attention_mask": mask}


class _KeptAttention(torch.autograd.Function):
    """Attention that computes nothing, and keeps its inputs and output as kernels do."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        out = query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3])
        # Kernels add masks to scores: each call makes numbers of true and false.
        ctx.save_for_backward(query, key, value, out, mask if mask is None else mask.to(query.dtype))
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return *map(torch.empty_like, ctx.saved_tensors[:3]), None


def keep_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any = None, *_: Any, **__: Any
) -> Any:
    """Keep what a kernel keeps of attention for backward, and compute nothing."""
    given = mask if isinstance(mask, Tensor) else None
    return _KeptAttention.apply(query, key, value, given), None  # type: ignore[no-untyped-call]


def kept_for_backward(
    anatomy: Anatomy,
    dtype: torch.dtype,
    sequence_length: int,
    layers: Sequence[nn.Module],
    tiled: Sequence[nn.Module],
    *,
    tiles: int,
    cut: Callable[[nn.Module], None],
    parts: int = 1,
) -> KeptBytes | None:
    """Count the bytes that a call of a model keeps for backward; None if it cannot be called on meta.

    The `tiled` MLPs compute in `tiles`. `cut` makes a copy of the model the part that a rank has, with one of `parts`
    of the tokens between projections.
    """
    names = {module: name for name, module in anatomy.model.named_modules()}
    tokens = max((min(sequence_length, _COUNTED) - 1) // parts, 1) * parts

    def count(*, each: bool) -> KeptBytes:
        built, _ = _copy(anatomy, dtype)
        cut(built.model)
        columns, arguments = _call(built.model, tokens)
        copied, mlps = ([built.model.get_submodule(names[one]) for one in some] for some in (layers, tiled))
        with attention_replaced(built.model, keep_attention):
            return count_kept(
                built,
                copied,
                lambda: built.family.call(built.model, columns, arguments),
                tokens=tokens,
                tiles=dict.fromkeys(mlps, tiles),
                each=each,
            )

    for each in (False, True):  # some layers need more of earlier ones than their output
        with suppress(Exception):  # errors of a forward pass have no common class
            return count(each=each)
    return None


def _check_heads(model: str, uses: Mapping[str, AttentionUse]) -> None:
    """Raise ModelError if kv heads cannot be shared evenly, which only the first step would show."""
    for module, use in uses.items():
        if use.heads % use.kv_heads:
            raise ModelError(
                f"{module} of {model} has {use.heads} attention heads and {use.kv_heads} kv heads; the first must be a "
                "multiple of the second; correct them in the model's config"
            )


class _AttentionWatch:
    """An attention function that computes nothing and counts its callers and their heads."""

    def __init__(self, model: nn.Module) -> None:
        self._names = {module: name for name, module in model.named_modules()}
        self.uses = dict[str, AttentionUse]()
        self.by_head = False

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **named: Any
    ) -> tuple[Tensor, None]:
        name = self._names[module]
        calls = self.uses[name].calls if name in self.uses else 0
        self.uses[name] = AttentionUse(query.shape[1], key.shape[1], calls + 1)
        extra = [attention_mask, *(one for field, one in named.items() if field not in _SPLIT)]
        # The mask [1, 1, T, T] is the same for all heads; numbers by head [H] are split like them.
        self.by_head |= any(
            isinstance(one, Tensor) and one.shape != query.shape[1:2] and (one.dim() < 4 or one.shape[1] > 1)
            for one in extra
        )
        return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None


def check_positions(seen: ModelProbe, spec: JobSpec) -> None:
    """Raise ModelError if a sequence has positions without values, or with values that a restart cannot repeat."""
    length, limits = spec.positions, seen.positions
    new = length - spec.data.sequence_length
    asked = (
        f"sequence_length={length}"
        if not new
        else (f"sequence_length={length - new} and max_new_tokens={new} together are {length}, which")
    )
    if limits.table is not None and length > limits.table:
        raise ModelError(
            f"{asked} is more than the {limits.table} positions of {seen.model}; choose at most "
            f"{limits.table}, or a model with more"
        )
    if limits.kept is not None and length > limits.kept:
        raise ModelError(
            f"{asked} is above keep_window_size={limits.kept}; {seen.model} then selects tokens by "
            "scores of which many are equal at first, and the selection depends on other documents; choose at most "
            f"{limits.kept}, or a larger keep_window_size"
        )
    if limits.dynamic is not None and length > limits.dynamic:
        raise ModelError(
            f"{asked} is more than max_position_embeddings={limits.dynamic}, and rope_type=dynamic of "
            f"{seen.model} then depends on the longest sequence so far, which a resumed run has not seen; choose at "
            f"most {limits.dynamic}, or rope_type: yarn"
        )


def check_attention(seen: ModelProbe, spec: JobSpec) -> None:
    """Raise ModelError if Ulysses cannot split the sequences of a model."""
    size = spec.strategy.ulysses_size
    if size == 1:
        return
    calls = sum(use.calls for use in seen.attention.values())
    if calls < seen.layers:
        raise ModelError(
            f"ulysses_size={size} needs attention that can be split by heads, which "
            f"{calls} of the {seen.layers} layers of {seen.model} use; choose ulysses_size: 1"
        )
    if seen.by_head:
        raise ModelError(
            f"ulysses_size={size} distributes heads, and attention of {seen.model} has masks or biases of its own for "
            "each; choose ulysses_size: 1"
        )
    for name, use in seen.attention.items():
        if use.heads % size or (use.kv_heads % size and size % use.kv_heads):
            raise ModelError(
                f"ulysses_size={size} must divide the {use.heads} heads of {name}, and divide its {use.kv_heads} kv "
                "heads or be a multiple of them; choose a smaller one"
            )
    check_slices(seen.separation, spec, seen.model)


def check_recomputation(seen: ModelProbe, spec: JobSpec) -> None:
    """Raise ModelError for kept results of a model whose layers change them in place."""
    if spec.model.gradient_checkpointing == "selective" and seen.changes_results:
        raise ModelError(
            f"gradient_checkpointing=selective keeps results of matrix products, and layers of {seen.model} change "
            "some of them in place; choose full or {every: 2}"
        )


def check_head(seen: ModelProbe, spec: JobSpec) -> None:
    """Raise ModelError for a chunked loss of a model whose logits are more than numbers on the output of its head."""
    if spec.training.chunked_loss and seen.after_head is None:
        raise ModelError(
            "chunked_loss needs logits that are the output of the head, scaled or capped at most, and "
            f"{seen.model} changes them in another way; remove chunked_loss"
        )
