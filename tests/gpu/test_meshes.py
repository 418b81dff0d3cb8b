"""Mixtures of experts and layers that ranks share on several GPUs: loss and gradients are those of one CPU rank."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.gpu.test_gradients import LENGTH, MODELS
from tests.support.builders.specs import TINY, spec
from tests.support.ranks.gradients import CPU, Gradients, forget_meshes, one_step, random_rows
from tests.support.ranks.ranks import ranks_of_any_number
from train_loop.parallel.mesh import local_device
from train_loop.spec import JobSpec

GPUS = torch.cuda.device_count()
pytestmark = pytest.mark.skipif(GPUS < 2, reason="needs two CUDA GPUs or more")
ROWS = 8
UNITS = {"wrap_policy": {"moe_experts": ["Qwen3MoeExperts"]}}
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "experts, fsdp 2": ("experts", 2, UNITS),
    "experts, ddp 2 x fsdp 2": ("experts", 4, {"fsdp_size": 2}),
    "experts, ep 2": ("experts", 2, {"ep_size": 2}),
    "experts, fsdp 4, ep 2": ("experts", 4, {"ep_size": 2}),
    "experts, fsdp 4, ep 4": ("experts", 4, {"ep_size": 4}),
    "experts, sp 2, ep 4": ("experts", 4, {"ep_size": 4, "ulysses_size": 2}),
    "tp 2": ("qwen3", 2, {"tp_size": 2}),
    "tied, tp 2": ("tied", 2, {"tp_size": 2}),
    "fsdp 2 x tp 2": ("llama", 4, {"tp_size": 2}),
    "sp 2 x tp 2": ("qwen3", 4, {"tp_size": 2, "ulysses_size": 2}),
    "fsdp 2 x tp 2, split": ("qwen3", 4, {"tp_size": 2, "sequence_parallel": True}),
    "experts, fsdp 2 x tp 2, ep 4, split": ("experts", 4, {"tp_size": 2, "ep_size": 4, "sequence_parallel": True}),
}
"""Model, ranks and strategy."""


def job(case: str, world: int | None = None) -> JobSpec:
    """Return the spec of a case, or of its model on one rank."""
    model, ranks, strategy = CASES[case]
    return spec(
        model={"config": MODELS[model], "dtype": "fp32"},
        data={"sequence_length": LENGTH},
        training={"per_device_train_batch_size": 2, "global_batch_size": ROWS},
        strategy={} if world == 1 else strategy,
        scaling={"num_workers": world or ranks},
    )


def step(case: str, world: int | None = None) -> tuple[float, Gradients]:
    """Return loss and gradients of a case on the GPUs of the existing ranks, or of one rank on the CPU."""
    forget_meshes()
    rows = random_rows(ROWS, LENGTH, vocab=TINY["vocab_size"], packed=True)
    loss, gradients = one_step(job(case, world), rows, CPU if world == 1 else local_device(dist.get_rank()))
    return loss, {name: gradient.cpu() for name, gradient in gradients.items()}


@pytest.fixture(scope="module")
def call_ranks() -> Iterator[Callable[..., Any]]:
    with ranks_of_any_number(min(GPUS, 4), backend="cpu:gloo,cuda:nccl") as call:
        yield call


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_of_gpus_are_those_of_one_cpu_rank(call_ranks: Callable[..., Any], case: str) -> None:
    ranks = CASES[case][1]
    if ranks > GPUS:
        pytest.skip(f"needs {ranks} CUDA GPUs, and this machine has {GPUS}")
    loss, found = call_ranks(ranks, step, case)
    expected_loss, expected = call_ranks(1, step, case, 1)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert found.keys() == expected.keys()
    scale = max(gradient.abs().max().item() for gradient in expected.values())
    for name, gradient in expected.items():
        difference = (found[name] - gradient).abs().max().item()
        assert difference <= 1e-5 * scale, (name, difference, scale)
