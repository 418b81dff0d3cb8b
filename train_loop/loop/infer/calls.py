"""Calls of a model that each add a token to all rows. n: rows, T: columns, P: ranks of a sequence, V: vocabulary."""

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from train_loop.data.columns import LENGTH
from train_loop.loop.batch import MicroBatch
from train_loop.loop.infer.outputs import join_parts
from train_loop.model.families.anatomy import Anatomy
from train_loop.model.faults import own_faults
from train_loop.parallel.mesh import Mesh


class Calls(Protocol):
    """The calls of a model for one batch."""

    def begin(self) -> Tensor:
        """Return the logits [n, V] of the token after each row. A collective call."""
        ...

    def add(self, tokens: Tensor) -> Tensor:
        """Add a token [n] to the rows, and return the logits [n, V] of the next. A collective call."""
        ...


def calls_of(anatomy: Anatomy, batch: MicroBatch, mesh: Mesh, *, cached: bool) -> Calls:
    """Return the calls for the rows of a batch, with a cache if it is exact for the model."""
    if not cached:
        return WholeCalls(anatomy, batch, mesh)
    return CachedCalls(anatomy, batch) if mesh.plan.sp == 1 else SplitCalls(anatomy, batch, mesh)


class CachedCalls:
    """Calls with new tokens alone. Rows are padded on the left, so that their last tokens share a column."""

    def __init__(self, anatomy: Anatomy, batch: MicroBatch) -> None:
        self._anatomy, self._cache = anatomy, None
        # Padding rows, which other ranks wait for, have a token too: attention to nothing is not a number.
        lengths = batch.lengths.clamp(min=1)
        width = int(lengths.max())
        columns = torch.arange(width, device=lengths.device)
        missing = width - lengths[:, None]
        self._is_token = (columns >= missing).long()
        places = (columns - missing).clamp(min=0)
        self._ids, self._positions = batch.input_ids.gather(1, places), places

    def begin(self) -> Tensor:
        """Return the logits after each row, and keep its states."""
        return self._call()

    def add(self, tokens: Tensor) -> Tensor:
        """Add a token to the rows, and return the logits of the next."""
        self._ids, self._positions = tokens[:, None], self._positions[:, -1:] + 1
        self._is_token = F.pad(self._is_token, (0, 1), value=1)
        return self._call()

    def _call(self) -> Tensor:
        columns = {"input_ids": self._ids, "position_ids": self._positions, "is_token": self._is_token}
        with own_faults(self._anatomy.model):
            logits, self._cache = self._anatomy.family.extend(self._anatomy.model, columns, self._cache)
        return logits


class SplitCalls:
    """Calls with new tokens alone, of ranks that share sequences.

    Each rank has a part of the rows in the first call, and in all calls a part of the heads with their cache.
    """

    def __init__(self, anatomy: Anatomy, batch: MicroBatch, mesh: Mesh) -> None:
        self._anatomy, self._batch, self._mesh = anatomy, batch, mesh
        self._lengths = batch.lengths.clamp(min=1)
        width = batch.input_ids.shape[1] * mesh.plan.sp
        columns = torch.arange(width, device=self._lengths.device)
        # The cache has the rows' last tokens in the same column.
        self._is_token = (columns >= width - self._lengths[:, None]).long()
        self._cache: Any = None

    def begin(self) -> Tensor:
        """Return the logits after each row, and keep the states of this rank's heads."""
        anatomy, batch = self._anatomy, self._batch
        ends = _Ends(self._lengths, batch.input_ids.shape[1], self._mesh)
        columns = {**batch.values, LENGTH.name: self._lengths}
        with own_faults(anatomy.model):
            logits, self._cache = anatomy.family.prefill(anatomy.model, columns, batch.attention, ends.places)
        return ends.share(logits)

    def add(self, tokens: Tensor) -> Tensor:
        """Add a token to the rows, and return the logits of the next."""
        anatomy = self._anatomy
        self._is_token = F.pad(self._is_token, (0, 1), value=1)
        columns = {"input_ids": tokens[:, None], "position_ids": self._lengths[:, None], "is_token": self._is_token}
        self._lengths = self._lengths + 1
        with own_faults(anatomy.model):
            logits, self._cache = anatomy.family.extend(anatomy.model, columns, self._cache)
        logits = logits.contiguous()
        # Rounding may differ between devices, and all ranks must draw the same token.
        dist.broadcast(logits, group=self._mesh.sp, group_src=0)
        return logits


class WholeCalls:
    """Calls with whole rows, for models whose states a cache would not keep exactly."""

    def __init__(self, anatomy: Anatomy, batch: MicroBatch, mesh: Mesh) -> None:
        self._anatomy, self._mesh, self._lengths = anatomy, mesh, batch.lengths.clamp(min=1)
        self._ids = join_parts(batch.input_ids, mesh)[:, : int(self._lengths.max())]

    def begin(self) -> Tensor:
        """Return the logits after each row."""
        return self._call()

    def add(self, tokens: Tensor) -> Tensor:
        """Add a token to the rows, and return the logits of the next."""
        self._ids = F.pad(self._ids, (0, 1)).scatter(1, self._lengths[:, None], tokens[:, None])
        self._lengths = self._lengths + 1
        return self._call()

    def _call(self) -> Tensor:
        anatomy, mesh, (count, width) = self._anatomy, self._mesh, self._ids.shape
        part = -(-width // mesh.plan.sp)
        ids = F.pad(self._ids, (0, part * mesh.plan.sp - width))
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        whole = {"input_ids": ids, "position_ids": positions, LENGTH.name: self._lengths}
        first = mesh.sequence_rank * part
        mine = {name: whole[name][:, first : first + part] for name in ("input_ids", "position_ids")}
        with own_faults(anatomy.model):
            arguments = anatomy.family.arguments(anatomy.model, whole)
            logits = anatomy.family.call(anatomy.model, whole | mine, arguments)
        ends = _Ends(self._lengths, part, mesh)
        return ends.share(logits[torch.arange(count, device=logits.device), ends.places])


class _Ends:
    """The last tokens of rows with `lengths` [n] tokens, of which each rank has `part` columns."""

    def __init__(self, lengths: Tensor, part: int, mesh: Mesh) -> None:
        places = lengths - 1 - mesh.sequence_rank * part
        self._mesh, self._are_mine = mesh, (places >= 0) & (places < part)
        self.places = places.clamp(0, part - 1)
        """Columns [n] of this rank's part; any column for rows that end in another part."""

    def share(self, logits: Tensor) -> Tensor:
        """Return the logits [n, V] of all ends, given those at `places`. A collective call of the parts' ranks."""
        if self._mesh.plan.sp == 1:
            return logits
        shared = logits.where(self._are_mine[:, None], 0)
        dist.all_reduce(shared, group=self._mesh.sp)
        return shared
