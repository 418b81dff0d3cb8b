"""The places of a rank's shards: what a rank holds is what its places say, in every layout and at every shape."""

import os
import random
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from train_loop.checkpoint.parts import Parts
from train_loop.model.parts import own_parts

CASES = 400 if os.environ.get("MORE") else 40
MESHES = ((2, 2), (4, 2), (2, 4), (1, 2), (8, 1))


def shards(whole: Tensor, fsdp: int, tp: int, dim: int | None, blocks: int) -> Iterator[tuple[int, Tensor]]:
    """Yield each rank's shard as it comes to be: split by tp, which takes a part of each block, then by FSDP2."""
    for rank in range(fsdp * tp):
        place, part = divmod(rank, tp)
        own = whole
        if dim is not None:
            own = torch.cat([_chunk(block, tp, part, dim) for block in torch.tensor_split(whole, blocks, dim)], dim)
        yield rank, _chunk(own, fsdp, place, 0)


def _chunk(values: Tensor, count: int, number: int, dim: int) -> Tensor:
    chunks = torch.chunk(values, count, dim)
    return chunks[number] if number < len(chunks) else values.narrow(dim, 0, 0)


def sharded(own: Tensor, whole: Tensor, mesh: DeviceMesh, dim: int | None, blocks: int) -> DTensor:
    """Return a shard as FSDP2 describes it."""
    of_tp: Placement = (
        Replicate() if dim is None else Shard(dim) if blocks == 1 else _StridedShard(dim, split_factor=blocks)
    )
    of_fsdp: Placement = _StridedShard(0, split_factor=mesh.size(1)) if dim == 0 and mesh.size(1) > 1 else Shard(0)
    return DTensor.from_local(own, mesh, [of_fsdp, of_tp], run_check=False, shape=whole.shape, stride=whole.stride())


@pytest.mark.parametrize(("fsdp", "tp"), MESHES)
def test_parts_are_where_a_rank_has_them(fsdp: int, tp: int) -> None:
    draw, misplaced = random.Random(0), 0
    for rank in range(fsdp * tp):
        dist.init_process_group("fake", rank=rank, world_size=fsdp * tp, store=FakeStore())
        try:
            mesh = init_device_mesh("cpu", (fsdp, tp), mesh_dim_names=("fsdp", "tp"))
            draw.seed(0)
            for _ in range(CASES):
                misplaced += check(rank, mesh, draw)
        finally:
            dist.destroy_process_group()
    assert misplaced or tp == 1 or fsdp == 1, "torch alone places all of them right, so that `own_parts` is not needed"


def check(rank: int, mesh: DeviceMesh, draw: random.Random) -> bool:
    """Check a tensor of a drawn shape; return whether torch's own function misplaces it."""
    dim = draw.choice((None, 0, 0, 1))
    blocks = draw.choice((1, 2)) if dim is not None else 1
    shape = [draw.randint(1, 23), draw.randint(1, 9), *([3] if draw.random() < 0.3 else [])]
    if blocks > 1:
        assert dim is not None
        shape[dim] *= blocks
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    own = dict(shards(whole, mesh.size(0), mesh.size(1), dim, blocks))[rank]
    tensor = sharded(own, whole, mesh, dim, blocks)
    for values, box in own_parts(tensor):
        assert torch.equal(values, whole[box])
    assert sum(values.numel() for values, _ in own_parts(tensor)) == own.numel()
    seen = Parts(tensor)
    assert all(torch.equal(part, own_of(seen, whole, offsets)) for offsets, part in seen.parts.items())
    size, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, tensor.placements)
    place = tuple(slice(start, start + length) for start, length in zip(offset, size, strict=True))
    return own.numel() > 0 and not torch.equal(whole[place], own)


def own_of(seen: Parts, whole: Tensor, offsets: torch.Size) -> Tensor:
    sizes = seen.parts[offsets].shape
    return whole[tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))]
