"""`strategy.ignored_params`: parameters that each rank holds whole, in runs, checkpoints and the plan."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

from tests.support.builders.specs import TINY, may_read, raw_spec, spec
from tests.support.ranks.gradients import build
from tests.support.ranks.ranks import on_ranks
from tests.support.ranks.torchrun import load_tensors, write_tokens
from train_loop.checkpoint.export.huggingface import export
from train_loop.data.prepare.cache import find_dataset
from train_loop.data.stream.local import local_stream
from train_loop.loop.session import Session
from train_loop.plan import plan_job
from train_loop.preflight.model import check_model
from train_loop.run_dir import ExportWish, RunDir, read_lines
from train_loop.spec import JobSpec, SpecError, parse
from train_loop.train import train

STEPS, SAVED = 4, 2
WHOLE = ["*norm.weight", "model.layers.0.mlp"]


def a_job(folder: Path, ignored: list[str]) -> JobSpec:
    return spec(
        data={"train": {"path": str(folder / "d.parquet")}, "columns": {"input_ids": "ids"}, "packing": False},
        training={"max_steps": STEPS, "global_batch_size": 8, "max_grad_norm": 0.3, "weight_decay": 0.1}
        | {"per_device_train_batch_size": 2, "ema_decay": 0.9},
        strategy={"ignored_params": ignored},
        checkpoint={"every_steps": SAVED, "keep_last": 5},
        scaling={"num_workers": dist.get_world_size()},
    )


def train_in(folder: Path, name: str, ignored: list[str]) -> None:
    job, run_dir = a_job(folder, ignored), RunDir(folder / name)
    session = Session(dist.get_rank(), dist.get_world_size(), 0, 1, run_dir, local_stream)
    train(job, session, find_dataset(job, folder))


def train_all(folder: Path) -> tuple[int, list[str]]:
    """Train plain, whole, and resumed; return the bytes of parameters on this rank, and names of whole ones."""
    train_in(folder, "plain", [])
    train_in(folder, "whole", WHOLE)
    RunDir(folder / "whole").write_spec(a_job(folder, WHOLE))
    if dist.get_rank() == 0:
        shutil.copytree(folder / "whole", folder / "resumed")
        shutil.rmtree(RunDir(folder / "resumed").checkpoint(STEPS))
    dist.barrier()
    train_in(folder, "resumed", WHOLE)
    model, *_ = build(a_job(folder, WHOLE))
    local = {name: one.to_local() for name, one in model.named_parameters() if isinstance(one, DTensor)}
    sizes = {name: one.numel() for name, one in model.named_parameters()}
    return sum(one.nbytes for one in local.values()), [name for name in local if local[name].numel() == sizes[name]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tuple[int, list[str]]]]:
    folder = tmp_path_factory.mktemp("runs")
    write_tokens(folder / "d.parquet", rows=40, length=(9, 32), vocab=TINY["vocab_size"])
    return folder, on_ranks(2, train_all, folder)


def numbers(folder: Path) -> list[list[float]]:
    return [[line["loss"], line["grad_norm"]] for line in read_lines(RunDir(folder).attempt(1).metrics)]


def test_run_with_whole_parameters_equals_one_without(runs: Any) -> None:
    folder, _ = runs
    expected, found = numbers(folder / "plain"), numbers(folder / "whole")
    assert len(found) == STEPS
    assert found == [pytest.approx(pair, rel=1e-5) for pair in expected]
    whole, plain = (load_tensors(folder / name, STEPS) for name in ("whole", "plain"))
    assert whole.keys() == plain.keys()
    for name, value in plain.items():
        assert torch.allclose(whole[name], value, rtol=1e-3, atol=1e-5), name


def test_resumed_run_with_whole_parameters_has_the_bits_of_the_uninterrupted_one(runs: Any) -> None:
    folder, _ = runs
    expected, found = (load_tensors(folder / name, STEPS) for name in ("whole", "resumed"))
    assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == []


def test_export_with_whole_parameters_has_the_weights_of_every_rank(runs: Any) -> None:
    folder, _ = runs
    found = load_file(export(RunDir(folder / "whole"), STEPS, ExportWish(dtype="fp32")) / "model.safetensors")
    expected = load_tensors(folder / "whole", STEPS)
    assert {f"/model/{name}" for name in found} == {name for name in expected if name.startswith("/model/")}
    assert all(torch.equal(value, expected[f"/model/{name}"]) for name, value in found.items())


def test_plan_counts_what_each_rank_holds_whole(runs: Any) -> None:
    _, ranks = runs
    raw = raw_spec(strategy={"ignored_params": WHOLE}, scaling={"num_workers": 2})
    shape, problems = check_model(parse(raw), may_read())
    assert problems == []
    assert shape is not None
    planned = {term.name: term.bytes for term in plan_job(parse(raw), shape).memory}["parameters"]
    for held, names in ranks:
        assert held == pytest.approx(planned, rel=0.01)
        assert {"model.norm.weight", "model.layers.0.mlp.up_proj.weight"} <= {*names}
        assert "model.layers.1.mlp.up_proj.weight" not in names


def test_pattern_without_a_parameter_is_refused_at_submission() -> None:
    _, problems = check_model(parse(raw_spec(strategy={"ignored_params": ["model.layers.0.mlp.up"]})), may_read())
    (problem,) = problems
    assert problem.pointer == "/strategy/ignored_params"
    assert problem.message.startswith(
        "ignored_params model.layers.0.mlp.up matches no parameter; choose for example model.layers.0.mlp"
    )


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (
            {"training": {"optimizer": "muon"}},
            "ignored_params is not proven with training.optimizer=muon; change it, or remove ignored_params",
        ),
        (
            {"model": {"dtype": "fp16"}},
            "ignored_params is not proven with model.dtype=fp16; change it, or remove ignored_params",
        ),
        (
            {"training": {"reproducible": "any_size", "global_batch_size": 4}},
            "ignored_params is not proven to give the same bits at every size; change it, or choose "
            "training.reproducible=same_size",
        ),
    ],
)
def test_settings_that_are_not_proven_with_whole_parameters_are_refused(parts: Any, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse(raw_spec(strategy={"ignored_params": ["*norm*"]}, **parts))
    assert [(problem.pointer, problem.message) for problem in caught.value.problems] == [("/strategy", message)]
