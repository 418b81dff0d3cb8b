"""Adapters with other settings that change numbers: fp16, muon, and LoRA+, whose B learns faster than A."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.builders.folders import write_model
from tests.support.builders.searches import drawn
from tests.support.builders.small_runs import LENGTH, lines, numbers, run
from tests.support.builders.specs import spec
from tests.support.ranks.adapters import peft_step
from tests.support.ranks.gradients import build, divisor, forget_meshes, my_share, random_rows
from tests.support.ranks.torchrun import write_tokens
from train_loop.checkpoint.digest import digest_step
from train_loop.conformance.measure import accumulate_plainly, whole
from train_loop.loop.batch import micro_batches
from train_loop.model.lora.adapters import trained_parameters
from train_loop.optim.build import build_optimizers
from train_loop.run_dir import RunDir
from train_loop.spec import JobSpec

CallRanks = Callable[..., Any]
LORA = {"r": 3, "alpha": 6.0, "target_modules": ["q_proj", "down_proj"]}
PEFT: dict[str, Any] = {"r": 3, "lora_alpha": 6, "target_modules": ["q_proj", "down_proj"]}
ROWS = random_rows(8, LENGTH, vocab=200, packed=False)
STEPS, RATIO = 3, 16.0
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], float]] = {
    "fp16": ({"dtype": "fp16", "master_dtype": "fp32"}, {}, 1e-2),
    "muon": ({}, {"optimizer": "muon", "learning_rate": 1e-2}, 1e-5),
}
"""Settings of model and training, and the largest difference of losses from those of one rank in fp32."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("combinations")
    write_tokens(folder / "d.parquet", rows=40, length=LENGTH, vocab=200)
    write_model(folder / "base", vocab_size=200)
    return folder


def train(home: Path, name: str, model: dict[str, Any], training: dict[str, Any]) -> None:
    base = {"path": str(home / "base"), "config": None, "dtype": "fp32", "lora": LORA}
    run(home / "d.parquet", home / name, model=base | model, **training)


@pytest.mark.parametrize("case", drawn([*CASES], 1))
def test_run_equals_one_rank_and_resumes_with_the_same_bits(call_ranks: CallRanks, home: Path, case: str) -> None:
    model, training, bound = CASES[case]
    call_ranks(1, train, home, f"{case} one", {}, training)
    call_ranks(2, train, home, f"{case} whole", model, training)
    call_ranks(2, train, home, f"{case} parts", model, training | {"max_steps": 4})
    call_ranks(2, train, home, f"{case} parts", model, training)
    one, whole_run, parts = (lines(home / f"{case} {name}") for name in ("one", "whole", "parts"))
    assert [line["loss"] for line in whole_run] == pytest.approx([line["loss"] for line in one], rel=bound)
    assert whole_run[0]["loss"] != whole_run[-1]["loss"]
    assert [numbers(line) for line in whole_run] == [numbers(line) for line in parts]
    found = [digest_step(RunDir(home / f"{case} {name}"), 6) for name in ("whole", "parts")]
    assert found[0] is not None
    assert found[0] == found[1]


def job_of(home: Path, world: int) -> JobSpec:
    return spec(
        model={"path": str(home / "base"), "config": None, "dtype": "fp32", "lora": LORA},
        data={"packing": False},
        training={"global_batch_size": 8, "per_device_train_batch_size": 1, "learning_rate": 1e-2}
        # A large epsilon: Adam divides a gradient by its own size, even if it is only rounding.
        | {"weight_decay": 0.1, "adam_epsilon": 1e-4, "groups": [{"params": ["*lora_B*"], "lr_scale": RATIO}]},
        scaling={"num_workers": world},
    )


def trained(job: JobSpec) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the adapters before and after some steps of AdamW, at the rates of the spec."""
    forget_meshes()
    model, loss, mesh = build(job)
    (optimizer,), adapters = build_optimizers(loss.anatomy, job.training), trained_parameters(model)
    before = {name: whole(p.detach()).clone() for name, p in adapters.items()}
    batch = my_share(ROWS, mesh)
    for _ in range(STEPS):
        micro = micro_batches(batch, job.training.micro_batch, loss.anatomy, mesh)
        accumulate_plainly(loss, micro, divisor(batch, mesh), mesh)
        optimizer.step()
        optimizer.zero_grad()
    return before, {name: whole(p.detach()).clone() for name, p in adapters.items()}


def test_lora_plus_equals_groups_of_torch(call_ranks: CallRanks, home: Path) -> None:
    """Hayou et al. (2024): the rate of B is a multiple of that of A."""
    before, after = call_ranks(2, trained, job_of(home, 2))
    plain = {name: torch.nn.Parameter(value.clone()) for name, value in before.items()}
    groups = [
        {"params": [p for name, p in plain.items() if ("lora_B" in name) is is_b], "lr": 1e-2 * (RATIO if is_b else 1)}
        for is_b in (False, True)
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.999), eps=1e-4, weight_decay=0.1)
    for _ in range(STEPS):
        _, gradients = peft_step(home / "base", ROWS, {name: p.detach() for name, p in plain.items()}, **PEFT)
        for name, parameter in plain.items():
            parameter.grad = gradients[name]
        optimizer.step()
    for name, expected in plain.items():
        assert (after[name] - expected).norm() <= 1e-5 * (expected - before[name]).norm(), name
    moved = {name: float((after[name] - before[name]).abs().mean()) for name in after}
    for name, distance in moved.items():
        if "lora_B" in name:
            assert distance > 4 * moved[name.replace("lora_B", "lora_A")], name
