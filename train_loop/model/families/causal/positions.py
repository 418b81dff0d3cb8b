"""A model's uses of token positions beyond the rotation of queries and keys."""

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
Angles = tuple[Tensor, Tensor]
Rotate = Callable[..., Angles]
_PLACE_OF_INDEX = {aten.embedding.default: 1, aten.gather.default: 2, aten.index_select.default: 2}


class TableWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that finds the tables that positions index: learned positions, or precomputed sines.

    It follows the tensor of positions through every operation, including the integers that are added to it.
    """

    def __init__(self, positions: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._followed: dict[int, tuple[Tensor, int]] = {id(positions): (positions, 0)}
        """Followed tensors by id, with the integer that was added; the reference keeps the id unique."""
        self.rows: list[int] = []
        """Number of positions that each table holds."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is aten.index.Tensor:
            self._index(args[0], 0, args[1][0])
        elif func in _PLACE_OF_INDEX:
            self._index(args[0], args[1] if func is not aten.embedding.default else 0, args[_PLACE_OF_INDEX[func]])
        elif isinstance(out, Tensor) and not out.is_floating_point() and out.dtype != torch.bool and args:
            self._follow(func, args, out)
        return out

    def _index(self, table: Tensor, dim: int, index: Any) -> None:
        if id(index) in self._followed:
            self.rows.append(table.shape[dim] - self._followed[id(index)][1])

    def _follow(self, func: Any, args: Any, out: Tensor) -> None:
        source = next((arg for arg in args if id(arg) in self._followed), None)
        if source is None:
            return
        added = self._followed[id(source)][1]
        if func.overloadpacket in (aten.add, aten.sub):
            number = next((arg for arg in args if isinstance(arg, int)), 0)
            added += number if func.overloadpacket is aten.add else -number
        self._followed[id(out)] = (out, added)


@dataclass(frozen=True)
class PositionLimits:
    """Maximum numbers of positions, beyond which a model fails or its results cannot be reproduced."""

    table: int | None
    """Rows of the shortest table of positions; None if there is none."""
    dynamic: int | None
    """Number of positions up to which rope_type=dynamic keeps its frequencies; None for other models."""
    kept: int | None = None
    """Tokens that each token sees of a longer sequence, selected by scores (Doge); None for other models."""


def rotated_positions(config: Any) -> int | None:
    """Return the positions that a config states for a model that rotates queries and keys; None for other models.

    Scaled ones reach further: some configs state the positions after it, and some those before.
    """
    stated, rope = getattr(config, "max_position_embeddings", None), getattr(config, "rope_parameters", None)
    if not isinstance(stated, int) or not isinstance(rope, dict) or getattr(config, "alibi", False):
        return None
    every = [rope, *(one for one in rope.values() if isinstance(one, dict))]
    scaled = [(one.get("factor") or 1) * (one.get("original_max_position_embeddings") or stated) for one in every]
    return int(max(stated, *scaled))


def fix_dynamic(model: nn.Module) -> int | None:
    """Make a model with rope_type=dynamic keep its frequencies; return the maximum positions for which it would.

    The dynamic type reads the positions' values, which tensors on meta do not have. Returns None for other models.
    """
    limits = list[int]()
    for module in _rotary(model, "dynamic"):
        limits.append(int(module.original_max_seq_len))  # type: ignore[arg-type]
        types = module.rope_type
        module.rope_type = dict.fromkeys(types, "default") if isinstance(types, dict) else "default"  # type: ignore[assignment]
    return min(limits, default=None)


