"""The outputs of an inference job for the rows of a batch. n: rows, T: sequence length, V: vocabulary, H: width."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from train_loop.data.dataset import IGNORE
from train_loop.data.order import PADDING
from train_loop.loop.batch import MicroBatch
from train_loop.loop.objectives.objective import call_model
from train_loop.model.families.anatomy import Anatomy
from train_loop.parallel.mesh import Mesh

_TOKENS_AT_ONCE = 4096
"""Tokens whose logits are converted to fp32 at once."""


AnyBusy = Callable[[bool], bool]
"""Return whether any rank is busy, given whether this one is, and no rank has to stop. A collective call."""


class RowResult(NamedTuple):
    """The result of a row."""

    row: int
    tokens: int
    values: Mapping[str, Any]
    """Values of the output's columns (`train_loop.data.read_results.results_schema`), as numpy or Python has them."""


class Output(Protocol):
    """An output that an inference job can have."""

    def __call__(self, anatomy: Anatomy, batch: MicroBatch, mesh: Mesh, any_busy: AnyBusy) -> list[RowResult]:
        """Call the model, and return the results of the batch's rows. A collective call; peers return the same.

        An output of many calls asks `any_busy` between them. If a rank has to stop, its results are not used.
        """
        ...


class Logprobs:
    """The log probability of each token after the first, given those before it."""

    def __call__(self, anatomy: Anatomy, batch: MicroBatch, mesh: Mesh, any_busy: AnyBusy) -> list[RowResult]:
        """Return a float32 array with a value per token after the first for each row."""
        found = token_logprobs(anatomy, batch, mesh).cpu().numpy()
        return [RowResult(row, size, {"logprobs": found[place, : size - 1]}) for place, row, size in rows_of(batch)]


class Perplexity:
    """The perplexity of each row: the exponential of the mean of -logprobs; null for a row of one token."""

    def __call__(self, anatomy: Anatomy, batch: MicroBatch, mesh: Mesh, any_busy: AnyBusy) -> list[RowResult]:
        """Return a number for each row."""
        found = token_logprobs(anatomy, batch, mesh).double().sum(1).tolist()
        return [
            RowResult(row, size, {"perplexity": _exponential(-found[place] / (size - 1)) if size > 1 else None})
            for place, row, size in rows_of(batch)
        ]


class Embeddings:
    """The vector that the model's embedding head gives for each row."""

    def __call__(self, anatomy: Anatomy, batch: MicroBatch, mesh: Mesh, any_busy: AnyBusy) -> list[RowResult]:
        """Return a float32 array [H] for each row."""
        found = call_model(anatomy, batch).float().cpu().numpy()
        return [RowResult(row, size, {"embedding": found[place]}) for place, row, size in rows_of(batch)]


OUTPUTS: dict[str, Output] = {"logprobs": Logprobs(), "perplexity": Perplexity(), "embeddings": Embeddings()}
"""Outputs of one call of the model, by their names in a spec."""


def _exponential(value: float) -> float:
    # Infinity instead of OverflowError.
    return torch.tensor(value, dtype=torch.float64).exp().item()


def token_logprobs(anatomy: Anatomy, batch: MicroBatch, mesh: Mesh) -> Tensor:
    """Return the log probability of the token after each position, [n, T] in fp32 on every rank; 0 without one.

    A collective call of the ranks that share the sequence.
    """
    logits, labels = call_model(anatomy, batch), batch.labels
    parts = zip(*(torch.split(one, _TOKENS_AT_ONCE) for one in (logits.flatten(0, 1), labels.flatten())), strict=True)
    losses = [F.cross_entropy(some.float(), its, ignore_index=IGNORE, reduction="none") for some, its in parts]
    return join_parts(-torch.cat(losses).view(labels.shape), mesh)


def join_parts(mine: Tensor, mesh: Mesh) -> Tensor:
    """Return whole sequences [n, T] from the parts of the ranks that share them, a collective call of these."""
    if mesh.plan.sp == 1:
        return mine
    whole = [torch.empty_like(mine) for _ in range(mesh.plan.sp)]
    dist.all_gather(whole, mine.contiguous(), group=mesh.sp)
    return torch.cat(whole, 1)


def rows_of(batch: MicroBatch) -> list[tuple[int, int, int]]:
    """Return the place, the id and the number of tokens of each row that is not padding."""
    numbers = zip(batch.samples.tolist(), batch.lengths.tolist(), strict=True)
    return [(place, row, size) for place, (row, size) in enumerate(numbers) if row != PADDING]
