"""A run that starts from the weights and the optimizer state of another, written as one file by either API."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from tests.support.builders import small_runs
from tests.support.builders.small_runs import LENGTH, STEPS, job_of, numbers
from tests.support.builders.specs import TINY, may_read
from tests.support.ranks.ranks import on_ranks
from tests.support.ranks.torchrun import write_tokens
from train_loop.checkpoint.export.full import WAYS, gather
from train_loop.checkpoint.export.huggingface import export
from train_loop.checkpoint.export.text_files import write_run_configs
from train_loop.preflight.model import check_model
from train_loop.run_dir import ExportWish, RunDir
from train_loop.weights.inputs import find_inputs
from train_loop.weights.write import write_weights

AT = 3
RUNS: dict[str, dict[str, Any]] = {"first": {}, "muon": {"optimizer": "muon"}}
FREEZE = {"freeze_module_prefix": ["model.embed_tokens"]}


def train_and_gather(folder: Path) -> list[dict[str, Any]]:
    """Train on two ranks, and return the file of the checkpoint in the middle, by both APIs."""
    data, files = folder / "d.parquet", list[dict[str, Any]]()
    for name, training in RUNS.items():
        run_dir = RunDir(folder / name)
        small_runs.run(data, run_dir.root, **training)
        if dist.get_rank() == 0:
            run_dir.write_spec(job_of(data, dist.get_world_size(), training=training))
        dist.barrier()
        files += [gather(run_dir, AT, api, optimizer=True) for api in WAYS]
    return files


def go_on(folder: Path) -> None:
    """On one rank, resume the runs from the checkpoint, and start others from the folders."""
    data = folder / "d.parquet"
    for name, training in RUNS.items():
        out = str(folder / f"{name} out")
        start: dict[str, Any] = {"model": {"config": None, "path": out}, "optimizer_state": out} | training
        small_runs.run(data, folder / f"{name} resumed", **training)
        small_runs.run(data, folder / f"{name} started", **start)
        # It resumes from its own checkpoint.
        small_runs.run(data, folder / f"{name} started", **start, max_steps=STEPS + 1)


@pytest.fixture(scope="module")
def gathered(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("optimizer-state")
    write_tokens(folder / "d.parquet", rows=40, length=LENGTH, vocab=TINY["vocab_size"])
    files, _ = on_ranks(2, train_and_gather, folder)
    return folder, files


@pytest.fixture(scope="module")
def folder(gathered: tuple[Path, list[dict[str, Any]]]) -> Path:
    """Return a folder with the converted files, of which `out` is that of the first run."""
    folder, files = gathered
    for name, file in zip(RUNS, files[:: len(WAYS)], strict=True):
        torch.save(file, folder / "whole.pt")
        out, run_dir = folder / f"{name} out", RunDir(folder / name)
        out.mkdir()
        write_weights(find_inputs(folder / "whole.pt"), out, shard_bytes=20_000)
        write_run_configs(run_dir.spec().run, run_dir, out, dtype="fp32")
    (folder / "out").symlink_to(folder / "first out")
    return folder


def test_both_apis_write_the_same_model_and_optimizer_state(gathered: tuple[Path, list[dict[str, Any]]]) -> None:
    by_dtensor, by_dcp, *of_muon = gathered[1]
    assert by_dtensor["training"] == by_dcp["training"]
    assert (by_dtensor["training"]["step"], by_dtensor["training"]["optimizer"]) == (AT, "adamw")
    assert by_dtensor["optimizer"].keys() == by_dtensor["model"].keys()
    for name, states in by_dtensor["optimizer"].items():
        assert states.keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert torch.equal(by_dtensor["model"][name], by_dcp["model"][name])
        assert all(torch.equal(value, by_dcp["optimizer"][name][key]) for key, value in states.items()), name
        assert states["step"] == AT
    assert {one["training"]["optimizer"] for one in of_muon} == {"muon"}
    kinds = [{name: frozenset(states) for name, states in one["optimizer"].items()} for one in of_muon]
    assert kinds[0] == kinds[1]
    assert {frozenset({"momentum_buffer"}), frozenset({"step", "exp_avg", "exp_avg_sq"})} == {*kinds[0].values()}


@pytest.mark.parametrize("name", RUNS)
def test_export_has_the_same_weights_and_states_as_the_converted_file(folder: Path, name: str) -> None:
    exported = export(RunDir(folder / name), AT, ExportWish(dtype="fp32", include="optimizer"), shard_bytes=20_000)
    converted, facts = folder / f"{name} out", "training_state.json"
    assert json.loads((exported / facts).read_bytes()) == json.loads((converted / facts).read_bytes())
    for stem in ("model", "optimizer"):
        found, expected = (tensors_in(one, stem) for one in (exported, converted))
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], value) for key, value in expected.items())


def tensors_in(folder: Path, stem: str) -> dict[str, torch.Tensor]:
    return {key: value for file in folder.glob(f"{stem}-*.safetensors") for key, value in load_file(file).items()}


@pytest.fixture(scope="module")
def started(folder: Path) -> Path:
    """Return the folder after each run has been resumed from its checkpoint, and started from its folder."""
    for name in RUNS:
        shutil.copytree(folder / name, folder / f"{name} resumed")
        shutil.rmtree(RunDir(folder / f"{name} resumed").checkpoint(STEPS))
    on_ranks(1, go_on, folder)
    return folder


@pytest.mark.parametrize("name", RUNS)
def test_run_with_the_optimizer_state_equals_a_resumed_run_at_another_size(started: Path, name: str) -> None:
    expected = small_runs.lines(started / f"{name} resumed")[len(small_runs.lines(started / name)) :]
    found = small_runs.lines(started / f"{name} started")
    assert [line["step"] for line in expected] == list(range(AT + 1, STEPS + 1))
    assert [line["step"] for line in found] == list(range(AT + 1, STEPS + 2))
    for line, other in zip(found, expected, strict=False):
        assert numbers(line) == numbers(other), f"step {line['step']}"
        assert (line["tokens"], line["samples"]) == (other["tokens"], other["samples"])
    (event,) = small_runs.events(started / f"{name} started", "optimizer_state_loaded")
    assert event["step"] == AT
    starts = small_runs.events(started / f"{name} started", "training_started")
    assert [start["resumed_from"] for start in starts] == [AT, STEPS]


def set_fact(**facts: Any) -> Callable[[Path], None]:
    """Return a change of training_state.json."""

    def change(folder: Path) -> None:
        file = folder / "training_state.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | facts))

    return change


def keep(_: Path) -> None:
    """Change nothing."""


@pytest.mark.parametrize(
    ("change", "parts", "message"),
    [
        (keep, {"training": {"optimizer": "sgd"}}, "has the state of adamw, and training.optimizer is sgd; choose the"),
        (keep, {"model": FREEZE}, "is not of the trained parameters: unexpected: model.embed_tokens.weight; give that"),
        (set_fact(format=2), {}, "has format 2, but this version of Trainshed reads format 1; use the version that"),
        (set_fact(step="x"), {}, "training_state.json of .* cannot be read"),
        (lambda folder: (folder / "training_state.json").unlink(), {}, "training_state.json not found in .*; make it"),
        (shutil.rmtree, {}, "matches no file; check the path, which must be visible from service and workers"),
    ],
)
def test_optimizer_state_that_does_not_fit_is_refused_at_submission(
    folder: Path, tmp_path: Path, change: Callable[[Path], None], parts: dict[str, Any], message: str
) -> None:
    shutil.copytree(folder / "out", tmp_path / "out")
    change(tmp_path / "out")
    model = {"config": None, "path": str(folder / "out")} | parts.get("model", {})
    training = {"optimizer_state": str(tmp_path / "out")} | parts.get("training", {})
    job = job_of(folder / "d.parquet", 1, model=model, training=training)
    _, problems = check_model(job, may_read(str(folder), str(tmp_path)))
    assert [one.pointer for one in problems] == ["/training/optimizer_state"]
    assert re.search(message, problems[0].message), problems[0].message
