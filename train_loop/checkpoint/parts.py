"""Sharded tensors as DCP sees them, with the place of each part that a rank holds.

DCP takes a rank's shard for one rectangle at the place that torch computes. That is wrong for some shards of ranks that
share layers: a checkpoint would hold them in another order, without an error.
"""

from typing import Any, Self

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map, tree_map_only

from train_loop.model.parts import is_split, own_parts


class Parts(Tensor):
    """A tensor of which a rank holds several parts; DCP reads and writes them in place."""

    parts: dict[torch.Size, Tensor]
    """The parts by their offsets."""
    of: DTensor

    @staticmethod
    def __new__(cls: type[Self], of: DTensor) -> Self:
        """Describe a sharded tensor; its memory stays where it is."""
        self: Self = Tensor._make_wrapper_subclass(cls, of.shape, dtype=of.dtype, device=of.to_local().device)
        self.parts = {torch.Size(part.start for part in box): own for own, box in own_parts(of) if own.numel()}
        self.of = of
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Raise TypeError: only DCP uses it."""
        raise TypeError(f"{func} of a tensor that is only described")

    def __create_write_items__(self, name: str, tensor: Tensor) -> list[WriteItem]:
        """Return the parts to write. Called by DCP."""
        properties = TensorProperties.create_from_tensor(self.of.to_local())
        return [
            WriteItem(
                MetadataIndex(name, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.of.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Return the places of the parts. Called by DCP."""
        return [ChunkStorageMetadata(offsets, own.shape) for offsets, own in self.parts.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """Return a part. Called by DCP."""
        assert index.offset is not None, f"{index.fqn} has parts"
        return self.parts[torch.Size(index.offset)]


def described(values: dict[str, Any]) -> dict[str, Any]:
    """Return values in which tensors that DCP would misplace are described by their parts."""
    found: dict[str, Any] = tree_map_only(DTensor, lambda one: Parts(one) if is_split(one) else one, values)
    return found


def plain(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values that `described` has described; DCP has read their parts in place."""
    found: dict[str, Any] = tree_map(lambda one: one.of if isinstance(one, Parts) else one, values)
    return found