class DocumentLengths:
    """Lengths of the documents in the current micro-batch, for a model with rope_type=longrope.

    transformers selects longrope's short or long factors by the largest position in its input. Here each document gets
    the factors that it would get alone, whatever shares its row, its micro-batch or its sequence.
    """

    ARGUMENT = "document_lengths"
    """Name of the model's argument with the lengths [B, T]: for each token, the tokens of its document."""

    def __init__(self, part: int, parts: int) -> None:
        self._part, self._parts = part, parts
        self._now: Tensor | None = None

    def keep(self, model: nn.Module, inputs: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Remove the lengths from the model's arguments, which its own forward does not accept, and keep them."""
        named = dict(named)
        lengths = named.pop(self.ARGUMENT, None)
        self._now = None if lengths is None else lengths.chunk(self._parts, dim=1)[self._part]
        return inputs, named

    def rotate(
        self, module: nn.Module, forward: Rotate, x: Tensor, position_ids: Tensor, layer_type: str | None = None
    ) -> Angles:
        """Return cosines and sines [B, T/P, D] of a rotary embedding whose own rule is `forward`."""
        named = {} if layer_type is None else {"layer_type": layer_type}
        parameters: Any = module.config.rope_parameters  # type: ignore[union-attr]
        if layer_type is not None:
            parameters = parameters[layer_type]
        if self._now is None or parameters["rope_type"] != "longrope":
            return forward(x, position_ids, **named)
        most = parameters["original_max_position_embeddings"]
        is_short = self._now <= most
        # Positions of padding continue after the last document and may exceed the limit.
        short = forward(x, position_ids.where(is_short, 0).clamp(max=most - 1), **named)
        # An extra position, which is not used, makes transformers select the long factors.
        beyond = position_ids.new_full((len(position_ids), 1), most)
        long = forward(x, torch.cat([position_ids, beyond], dim=1), **named)
        cos, sin = (torch.where(is_short[..., None], a, b[:, :-1]) for a, b in zip(short, long, strict=True))
        return cos, sin


def apply_longrope(model: nn.Module, *, part: int, parts: int) -> None:
    """Make each document use longrope's factors for its own length.

    The rank sees part number `part`, from 0, of the `parts` of a sequence.
    """
    modules = list(_rotary(model, "longrope"))
    if not modules:
        return
    lengths = DocumentLengths(part, parts)
    for module in modules:
        module.forward = functools.partial(lengths.rotate, module, module.forward)
    model.register_forward_pre_hook(lengths.keep, with_kwargs=True)
    model.needs_document_lengths = True  # type: ignore[assignment]


def longrope_limit(model: nn.Module) -> int | None:
    """Return the tokens of a document up to which longrope keeps its short factors; None for other models."""
    limits = list[int]()
    for module in _rotary(model, "longrope"):
        every: Any = module.config.rope_parameters  # type: ignore[union-attr]
        for rope in (every, *(one for one in every.values() if isinstance(one, dict))):
            if rope.get("rope_type") == "longrope":
                limits.append(rope["original_max_position_embeddings"])
    return min(limits, default=None)


class CountedPositions:
    """Positions of a model that counts them from `padding_idx + 1`, and gives padding the position `padding_idx`.

    RoBERTa and its kind count the tokens of a document that are not padding, also if padding is within its text.
    """

    ARGUMENT = "counted_positions"
    """Name of the model's argument with the positions [B, T] of whole rows."""

    def __init__(self, padding: int, part: int, parts: int) -> None:
        self.padding = padding
        self._part, self._parts = part, parts

    def put(self, model: nn.Module, inputs: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Replace positions from 0 in the model's arguments; without an argument of this class, no token is padding."""
        named = dict(named)
        counted, from_0 = named.pop(self.ARGUMENT, None), named.get("position_ids")
        if counted is not None:
            named["position_ids"] = counted.chunk(self._parts, dim=1)[self._part]
        elif from_0 is not None:
            named["position_ids"] = from_0 + (self.padding + 1)
        return inputs, named

    def count(self, tokens: Tensor, position_ids: Tensor) -> Tensor:
        """Return the positions [B, T] of whole rows, from their positions in documents, which begin at 0."""
        is_text = (tokens != self.padding).long()
        total = is_text.cumsum(1)
        start = torch.arange(tokens.shape[1], device=tokens.device) - position_ids
        before = (total - is_text).gather(1, start)
        return (total - before) * is_text + self.padding


def apply_counted(model: nn.Module, *, part: int, parts: int) -> None:
    """Make a model of RoBERTa's kind count positions as alone in transformers, in place; other models stay.

    The rank sees part number `part`, from 0, of the `parts` of a sequence.
    """
    padding = padding_of(model)
    if padding is not None:
        counted = CountedPositions(padding, part, parts)
        model.register_forward_pre_hook(counted.put, with_kwargs=True)
        model.counted_positions = counted  # type: ignore[assignment]


def padding_of(model: nn.Module) -> int | None:
    """Return the padding token of a model of RoBERTa's kind, behind which its positions begin; None for others."""
    for module in model.modules():
        table, padding = getattr(module, "position_embeddings", None), getattr(module, "padding_idx", None)
        if isinstance(table, nn.Embedding) and table.padding_idx is not None and isinstance(padding, int):
            return padding
    return None


def position_inputs(model: nn.Module, tokens: Tensor, position_ids: Tensor, lengths: Tensor) -> dict[str, Tensor]:
    """Return the extra arguments for positions [B, T] of a model that `apply_…` has changed; none for other models.

    `lengths` [B] counts the tokens of each row that are not padding.
    """
    counted: CountedPositions | None = getattr(model, "counted_positions", None)
    if counted is not None:
        return {CountedPositions.ARGUMENT: counted.count(tokens, position_ids)}
    if not getattr(model, "needs_document_lengths", False):
        return {}
    document = (position_ids == 0).cumsum(1) - 1
    is_token = torch.arange(position_ids.shape[1], device=position_ids.device) < lengths[:, None]
    counts = torch.zeros_like(position_ids).scatter_add(1, document, is_token.to(position_ids.dtype))
    return {DocumentLengths.ARGUMENT: counts.gather(1, document)}


def _rotary(model: nn.Module, kind: str) -> Iterable[nn.Module]:
    """Yield the rotary embeddings of a rope_type, which all layers or only some have."""
    for module in model.modules():
        types = getattr(module, "rope_type", None)
        if kind in (types.values() if isinstance(types, dict) else [types]):
            yield module
