"""Promises that hold for every kind of model and objective, in addition to the gradients of `test_table.py`."""

import os
import random
import re
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig

from tests.families.objectives import MATRIX, OBJECTIVES, OWN, write_rows
from tests.families.parity import CASES, KINDS, NONE, TOLERANCE, Case
from tests.families.runs import (
    DISTURBED,
    SHARED,
    SHARED_EXPERTS,
    STEPS,
    UNDISTURBED,
    Kind,
    Leg,
    default_job,
    job_of,
    shape_of,
    train_leg,
    unpacked_job,
)
from tests.families.table import settings_of
from tests.support.builders.datasets import prepare_tokens
from tests.support.builders.searches import SEED, drawn
from tests.support.builders.specs import may_read
from tests.support.own_code import forget_imports
from tests.support.ranks.first_step import step_and_evaluation
from tests.support.ranks.ranks import ranks_of_any_number, ranks_to_kill
from tests.support.ranks.torchrun import load_checkpoint, load_tensors
from train_loop.checkpoint.export.huggingface import export
from train_loop.code.use import own_code
from train_loop.conformance.measure import Step, step_difference
from train_loop.loop.build import count_flops
from train_loop.loop.objectives.objective import LINE_FIELDS
from train_loop.loop.objectives.own_loss import call_batch, call_loss
from train_loop.model.families.causal.family import CAUSAL
from train_loop.model.families.causal.parallel.tensor import MIXTURES, PROVEN
from train_loop.preflight.model import check_model
from train_loop.preflight.own_calls import first_batch
from train_loop.preflight.own_code import first_rows_of
from train_loop.run_dir import ExportWish, RunDir, read_lines
from train_loop.spec import JobSpec, SpecError

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers, about kernels that are not installed
CallRanks = Callable[..., Any]
TOKENS = "token cross entropy"
STATEFUL = ("falcon_h1", "mamba2")
"""Kinds with a recurrent state."""
ATTENDING = [family for family in KINDS if family not in STATEFUL]
OTHERS = [(family, name) for family, name in MATRIX if name != TOKENS]
_draw = random.Random(SEED)
MORE = bool(os.environ.get("MORE"))
DRAWN = MATRIX if MORE else [(_draw.choice(ATTENDING), TOKENS), (_draw.choice(STATEFUL), TOKENS), _draw.choice(OTHERS)]
"""Kinds whose runs are trained: with and without a state, and one of another objective.

`MODELS_SEED=…` draws those of another commit.
"""
_tokens = [(family, TOKENS) for family in KINDS]
_objectives = [(one.families[-1], name) for name, one in OBJECTIVES.items() if name != TOKENS]
COUNTED = _tokens + _objectives if MORE else _draw.sample(_tokens, 2) + _draw.sample(_objectives, 1)
"""Kinds whose operations are counted."""
TENSOR = tuple(
    Case("fsdp 2 x tp 2", 4, tp_size=2, others=(("strategy", "sequence_parallel", splits),)) for splits in (False, True)
)
"""Ranks that share layers, with all tokens between projections, and with a part of them."""
_heads = [(family, name) for family, name in OTHERS if family != OWN]
COMPARED = _heads if MORE else _draw.sample(_heads, 1)
"""Kinds whose steps are computed on meshes, besides those of `test_table.py` and `trainshed check-model`."""


class Trained(NamedTuple):
    """A kind's run without disturbance, and the same run killed and resized."""

    kind: Kind
    undisturbed: Path
    disturbed: Path


@pytest.fixture(scope="module")
def call_ranks() -> Iterator[CallRanks]:
    with ranks_of_any_number(4) as call:
        yield call


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("rows"), 11)


