"""Inference from a job's checkpoint: results are those of its export, bit for bit, at any number of ranks."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from tests.support.builders.exports import save_a_run
from tests.support.builders.specs import TINY, infer_spec, may_read
from tests.support.ranks.ranks import ranks_of_any_number
from tests.support.ranks.torchrun import write_tokens
from tests.support.servers.storage import bucket_of_runs, run_dir_on_s3
from train_loop.checkpoint.export.huggingface import export
from train_loop.checkpoint.weights import Weights
from train_loop.data.prepare.cache import find_dataset
from train_loop.data.read_results import read_rows
from train_loop.data.stream.local import local_stream
from train_loop.errors import FencedError, UserError
from train_loop.infer import infer
from train_loop.loop.session import Session
from train_loop.preflight.model import check_model
from train_loop.preflight.parent_checkpoint import has_its_tokenizer
from train_loop.run_dir import ExportWish, Outcome, Parent, RunDir, Stop
from train_loop.spec import InferJobSpec, parse_any
from train_loop.spec.model import Dtype

STEP, ROWS, LENGTH = 3, 11, 32
CHOICES: dict[str, tuple[Dtype, Weights, str]] = {
    "weights": ("fp32", "model", "logprobs"),
    "weights in bf16": ("bf16", "model", "logprobs"),
    "average": ("fp32", "ema", "logprobs"),
    "embeddings": ("fp32", "model", "embeddings"),
    "generated tokens": ("fp32", "model", "generate"),
}
"""dtype, weights and output of each pair of jobs."""
CallRanks = Callable[..., Any]


@pytest.fixture(scope="module")
def ranks() -> Iterator[CallRanks]:
    """Start ranks that have a bucket."""
    with bucket_of_runs(), ranks_of_any_number(4) as call_ranks:
        yield call_ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, ranks: CallRanks) -> Path:
    """Return a folder with rows, and with a run that has saved a checkpoint on two ranks."""
    folder = tmp_path_factory.mktemp("runs")
    write_tokens(folder / "d.parquet", rows=64, length=LENGTH, vocab=TINY["vocab_size"])
    write_tokens(folder / "rows.parquet", rows=ROWS, length=(1, LENGTH), vocab=TINY["vocab_size"])
    ranks(2, save_a_run, folder, RunDir(folder / "trained"), {})
    return folder


def job_of(folder: Path, model: dict[str, Any], output: str = "logprobs", **strategy: Any) -> InferJobSpec:
    """Return a job over the rows on the existing ranks."""
    more = {"generation": {"max_new_tokens": 4}} if output == "generate" else {}
    raw = infer_spec(
        data={"train": {"path": str(folder / "rows.parquet")}},
        infer={"output": output, "rows_per_shard": 4, "batch_size": 2} | more,
        scaling={"num_workers": dist.get_world_size() if dist.is_initialized() else 1},
        strategy=strategy,
    )
    job = parse_any(raw | {"model": model})
    assert isinstance(job, InferJobSpec)
    return job


def of_job(dtype: str = "fp32", weights: str = "model") -> dict[str, Any]:
    """Return the model of the trained run's checkpoint, as the service writes it."""
    return {"job": "job-trained", "step": STEP, "weights": weights, "config": TINY, "dtype": dtype}


def start_from(folder: Path, run_dir: RunDir) -> RunDir:
    """Let a run start from the checkpoint of the trained run, as the service does."""
    trained = RunDir(folder / "trained")
    manifest = trained.manifests()[STEP]
    parent = Parent(
        job="job-trained", run_dir=str(trained.root), manifest=manifest, same_order=False, same_optimizer=False
    )
    run_dir.write_parent(parent)
    return run_dir


def run(folder: Path, run_dir: RunDir, job: InferJobSpec, *, attempt: int = 1, stop_after: int = 10**6) -> Outcome:
    """Compute results; `stop_after` is the number of batches after which the job is paused."""
    calls, rank = iter(range(10**7)), dist.get_rank()
    session = Session(rank, dist.get_world_size(), 0, attempt, run_dir, local_stream, end_event="work_ended")
    return infer(job, replace(session, stop_requested=lambda: next(calls) >= stop_after), find_dataset(job.run, folder))


def run_both(folder: Path, names: list[str]) -> None:
    """Compute results from the checkpoint and from its export."""
    for name in names:
        dtype, weights, output = CHOICES[name]
        place = folder / f"{name} on {dist.get_world_size()}"
        run(folder, RunDir(place / "job"), job_of(folder, of_job(dtype, weights), output))
        path = str(RunDir(folder / "trained").exports.folder(STEP, ExportWish(dtype=dtype, weights=weights)))
        run(folder, RunDir(place / "export"), job_of(folder, {"path": path, "dtype": dtype}, output))


def test_results_from_a_checkpoint_equal_those_of_its_export(folder: Path, ranks: CallRanks) -> None:
    for dtype, weights, _ in CHOICES.values():
        export(RunDir(folder / "trained"), STEP, ExportWish(dtype=dtype, weights=weights))
    found = {}
    # The run had two.
    for world, names in ((1, [*CHOICES]), (2, ["weights"])):
        places = {name: folder / f"{name} on {world}" for name in names}
        for place in places.values():
            start_from(folder, RunDir(place / "job"))
        ranks(world, run_both, folder, names)
        for name, place in places.items():
            found[name], exported = (list(read_rows(RunDir(place / of))) for of in ("job", "export"))
            assert found[name] == exported, name
            assert [row["row"] for row in found[name]] == list(range(ROWS))
    assert found["weights"] != found["average"], "the average differs from the weights"


