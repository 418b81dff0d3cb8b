"""Loss and every gradient of every mesh equal those of one rank on the same samples."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.support.ranks import on_ranks
from tests.support.specs import TINY, spec
from train_loop.batch import micro_batches, share_rows
from train_loop.data.dataset import IGNORE, Rows
from train_loop.model.build import build_model, materialise
from train_loop.model_folder import model_shape
from train_loop.parallel.mesh import build_mesh
from train_loop.parallel.shard import parallelize
from train_loop.plan import plan_job
from train_loop.step import accumulate

SAMPLES, LENGTH = 8, 32
Gradients = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """A mesh and a model."""

    fsdp: int
    sp: int
    kv_heads: int = 2
    tied: bool = False
    micro_batch: int = 2
    model: str = "qwen3"

    def __str__(self) -> str:
        return f"fsdp{self.fsdp}-sp{self.sp}-kv{self.kv_heads}-{'tied' if self.tied else 'untied'}-{self.model}"

    @property
    def reference(self) -> "Case":
        """The same model on one rank, all samples in one micro-batch."""
        return Case(0, 1, self.kv_heads, self.tied, SAMPLES, self.model)


CASES = [
    Case(fsdp=4, sp=1),
    Case(fsdp=4, sp=2),
    Case(fsdp=2, sp=1),
    Case(fsdp=2, sp=2),
    Case(fsdp=4, sp=4, micro_batch=1),
    Case(fsdp=4, sp=2, kv_heads=1),
    Case(fsdp=2, sp=2, kv_heads=1, tied=True),
    Case(fsdp=4, sp=4, kv_heads=2, tied=True, micro_batch=8),
    Case(fsdp=4, sp=2, kv_heads=4, model="llama"),
    Case(fsdp=4, sp=2, model="qwen2"),
]


def uneven_rows() -> Rows:
    """Samples of packed documents, prompts that are not trained on, and one sample with nothing to train."""
    draw = np.random.default_rng(0)
    ids = draw.integers(0, TINY["vocab_size"], (SAMPLES, LENGTH)).astype(np.int32)
    labels, positions = ids.copy(), np.zeros_like(ids)
    for row in range(SAMPLES):
        cuts = sorted({0, *draw.integers(1, LENGTH, row % 4).tolist(), LENGTH})
        positions[row] = np.concatenate([np.arange(b - a) for a, b in pairwise(cuts)])
        labels[row, : draw.integers(0, LENGTH // 2)] = IGNORE
    labels[3] = IGNORE
    return Rows(np.arange(SAMPLES), np.full(SAMPLES, LENGTH, np.int32), ids, labels, positions)


def gradients(case: Case) -> tuple[float, Gradients]:
    """One accumulated step of a case on the ranks that there are."""
    config = TINY | {"model_type": case.model, "num_key_value_heads": case.kv_heads, "tie_word_embeddings": case.tied}
    job = spec(
        model={"config": config, "gradient_checkpointing": "full"},
        strategy={"fsdp_size": case.fsdp, "ulysses_size": case.sp},
        scaling={"num_workers": dist.get_world_size()},
    )
    mesh = build_mesh(plan_job(job, model_shape(job.model)).mesh, torch.device("cpu"))
    model, blueprint = build_model(job.model), build_model(job.model)
    parallelize(model, mesh, job)
    materialise(model, blueprint, seed=0, device=mesh.device)

    rows, per_rank = uneven_rows(), SAMPLES // mesh.plan.dp
    mine = rows.slice(mesh.data_rank * per_rank, (mesh.data_rank + 1) * per_rank) if mesh.sequence_rank == 0 else None
    batch = share_rows(mine, count=per_rank, length=LENGTH, mesh=mesh)
    tokens = batch.trained_tokens.clone() if mesh.sequence_rank == 0 else torch.zeros((), dtype=torch.int64)
    dist.all_reduce(tokens)
    loss = accumulate(model, micro_batches(batch, case.micro_batch, model, mesh), int(tokens))
    return loss.item(), {name: _whole(p.grad) for name, p in model.named_parameters()}


def _whole(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def all_cases(cases: list[Case]) -> dict[Case, tuple[float, Gradients]]:
    """Every case on the same ranks, because starting ranks is what takes the time."""
    return {case: gradients(case) for case in cases}


@pytest.fixture(scope="module")
def parallel() -> dict[Case, tuple[float, Gradients]]:
    result: dict[Case, tuple[float, Gradients]] = on_ranks(4, all_cases, CASES)[0]
    return result


@pytest.fixture(scope="module")
def single() -> dict[Case, tuple[float, Gradients]]:
    result: dict[Case, tuple[float, Gradients]] = on_ranks(1, all_cases, list({case.reference for case in CASES}))[0]
    return result


@pytest.mark.parametrize("case", CASES, ids=str)
def test_loss_and_every_gradient_equal_one_rank(case: Case, parallel: Any, single: Any) -> None:
    loss, found = parallel[case]
    expected_loss, expected = single[case.reference]
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= 1e-5 * gradient.norm(), name
        assert gradient.norm() > 0, f"{name} has no gradient to compare"
