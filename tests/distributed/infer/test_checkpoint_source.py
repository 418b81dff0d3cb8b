"""Inference from a job's checkpoint: results are those of its export, bit for bit, at any number of ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.support.builders.exports import save_a_run
from tests.support.builders.specs import TINY, infer_spec
from tests.support.ranks.ranks import on_ranks
from tests.support.ranks.torchrun import write_tokens
from train_loop.checkpoint.export.huggingface import export
from train_loop.checkpoint.weights import Weights
from train_loop.data.prepare.cache import find_dataset
from train_loop.data.read_results import read_rows
from train_loop.data.stream.local import local_stream
from train_loop.errors import UserError
from train_loop.infer import infer
from train_loop.loop.session import Session
from train_loop.run_dir import ExportWish, Parent, RunDir
from train_loop.spec import InferJobSpec, parse_any
from train_loop.spec.model import Dtype

STEP, ROWS, LENGTH = 3, 11, 32
CHOICES: dict[str, tuple[Dtype, Weights, str]] = {
    "weights": ("fp32", "model", "logprobs"),
    "weights in bf16": ("bf16", "model", "logprobs"),
    "average": ("fp32", "ema", "logprobs"),
    "embeddings": ("fp32", "model", "embeddings"),
}
"""dtype, weights and output of each pair of jobs."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with rows, and with a run that has saved a checkpoint on two ranks."""
    folder = tmp_path_factory.mktemp("runs")
    write_tokens(folder / "d.parquet", rows=64, length=LENGTH, vocab=TINY["vocab_size"])
    write_tokens(folder / "rows.parquet", rows=ROWS, length=(1, LENGTH), vocab=TINY["vocab_size"])
    on_ranks(2, save_a_run, folder, RunDir(folder / "trained"), {})
    return folder


def job_of(folder: Path, model: dict[str, Any], output: str) -> InferJobSpec:
    """Return a job over the rows on the existing ranks."""
    raw = infer_spec(
        data={"train": {"path": str(folder / "rows.parquet")}},
        infer={"output": output, "rows_per_shard": 4, "batch_size": 2},
        scaling={"num_workers": dist.get_world_size() if dist.is_initialized() else 1},
    )
    job = parse_any(raw | {"model": model})
    assert isinstance(job, InferJobSpec)
    return job


def start_from(folder: Path, run_dir: RunDir) -> None:
    """Let a run start from the checkpoint of the trained run, as the service does."""
    trained = RunDir(folder / "trained")
    run_dir.write_parent(
        Parent(
            job="job-trained",
            run_dir=str(trained.root),
            manifest=trained.manifests()[STEP],
            same_order=False,
            same_optimizer=False,
        )
    )


def run(folder: Path, run_dir: RunDir, job: InferJobSpec) -> None:
    session = Session(dist.get_rank(), dist.get_world_size(), 0, 1, run_dir, local_stream, end_event="work_ended")
    infer(job, session, find_dataset(job.run, folder))


def of_job(dtype: str, weights: str) -> dict[str, Any]:
    return {"job": "job-trained", "step": STEP, "weights": weights, "config": TINY, "dtype": dtype}


def export_of(folder: Path, wish: ExportWish) -> Path:
    return RunDir(folder / "trained").exports.folder(STEP, wish)


def run_both(folder: Path, world: int) -> None:
    """Compute results from the checkpoint and from its export."""
    for name, (dtype, weights, output) in CHOICES.items():
        place = folder / f"{name} on {world}"
        run(folder, RunDir(place / "job"), job_of(folder, of_job(dtype, weights), output))
        path = str(export_of(folder, ExportWish(dtype=dtype, weights=weights)))
        run(folder, RunDir(place / "export"), job_of(folder, {"path": path, "dtype": dtype}, output))


@pytest.mark.parametrize("world", [1, 2])
def test_results_from_a_checkpoint_equal_those_of_its_export(folder: Path, world: int) -> None:
    for name, (dtype, weights, _) in CHOICES.items():
        wish = ExportWish(dtype=dtype, weights=weights)
        assert export(RunDir(folder / "trained"), STEP, wish) == export_of(folder, wish)
        start_from(folder, RunDir(folder / f"{name} on {world}" / "job"))
    on_ranks(world, run_both, folder, world)
    found = {}
    for name in CHOICES:
        found[name], exported = (
            list(read_rows(RunDir(folder / f"{name} on {world}" / of))) for of in ("job", "export")
        )
        assert found[name] == exported, name
        assert [row["row"] for row in found[name]] == list(range(ROWS))
    assert found["weights"] != found["average"], "the average differs from the weights"


def test_damaged_checkpoint_or_none_is_refused(folder: Path) -> None:
    assert on_ranks(1, refusals, folder) == [
        [
            "model.job=job-trained needs the service, which finds the checkpoint; give model.path the folder that "
            "`trainshed export` prints",
        ]
    ]


def refusals(folder: Path) -> list[str]:
    with pytest.raises(UserError) as caught:
        run(folder, RunDir(folder / "alone"), job_of(folder, of_job("fp32", "model"), "logprobs"))
    return [str(caught.value)]