MESHES: tuple[tuple[int, dict[str, Any]], ...] = ((4, {"fsdp_size": 2}), (2, {"tp_size": 2}), (4, {"tp_size": 2}))


def test_replicas_and_shared_layers_give_the_results_of_one_rank(folder: Path, ranks: CallRanks) -> None:
    found = []
    for world, strategy in ((1, {}), *MESHES):
        run_dir = start_from(folder, RunDir(folder / f"{strategy} on {world}"))
        ranks(world, run_with, folder, run_dir, strategy)
        found.append(list(read_rows(run_dir)))
    for rows in found[1:]:
        for row, expected in zip(rows, found[0], strict=True):
            np.testing.assert_allclose(row["logprobs"], expected["logprobs"], rtol=0, atol=1e-5)
            assert row | {"logprobs": None} == expected | {"logprobs": None}


def run_with(folder: Path, run_dir: RunDir, strategy: dict[str, Any]) -> None:
    run(folder, run_dir, job_of(folder, of_job(), **strategy))


def test_superseded_group_commits_nothing_on_object_storage(folder: Path, ranks: CallRanks) -> None:
    run_dir = start_from(folder, run_dir_on_s3("job-infer"))
    ranks(1, pause_and_supersede, folder, run_dir)
    rows = list(read_rows(run_dir))
    assert [row["row"] for row in rows] == list(range(ROWS))
    assert all(len(row["logprobs"]) == row["tokens"] - 1 for row in rows)


def pause_and_supersede(folder: Path, run_dir: RunDir) -> None:
    job = job_of(folder, of_job())
    assert run(folder, run_dir, job, stop_after=3) == Outcome(result="paused", step=4)
    run_dir.write_fence(2)
    with pytest.raises(FencedError):
        run(folder, run_dir, job, attempt=1)
    assert run_dir.results.shards() == [0]
    assert run(folder, run_dir, job, attempt=2) == Outcome(result="succeeded", step=ROWS)


def test_stop_request_ends_the_run_before_the_next_batch(folder: Path, ranks: CallRanks) -> None:
    run_dir = start_from(folder, RunDir(folder / "stopped"))
    for mode, result in (("cancel", "cancelled"), ("resize", "resized"), ("pause", "paused")):
        run_dir.write_stop(Stop.model_validate({"mode": mode}))
        assert ranks(2, run_on_folder, folder, run_dir).result == result
    assert run_dir.results.shards() == []


def run_on_folder(folder: Path, run_dir: RunDir) -> Outcome:
    return run(folder, run_dir, job_of(folder, of_job()))


def test_plan_compares_the_model_and_its_tokenizer_with_the_checkpoint(folder: Path) -> None:
    parent = start_from(folder, RunDir(folder / "planned")).parent()
    cache, rows = folder / "_cache", folder / "rows.parquet"
    policy = may_read(str(rows)).model_copy(update={"caches": (str(cache),)})
    for output in ("logprobs", "embeddings"):
        assert check_model(job_of(folder, of_job(), output).run, policy, parent)[1] == []
    narrow = of_job() | {"config": TINY | {"hidden_size": 16}}
    (problem,) = check_model(job_of(folder, narrow).run, policy, parent)[1]
    assert problem.pointer == "/model/config"
    start = (
        "the checkpoint of step 3 of job-trained does not fit: model.embed_tokens.weight is [384, 16] and was [384, 32]"
    )
    assert problem.message.startswith(start)
    other = may_read(str(rows), str(cache))
    tokenizer = str(cache / "tokenizer-1")
    model = job_of(folder, of_job()).model.model_copy(update={"tokenizer": tokenizer})
    assert not has_its_tokenizer(model, parent, policy), "it is not that of the trained run"
    (folder / "trained" / "data" / "dataset.json").rename(folder / "dataset.json")
    (folder / "trained" / "data" / "dataset.json").write_text(json.dumps({"tokenizer": tokenizer}))
    assert has_its_tokenizer(model, parent, policy)
    assert not has_its_tokenizer(model, parent, other), "it is not in the cache"
    (folder / "dataset.json").rename(folder / "trained" / "data" / "dataset.json")


def test_checkpoint_that_is_damaged_or_unknown_ends_the_run(folder: Path, ranks: CallRanks) -> None:
    alone, damaged = RunDir(folder / "alone"), start_from(folder, RunDir(folder / "damaged"))
    parent = damaged.parent()
    assert parent is not None
    files = {"lost.distcp": next(iter(parent.manifest.files.values()))}
    damaged.write_parent(parent.model_copy(update={"manifest": parent.manifest.model_copy(update={"files": files})}))
    assert ranks(1, messages, folder, [alone, damaged]) == [
        "model.job=job-trained needs the service, which finds the checkpoint; give model.path the folder that "
        "`trainshed export` prints",
        "the checkpoint of step 3 of job-trained, from which this run starts, is damaged: lost.distcp is missing; "
        "clone the job from another checkpoint",
    ]


def messages(folder: Path, run_dirs: list[RunDir]) -> list[str]:
    found = []
    for run_dir in run_dirs:
        with pytest.raises(UserError) as caught:
            run(folder, run_dir, job_of(folder, of_job()))
        found.append(str(caught.value))
    return found
