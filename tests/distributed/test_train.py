"""The whole loop: equal losses, norms and tokens at every mesh, and resumes on the original data."""

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.support.builders.specs import TINY, spec
from tests.support.ranks.ranks import on_ranks
from tests.support.ranks.torchrun import load_checkpoint, write_tokens
from train_loop.data.prepare.cache import find_dataset
from train_loop.data.prepare.pointer import pinned_dataset
from train_loop.data.stream.local import local_stream
from train_loop.errors import DataError
from train_loop.loop.session import Session
from train_loop.run_dir import RunDir, read_lines, write_durably
from train_loop.spec import JobSpec
from train_loop.train import train

STEPS = 4
MESHES = {"fsdp": (0, 1), "fsdp x sp": (0, 2), "hsdp": (2, 1), "hsdp x sp": (2, 2), "sp": (0, 4)}


LONG = {"fsdp": 20, "sp": 20}
"""Steps on equal data: separate sequences per rank (fsdp) and shared ones (sp) give equal losses for 20 steps."""


def a_spec(data: Path, fsdp: int, sp: int, *, steps: int = STEPS, **model: str) -> JobSpec:
    return spec(
        model={"config": TINY, "dtype": "fp32", "gradient_checkpointing": "none"} | model,
        data={"train": {"path": str(data)}, "columns": {"input_ids": "ids"}, "packing": False},
        training={"max_steps": steps, "global_batch_size": 8, "max_grad_norm": 0.3, "weight_decay": 0.1}
        # From one micro-batch of each rank (fsdp) to four (sp, and one rank).
        | {"per_device_train_batch_size": 2}
        # A schedule that does not depend on the number of steps.
        | {"lr_scheduler_type": "constant"},
        strategy={"fsdp_size": fsdp, "ulysses_size": sp},
        checkpoint={"every_steps": 10, "keep_last": 1},
        scaling={"num_workers": dist.get_world_size() if dist.is_initialized() else 1},
    )


def a_session(folder: Path) -> Session:
    return Session(dist.get_rank(), dist.get_world_size(), 0, 1, RunDir(folder), local_stream)


def train_all(data: Path, folder: Path, meshes: dict[str, tuple[int, int]]) -> None:
    """Train a run for every mesh, each in a folder of that name."""
    for name, (fsdp, sp) in meshes.items():
        steps = LONG.get(name, 20 if name == "one rank" else STEPS)
        job = a_spec(data, fsdp, sp, steps=steps, gradient_checkpointing="full" if name == "hsdp" else "none")
        train(job, a_session(folder / name), find_dataset(job, folder))


def lines(folder: Path) -> list[dict[str, Any]]:
    return list(read_lines(RunDir(folder).attempt(1).metrics))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    # Rows shorter than the sequence, so that data ranks differ in the tokens they train.
    write_tokens(folder / "d.parquet", rows=40, length=(9, 32), vocab=TINY["vocab_size"])
    on_ranks(1, train_all, folder / "d.parquet", folder, {"one rank": (0, 1)})
    on_ranks(4, train_all, folder / "d.parquet", folder, MESHES)
    return folder


