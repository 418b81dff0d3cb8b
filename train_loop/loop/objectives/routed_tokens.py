"""The tokens that a rank routes. n: rows, T: tokens of a sequence, P: Ulysses ranks, Q: parts of a rank's slice."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from train_loop.loop.batch import MicroBatch
from train_loop.loop.reduction import sum_once
from train_loop.parallel.mesh import Mesh


@dataclass(frozen=True)
class RoutedTokens:
    """The part of each sequence whose tokens a rank routes: its slice, or with `is_split` a part of this slice.

    Ranks that share layers have one slice, and a part of its tokens each between projections (sequence parallelism).
    """

    mesh: Mesh
    is_split: bool

    def own(self, values: Tensor) -> Tensor:
        """Return the values of the tokens that this rank routes, [n, T/P] → [n, T/P/Q]."""
        if not self.is_split:
            return values
        return values.chunk(self.mesh.plan.tp, dim=1)[self.mesh.plan.tensor_rank(self.mesh.rank)]

    def valid(self, batch: MicroBatch) -> Tensor:
        """Return whether each token that this rank routes is not padding, [n, T/P/Q]."""
        width = batch.position_ids.shape[1]
        places = torch.arange(width, device=batch.lengths.device) + self.mesh.sequence_rank * width
        return self.own(places < batch.lengths[:, None])

    def documents(self, position_ids: Tensor) -> tuple[Tensor, int]:
        """Return the number of each token's document in the micro-batch, [n, T/P/Q], and the number of documents.

        `position_ids` are those of this rank's slice [n, T/P]. Tokens before the first position 0 continue the document
        of the slice before.
        """
        mesh, begins = self.mesh, (position_ids == 0).long()
        table = begins.new_zeros(mesh.plan.sp, len(begins))
        table[mesh.sequence_rank] = begins.sum(1)
        dist.all_reduce(table, group=mesh.sp)
        most = int(table.sum(0).max()) + 1
        before = table[: mesh.sequence_rank].sum(0)
        rows = torch.arange(len(begins), device=begins.device)[:, None] * most
        return self.own(rows + before[:, None] + begins.cumsum(1)), len(begins) * most

    @property
    def sequence(self) -> dist.ProcessGroup:
        """The ranks that route different tokens of the same sequences."""
        return self.mesh.peers if self.is_split else self.mesh.sp

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum of values of all tokens over all ranks. A collective call."""
        if not self.is_split:
            return sum_once(values, self.mesh)
        dist.all_reduce(values)
        return values

    def of_slice(self, value: Tensor) -> Tensor:
        """Return the sum of a value over the parts of a slice, whose gradient is that of this rank's part.

        A collective call.
        """
        if not self.is_split or self.mesh.tp is None:
            return value
        whole = value.detach().clone()
        dist.all_reduce(whole, group=self.mesh.tp.get_group())
        return value + (whole - value.detach())
