"""Own code on several ranks equals its plain PyTorch loop, and a paused run ends with the bits of another."""

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.support.own_code import NAMES, STEPS, example, example_job, first_batch, plain_loop, write_example
from tests.support.ranks.ranks import on_ranks
from tests.support.ranks.torchrun import load_tensors
from train_loop.checkpoint.export.huggingface import export
from train_loop.code.use import keep_code, with_own_code
from train_loop.conformance.probes import ask_after
from train_loop.data.prepare.cache import find_dataset
from train_loop.data.stream.local import local_stream
from train_loop.loop.session import Session
from train_loop.run_dir import ExportWish, RunDir, read_lines
from train_loop.spec import JobSpec, parse
from train_loop.telemetry import flops
from train_loop.train import train

PEAK = 1e12
VARIANTS: dict[str, tuple[str, dict[str, dict[str, Any]]]] = {
    "sgd": ("simple", {"training": {"optimizer": "sgd"}}),
    "adafactor": ("simple", {"training": {"optimizer": "adafactor"}}),
    "bf16": ("transformer", {"model": {"dtype": "bf16"}}),
}
"""Examples with other settings than their own."""


def train_all(folder: Path) -> None:
    tempfile.tempdir = str(folder)
    for name in NAMES:
        raw = example_job(folder, name)
        if name == "vit":
            # Images of PNG files have the pixels of the raw ones.
            raw["code"]["batch"], raw["data"]["train"] = "files:batch", {"path": str(folder / "png.parquet")}
            raw["data"]["eval"] = raw["data"]["train"]
        job = parse(raw)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(flops, "peak_flops", lambda device, dtype: PEAK)
            train_once(job, folder / f"{name} whole", folder)
        # A pause after some steps, and a changed package before the run resumes.
        train_once(job, folder / f"{name} paused", folder, steps=4)
        if dist.get_rank() == 0:
            (folder / name / "another.py").write_text("")
        dist.barrier()
        train_once(job, folder / f"{name} paused", folder)
    for variant in VARIANTS:
        train_once(parse(variant_job(folder, variant)), folder / variant, folder)


def variant_job(folder: Path, variant: str) -> dict[str, Any]:
    name, parts = VARIANTS[variant]
    raw = example_job(folder, name)
    raw["data"]["shuffle"] = False  # micro-batches then have sorted samples
    raw["training"]["num_train_epochs"] = 1
    if "optimizer" in parts.get("training", {}):
        del raw["training"]["adam_epsilon"]
    return raw | {part: raw[part] | fields for part, fields in parts.items()}


def train_once(job: JobSpec, place: Path, cache: Path, *, steps: int | None = None) -> None:
    run_dir = RunDir(place)
    if dist.get_rank() == 0:
        run_dir.write_spec(job)
        keep_code(job, run_dir, lambda warning: None)
    dist.barrier()
    spec = with_own_code(job, run_dir)
    session = Session(
        dist.get_rank(), dist.get_world_size(), 0, 1, run_dir, local_stream, stop_requested=ask_after(steps)
    )
    data = find_dataset(spec, cache)
    train(spec, session, data, data)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own")
    for name in NAMES:
        write_example(folder, name)
    on_ranks(2, train_all, folder)
    return folder


def lines(place: Path) -> list[dict[str, Any]]:
    return list(read_lines(RunDir(place).attempt(1).metrics))


@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_equal_the_plain_loop(runs: Path, name: str) -> None:
    found = lines(runs / f"{name} whole")
    losses, evaluation, weights = plain_loop(runs, name, found)
    assert len(found) == STEPS
    assert [line["loss"] for line in found] == pytest.approx(losses, rel=1e-5)
    assert found[-1]["eval_loss"] == pytest.approx(evaluation, rel=1e-5)
    saved = load_tensors(runs / f"{name} whole", STEPS)
    for weight, values in weights.items():
        torch.testing.assert_close(saved[f"/model/{weight}"], values, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_other_optimizers_and_bf16_equal_the_plain_loop(runs: Path, variant: str) -> None:
    raw, found = variant_job(runs, variant), lines(runs / variant)
    losses, evaluation, weights = plain_loop(runs, VARIANTS[variant][0], found, raw)
    assert [line["loss"] for line in found] == pytest.approx(losses, rel=1e-5)
    assert found[-1]["eval_loss"] == pytest.approx(evaluation, rel=1e-5)
    saved = load_tensors(runs / variant, len(found))
    for weight, values in weights.items():
        torch.testing.assert_close(saved[f"/model/{weight}"], values, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_mfu_is_that_of_a_counted_call(runs: Path, name: str) -> None:
    module, job = example(name), parse(example_job(runs, name))
    assert job.code is not None
    model, size = module.build(job.code.config), job.training.micro_batch
    batch = first_batch(name, size)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        module.loss(model, batch)[0].backward()
    events = read_lines(RunDir(runs / f"{name} whole").attempt(1).events)
    (stated,) = [event["mfu"] for event in events if event["event"] == "training_started"]
    assert stated["flops_per_row"] == counter.get_total_flops() // size > 0
    for line in lines(runs / f"{name} whole"):
        speed = len(line["samples"]) / line["step_seconds"] / 2
        assert line["mfu"] == pytest.approx(stated["flops_per_row"] * speed / PEAK)
    assert {line["mfu"] for line in lines(runs / f"{name} paused")} == {None}


@pytest.mark.parametrize("name", NAMES)
def test_export_has_the_names_of_the_module(runs: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(runs))
    folder = export(RunDir(runs / f"{name} whole"), STEPS, ExportWish(dtype="fp32"))
    exported, saved = load_file(folder / "model.safetensors"), load_tensors(runs / f"{name} whole", STEPS)
    model = example(name).build(example_job(runs, name)["code"]["config"])
    assert exported.keys() == dict(model.named_parameters()).keys()
    assert [key for key, values in exported.items() if not torch.equal(values, saved[f"/model/{key}"])] == []
    assert json.loads((folder / "code.json").read_text())["model"].endswith(":build")


@pytest.mark.parametrize("name", NAMES)
def test_paused_run_resumes_with_its_own_code_and_the_same_bits(runs: Path, name: str) -> None:
    whole, paused = runs / f"{name} whole", runs / f"{name} paused"
    numbers = [
        [(one["step"], one["loss"], one["grad_norm"], one["samples"]) for one in lines(at)] for at in (whole, paused)
    ]
    assert numbers[0] == numbers[1]
    expected, found = load_tensors(whole, STEPS), load_tensors(paused, STEPS)
    assert [key for key in expected if not torch.equal(found[key], expected[key])] == []