@pytest.mark.parametrize("mesh", MESHES)
def test_every_mesh_trains_the_same_run(runs: Path, mesh: str) -> None:
    expected, found = lines(runs / "one rank"), lines(runs / mesh)
    assert len(found) == LONG.get(mesh, STEPS)
    for one, many in zip(expected, found, strict=False):
        assert many["tokens"] == one["tokens"]
        assert many["loss"] == pytest.approx(one["loss"], rel=1e-5)
        assert many["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)


def train_bf16(data: Path, folder: Path) -> None:
    job = a_spec(data, 2, 2, dtype="bf16")
    train(job, a_session(folder / "bf16"), find_dataset(job, folder))


def test_bf16_trains_near_the_fp32_run_with_fp32_master_weights(runs: Path) -> None:
    on_ranks(4, train_bf16, runs / "d.parquet", runs)
    assert len(lines(runs / "bf16")) == STEPS
    for one, many in zip(lines(runs / "one rank"), lines(runs / "bf16"), strict=False):
        assert many["loss"] == pytest.approx(one["loss"], rel=0.01)
    # A single step may have the same loss by chance: the weights and data are random.
    losses = [[line["loss"] for line in lines(runs / name)[:STEPS]] for name in ("one rank", "bf16")]
    assert losses[0] != losses[1], "expected bf16 computation"
    weights = load_checkpoint(runs / "bf16", STEPS)["model"]
    assert {str(weight.dtype) for weight in weights.values()} == {"torch.float32"}


def test_tokens_are_counted_once_without_padding(runs: Path) -> None:
    rows = find_dataset(a_spec(runs / "d.parquet", 0, 1), runs)
    assert 0 < lines(runs / "hsdp")[-1]["tokens"] < STEPS * 8 * rows.sequence_length


def resume_on_other_data(data: Path, folder: Path) -> str:
    """Return the error of a resumed run whose files were changed."""
    job = a_spec(data, 0, 1)
    train(job, a_session(folder), find_dataset(job, folder))
    write_tokens(data, rows=41, length=32, vocab=TINY["vocab_size"])
    try:
        train(job, a_session(folder), find_dataset(job, folder))
    except DataError as error:
        return str(error)
    return ""


def test_run_does_not_resume_on_other_data(tmp_path: Path) -> None:
    write_tokens(tmp_path / "d.parquet", rows=40, length=32, vocab=TINY["vocab_size"])
    (error,) = on_ranks(1, resume_on_other_data, tmp_path / "d.parquet", tmp_path / "run")
    assert error.startswith(f"the checkpoint of step {STEPS} was trained on dataset")


def test_files_read_directly_must_not_change_during_a_run(tmp_path: Path) -> None:
    data, run_dir = tmp_path / "d.parquet", RunDir(tmp_path / "run")
    write_tokens(data, rows=40, length=32, vocab=TINY["vocab_size"])
    job = a_spec(data, 0, 1)
    assert pinned_dataset(job, run_dir.data) is None
    dataset = find_dataset(job, tmp_path)
    write_durably(run_dir.data, dataset.model_dump_json())
    assert pinned_dataset(job, run_dir.data) == dataset
    write_tokens(data, rows=41, length=32, vocab=TINY["vocab_size"])
    with pytest.raises(DataError, match="have changed since the run began; restore them, or start a new run"):
        pinned_dataset(job, run_dir.data)


def resume_past_a_bad_checkpoint(data: Path, folder: Path) -> list[int]:
    """Return the checkpoints of a run that keeps one, after a resume with a damaged newest checkpoint."""
    job = a_spec(data, 0, 1)
    train(job, a_session(folder), find_dataset(job, folder))
    run_dir = RunDir(folder)
    run_dir.checkpoint(STEPS).rename(run_dir.checkpoint(STEPS + 5))
    manifest = run_dir.checkpoint(STEPS + 5) / "manifest.json"
    manifest.write_text(manifest.read_text().replace(f'"step": {STEPS},', f'"step": {STEPS + 5},'))
    next(run_dir.checkpoint(STEPS + 5).glob("*.distcp")).write_bytes(b"damaged")
    train(job, a_session(folder), find_dataset(job, folder))
    return sorted(run_dir.manifests())


def test_rejected_checkpoint_does_not_replace_a_valid_one(tmp_path: Path) -> None:
    write_tokens(tmp_path / "d.parquet", rows=40, length=32, vocab=TINY["vocab_size"])
    assert on_ranks(1, resume_past_a_bad_checkpoint, tmp_path / "d.parquet", tmp_path / "run") == [[STEPS]]
    assert [p.name for p in RunDir(tmp_path / "run").checkpoints.glob("*.rejected-*")] == [
        f"step-{STEPS + 5:08d}.rejected-1.0"
    ]