@pytest.fixture(autouse=True)
def _unpacked_here(rows: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # Tests import own code from the folder of its rows, and forget it.
    monkeypatch.setattr(tempfile, "tempdir", str(rows.parent))
    with forget_imports():
        yield


def kind_of(family: str, objective: str, rows: Path) -> Kind:
    kind = Kind(family, objective, NONE if family == OWN else settings_of(family), rows)
    prepare_tokens(default_job(kind, world=1), rows.parent)
    return kind


def evaluated(kind: Kind, case: Case) -> JobSpec:
    """Return the spec of an attempt that also evaluates on its rows."""
    job = job_of(kind, case)
    return job.model_copy(update={"data": job.data.model_copy(update={"eval": job.data.train})})


def refusal_of(kind: Kind, case: Case) -> str | None:
    """Return the reason why `POST /jobs` rejects a mesh; None if it accepts it."""
    try:
        _, problems = check_model(job_of(kind, case), may_read())
    except SpecError as error:
        return str(error)
    return problems[0].message if problems else None


def legs_of(family: str, objective: str) -> tuple[Leg, ...]:
    """Return the attempts of a disturbed run, on the axes for which a family is proven."""
    if objective != TOKENS:
        return DISTURBED
    return SHARED_EXPERTS if family in MIXTURES else SHARED if family in PROVEN else DISTURBED


@pytest.fixture(scope="module", params=DRAWN, ids=", ".join)
def trained(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, call_ranks: CallRanks, rows: Path
) -> Trained:
    folder = tmp_path_factory.mktemp("runs")
    found = Trained(kind_of(request.param[0], request.param[1], rows), folder / "undisturbed", folder / "disturbed")
    disturbed = legs_of(*request.param)
    for legs, run in ((UNDISTURBED, found.undisturbed), (disturbed, found.disturbed)):
        for attempt, leg in enumerate(legs, start=1):
            RunDir(run).write_fence(attempt)
            train(call_ranks, found.kind, leg, run, attempt)
            RunDir(run).stop_file.unlink(missing_ok=True)
    return found


def train(call_ranks: CallRanks, kind: Kind, leg: Leg, run: Path, attempt: int) -> None:
    if leg.end == "resize":
        call_ranks(leg.case.world, train_leg, kind, leg, run, attempt)
        return
    with ranks_to_kill(leg.case.world, train_leg, kind, leg, run, attempt) as ranks:
        ranks[0].join(timeout=240)
        assert ranks[0].exitcode == -signal.SIGKILL


def test_a_kill_and_other_sizes_change_nothing(trained: Trained) -> None:
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
    assert starts == [0, 2, 4]
    assert sorted(lines[0]) == sorted(lines[1]) == [*range(1, STEPS + 1)]
    for step, line in lines[0].items():
        assert lines[1][step]["samples"] == line["samples"]
        assert lines[1][step]["loss"] == pytest.approx(line["loss"], rel=1e-5)
        sums = {name: value for name, value in line.items() if name not in LINE_FIELDS}
        assert {name: lines[1][step][name] for name in sums} == pytest.approx(sums, rel=1e-4, abs=1e-5)
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
    folder, objective = (
        export(RunDir(trained.disturbed), STEPS, ExportWish(dtype="fp32")),
        OBJECTIVES[trained.kind.objective],
    )
    weights: dict[str, Tensor] = load_checkpoint(trained.disturbed, STEPS)["model"]
    if objective.exported is None:
        stored = load_file(folder / "model.safetensors")
        assert stored.keys() == weights.keys()
        assert all(torch.equal(stored[name], weights[name]) for name in stored)
        return
    exported, info = objective.exported.from_pretrained(folder, output_loading_info=True)
    wrong = {*info["missing_keys"], *info["unexpected_keys"], *info["mismatched_keys"]}
    # Embeddings have no pooler, which BERT has for another task.
    assert [name for name in wrong if not name.startswith("pooler.")] == []
    plain = objective.exported.from_config(exported.config, dtype=torch.float32)
    plain.load_state_dict(weights, strict=False)
    loaded = exported.state_dict()
    assert [name for name, value in weights.items() if name in loaded and not torch.equal(loaded[name], value)] == []
    ids = torch.arange(1, 25).view(2, 12)
    with torch.no_grad():
        # Rounding depends on where in memory a tensor begins.
        torch.testing.assert_close(exported.eval()(ids)[0], plain.eval()(ids)[0])


@pytest.mark.parametrize(("family", "objective"), COMPARED)
def test_step_and_evaluation_are_those_of_one_rank(
    family: str, objective: str, call_ranks: CallRanks, rows: Path
) -> None:
    """Parts of sequences are refused by name, unless each token has its own loss."""
    kind = kind_of(family, objective, rows)
    one, *others = (CASES[f"{mesh}, plain"] for mesh in ("one rank", "HSDP 2 x 2", "HSDP 2 x Ulysses 2"))
    expected = call_ranks(one.world, step_and_evaluation, evaluated(kind, one), rows.parent)
    for case in (*others, *drawn(TENSOR, 1)):
        peers = "tp_size" if case.tp_size > 1 else "ulysses_size"
        if case is not others[0] and (refusal := refusal_of(kind, case)) is not None:
            assert f"{peers}: 1" in refusal or f"{peers}=1" in refusal
            assert case.tp_size == 1 or family not in PROVEN
            continue
        found = call_ranks(case.world, step_and_evaluation, evaluated(kind, case), rows.parent)
        steps = (Step(loss, gradients) for loss, gradients, _ in (found, expected))
        assert step_difference(*steps) < TOLERANCE
        assert found[2].metrics == pytest.approx(expected[2].metrics, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(("family", "objective"), [one for one in COUNTED if one[0] != OWN])
def test_flops_are_those_of_a_counted_forward(family: str, objective: str, rows: Path) -> None:
    """The formula counts every parameter as a part of a matrix product, and so also tables that are only read."""
    model = default_job(kind_of(family, objective, rows), world=1).model
    labels = {"num_labels": model.label_head.labels} if model.label_head else {}
    config = AutoConfig.for_model(**model.config or {}, **labels)
    # Other implementations of attention and experts have operators that are not counted.
    built = OBJECTIVES[objective].exported.from_config(config, attn_implementation="eager")
    if built._can_set_experts_implementation():
        built.set_experts_implementation("eager")
    anatomy = CAUSAL.anatomy(built)
    flops = count_flops(anatomy, sequence_length=32, dtype="fp32", device="cpu")
    with FlopCounterMode(display=False) as counter:
        logits = anatomy.model(input_ids=torch.ones(1, 32, dtype=torch.int64), use_cache=False)[0]
    logits.sum().backward()
    head = anatomy.head.get_parameter("weight") if anatomy.head is not None else None
    tables = {one.weight for one in anatomy.model.modules() if isinstance(one, nn.Embedding)} - {head}
    without_products = {*tables, *(one for one in anatomy.model.parameters() if one.grad is None)}
    formula = flops.per_token - 6 * sum(one.numel() for one in without_products)
    assert formula == pytest.approx(3 * counter.get_total_flops() / 32, rel=0.1)


@pytest.mark.parametrize("objective", [name for name, one in OBJECTIVES.items() if OWN in one.families])
def test_flops_of_own_code_are_those_of_a_counted_forward(objective: str, rows: Path) -> None:
    job = unpacked_job(kind_of(OWN, objective, rows), world=1)
    assert job.code is not None
    code, call = own_code(job.code), shape_of(job).call
    assert call is not None
    columns = first_batch(first_rows_of(job), job)
    with FlopCounterMode(display=False) as counter:
        call_loss(code, code.model(job.code.config), call_batch(code, columns, torch.device("cpu")))
    assert call.flops == pytest.approx(3 * counter.get_total_flops(), rel=0.1)
