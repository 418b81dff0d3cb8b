"""Promises that hold for every kind of model, in addition to the gradients of `test_table.py`."""

import os
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from tests.families.kinds import KINDS, SEED
from tests.families.parity import Settings
from tests.families.runs import DISTURBED, STEPS, UNDISTURBED, default_job, measure_memory, train_leg
from tests.families.table import settings_of
from tests.support.builders.specs import may_read
from tests.support.ranks.ranks import ranks_of_any_number
from tests.support.ranks.torchrun import load_checkpoint, load_tensors, write_tokens
from train_loop.checkpoint.export.huggingface import export
from train_loop.loop.build import count_flops
from train_loop.model.families.causal.family import CAUSAL
from train_loop.preflight.checks import check_model
from train_loop.run_dir import ExportWish, RunDir, read_lines

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers, about kernels that are not installed
CallRanks = Callable[..., Any]


DRAWN = KINDS if os.environ.get("MORE") else random.Random(SEED).sample(KINDS, 3)
"""Families whose runs are trained; `MODELS_SEED=…` draws those of another commit."""


class Trained(NamedTuple):
    """A family's run without disturbance, and the same run with a loss and another size."""

    family: str
    settings: Settings
    undisturbed: Path
    disturbed: Path


@pytest.fixture(scope="module")
def call_ranks() -> Iterator[CallRanks]:
    with ranks_of_any_number(4) as call:
        yield call


@pytest.fixture(scope="module", params=DRAWN)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, call_ranks: CallRanks) -> Trained:
    folder, family = tmp_path_factory.mktemp("runs"), str(request.param)
    # Rows shorter than the sequence, so that data ranks differ in the tokens they train.
    write_tokens(folder / "d.parquet", rows=11, length=(9, 32), vocab=300)
    found = Trained(family, settings_of(family), folder / "undisturbed", folder / "disturbed")
    for legs, run in ((UNDISTURBED, found.undisturbed), (DISTURBED, found.disturbed)):
        for attempt, leg in enumerate(legs, start=1):
            RunDir(run).write_fence(attempt)
            call_ranks(leg.case.world, train_leg, family, found.settings, leg, folder / "d.parquet", run, attempt)
            RunDir(run).stop_file.unlink(missing_ok=True)
    return found


def test_lost_steps_and_another_size_change_nothing(trained: Trained) -> None:
    lines = [
        {line["step"]: line for attempt in RunDir(run).attempts() for line in read_lines(attempt.metrics)}
        for run in (trained.undisturbed, trained.disturbed)
    ]
    starts = [
        event["resumed_from"]
        for attempt in RunDir(trained.disturbed).attempts()
        for event in read_lines(attempt.events)
        if event["event"] == "training_started"
    ]
    assert starts == [0, 2]
    assert sorted(lines[0]) == sorted(lines[1]) == [*range(1, STEPS + 1)]
    for step, line in lines[0].items():
        assert lines[1][step]["samples"] == line["samples"]
        assert lines[1][step]["loss"] == pytest.approx(line["loss"], rel=1e-5)
    expected, found = (load_tensors(run, STEPS) for run in (trained.undisturbed, trained.disturbed))
    # A resumed run has optimizer states for parameters without gradients, too: zeros.
    assert [name for name in found.keys() ^ expected.keys() if name in expected or found[name].any()] == []
    wrong = {
        name: float(off)
        for name, value in expected.items()
        # Attention ignores biases of keys, so that their gradients are rounding.
        if not re.search(r"\bk(ey|_proj)\.bias", name)
        and (off := (found[name] - value).norm() / value.norm().clamp(min=1e-12)) > 1e-3
    }
    assert wrong == {}


def test_transformers_computes_the_same_logits_from_an_export(trained: Trained) -> None:
    folder = export(RunDir(trained.disturbed), STEPS, ExportWish(dtype="fp32"))
    exported, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    config = default_job(trained.family, trained.settings, world=1).model.config or {}
    plain = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32)
    plain.load_state_dict(load_checkpoint(trained.disturbed, STEPS)["model"], strict=False)
    ids = torch.arange(1, 25).view(2, 12)
    with torch.no_grad():
        assert torch.equal(exported.eval()(ids).logits, plain.eval()(ids).logits)


@pytest.mark.parametrize("family", KINDS)
def test_planned_bytes_are_those_of_a_step(family: str, call_ranks: CallRanks) -> None:
    settings = settings_of(family)
    shape, problems = check_model(default_job(family, settings, world=2), may_read())
    assert problems == []
    planned, found = call_ranks(2, measure_memory, family, settings, shape)
    assert found.parameters == pytest.approx(planned["parameters"], rel=0.05)
    assert found.gradients == pytest.approx(found.used * planned["gradients"], rel=0.05)
    assert found.optimizer == pytest.approx(found.used * planned["optimizer"], rel=0.05)
    unused = (1 - found.used) * (planned["gradients"] + planned["optimizer"])
    total = sum(size for name, size in planned.items() if name != "checkpoint_staging") - unused
    assert found.peak == pytest.approx(total, rel=0.1)


@pytest.mark.parametrize("family", KINDS)
def test_flops_are_those_of_a_counted_forward(family: str) -> None:
    """The formula counts every parameter as a part of a matrix product, and so also tables that are only read."""
    config = AutoConfig.for_model(**default_job(family, settings_of(family), world=1).model.config or {})
    # Other implementations of attention have operators that are not counted.
    anatomy = CAUSAL.anatomy(AutoModelForCausalLM.from_config(config, attn_implementation="eager"))
    flops = count_flops(anatomy, sequence_length=32, dtype="fp32", device=torch.device("cpu"))
    with FlopCounterMode(display=False) as counter:
        logits = anatomy.model(input_ids=torch.zeros(1, 32, dtype=torch.int64), use_cache=False).logits
    logits.sum().backward()
    head = anatomy.head.get_parameter("weight") if anatomy.head is not None else None
    tables = {one.weight for one in anatomy.model.modules() if isinstance(one, nn.Embedding)} - {head}
    without_products = {*tables, *(one for one in anatomy.model.parameters() if one.grad is None)}
    formula = flops.per_token - 6 * sum(one.numel() for one in without_products)
    assert formula == pytest.approx(3 * counter.get_total_flops() / 32, rel=0.1)
