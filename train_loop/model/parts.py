"""The parts of sharded tensors that a rank holds, as places in the whole tensor."""

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement, _StridedShard

_OF_FSDP = ("ddp", "fsdp")
"""Axes of meshes on which torch itself knows the one place of a shard."""


class Part(NamedTuple):
    """A rectangular part of a tensor."""

    own: Tensor
    """Its values on this rank, writable."""
    box: tuple[slice, ...]
    """Its place in the whole tensor."""


class _Span(NamedTuple):
    """Consecutive indices of a dimension."""

    first: int
    length: int


def own_parts(tensor: Tensor) -> list[Part]:
    """Return this rank's parts of a tensor; a tensor that is not sharded has one."""
    tensor = memory_of(tensor)
    if not isinstance(tensor, DTensor):
        return [Part(tensor.detach(), tuple(slice(0, size) for size in tensor.shape))]
    own = tensor.to_local().detach()
    if not is_split(tensor):
        shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        return [Part(own, tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True)))]
    spans = _own_spans(tensor)
    sizes = tuple(sum(span.length for span in dim) for dim in spans)
    assert sizes == own.shape, f"a rank's part of {list(tensor.shape)} is {list(own.shape)}, and not {list(sizes)}"
    places = product(*(_in_order(dim) for dim in spans))
    return [Part(own[tuple(local for local, _ in place)], tuple(whole for _, whole in place)) for place in places]


def memory_of(tensor: Tensor) -> Tensor:
    """Return a tensor as a plain one in the same memory: a weight that is gathered in float8 is inside of another."""
    if not isinstance(tensor, DTensor):
        return getattr(tensor, "_tensor", tensor)
    own = tensor.to_local()
    inner = memory_of(own)
    return tensor if inner is own else DTensor(inner.detach(), tensor._spec, requires_grad=False)  # type: ignore[no-untyped-call]


def is_split(tensor: DTensor) -> bool:
    """Return whether ranks of more axes than those of FSDP2 hold parts of a tensor."""
    return not set(tensor.device_mesh.mesh_dim_names or ()) <= set(_OF_FSDP)


def _own_spans(tensor: DTensor) -> list[list[_Span]]:
    """Return the indices of each dimension that this rank holds.

    FSDP2 cuts what the other axes leave on a rank. torch's own function assumes another order, and is wrong for shards
    of unequal sizes, and for weights of several matrices of which a rank has a part of each (`_StridedShard`).
    """
    mesh, spans = tensor.device_mesh, [[_Span(0, size)] for size in tensor.shape]
    axes = list(zip(mesh.mesh_dim_names or (), mesh.shape, mesh.get_coordinate() or (), tensor.placements, strict=True))
    for name, ranks, place, kind in sorted(axes, key=lambda axis: axis[0].endswith("fsdp")):
        if isinstance(kind, Replicate):
            continue
        dim, blocks = _cut(kind, is_last=name.endswith("fsdp"))
        wholes = [_chunk(spans[dim], blocks, number) for number in range(blocks)]
        spans[dim] = [span for whole in wholes for span in _chunk(whole, ranks, place)]
    return spans


def _cut(kind: Placement, *, is_last: bool) -> tuple[int, int]:
    """Return the dimension that a placement cuts, and the number of blocks of which a rank has a part each."""
    assert isinstance(kind, Shard | _StridedShard), f"only shards have a place, and {kind} is none"
    return kind.dim, int(kind.split_factor) if isinstance(kind, _StridedShard) and not is_last else 1


def _chunk(spans: list[_Span], count: int, number: int) -> list[_Span]:
    """Return one of the chunks of indices, as `torch.chunk` cuts them."""
    total = sum(span.length for span in spans)
    size = -(-total // count)
    start, stop, found, seen = min(number * size, total), min((number + 1) * size, total), list[_Span](), 0
    for first, length in spans:
        begin, end = max(start - seen, 0), min(stop - seen, length)
        if begin < end:
            found.append(_Span(first + begin, end - begin))
        seen += length
    return found


def _in_order(spans: list[_Span]) -> Iterator[tuple[slice, slice]]:
    """Yield the place of each span in this rank's shard, and in the whole dimension."""
    own = 0
    for first, length in spans:
        yield slice(own, own + length), slice(first, first + length)
        own += length
