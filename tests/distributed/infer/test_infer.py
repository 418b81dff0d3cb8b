"""Inference: results equal transformers' at every mesh and batch size, and no fault repeats or loses a row."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from tests.support.builders.specs import TINY, infer_spec
from tests.support.ranks import warm_runs
from tests.support.ranks.ranks import on_ranks
from tests.support.ranks.torchrun import write_tokens
from train_loop.data.prepare.cache import find_dataset
from train_loop.data.read_results import read_rows
from train_loop.data.stream.local import local_stream
from train_loop.infer import infer
from train_loop.loop.session import Session
from train_loop.run_dir import Outcome, RunDir, read_lines
from train_loop.spec import InferJobSpec, parse_any

LENGTH, ROWS, PER_SHARD = 32, 23, 4
FOLDER = "model"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Return a folder with rows of uneven lengths, and a model with weights."""
    write_tokens(tmp_path / "d.parquet", rows=ROWS, length=(1, LENGTH), vocab=TINY["vocab_size"])
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**TINY)).save_pretrained(tmp_path / FOLDER)
    return tmp_path


def raw_job(data: Path, **parts: Any) -> dict[str, Any]:
    """Return the spec of a job on these rows as plain data, with fields overridden."""
    base: dict[str, Any] = {
        "model": {"path": str(data / FOLDER), "dtype": "fp32"},
        "data": {
            "train": {"path": str(data / "d.parquet")},
            "columns": {"input_ids": "ids"},
            "sequence_length": LENGTH,
        },
        "infer": {"rows_per_shard": PER_SHARD},
    }
    return infer_spec() | {name: base.get(name, {}) | parts.get(name, {}) for name in base | parts}


def job_of(data: Path, **parts: Any) -> InferJobSpec:
    job = parse_any(raw_job(data, **parts))
    assert isinstance(job, InferJobSpec)
    return job


def run(data: Path, folder: Path, *, stop_after: int | None = None, **parts: Any) -> Outcome:
    """Compute results on the existing ranks; `stop_after` is the number of batches after which the job is paused."""
    job = job_of(data, **parts, scaling={"num_workers": dist.get_world_size()})
    calls = iter(range(10**6))
    session = Session(dist.get_rank(), dist.get_world_size(), 0, 1, RunDir(folder), local_stream)
    stops = replace(session, stop_requested=lambda: stop_after is not None and next(calls) >= stop_after)
    return infer(job, replace(stops, end_event="work_ended"), find_dataset(job.run, folder))


def plain_logprobs(data: Path) -> list[list[float]]:
    """Return the log probabilities of each row by a plain loop of transformers."""
    model = AutoModelForCausalLM.from_pretrained(data / FOLDER, dtype=torch.float32).eval()
    found = []
    for ids in pq.read_table(data / "d.parquet")["ids"].to_pylist():
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0]
        found.append(logits[:-1].log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist())
    return found


def check(data: Path, folder: Path, expected: list[list[float]]) -> None:
    """Compare the results in a folder with those of transformers."""
    rows, ids = list(read_rows(RunDir(folder))), pq.read_table(data / "d.parquet")["ids"].to_pylist()
    assert [row["row"] for row in rows] == list(range(ROWS))
    assert [row["ids"] for row in rows] == ids
    assert [row["tokens"] for row in rows] == [len(one) for one in ids]
    for row, values in zip(rows, expected, strict=True):
        np.testing.assert_allclose(row["logprobs"], values, rtol=0, atol=1e-5)


MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "fsdp": (2, {"infer": {"rows_per_shard": PER_SHARD, "batch_size": 3}}),
}


def test_logprobs_equal_a_plain_loop_at_every_mesh_and_batch_size(data: Path) -> None:
    expected = plain_logprobs(data)
    for name, (world, parts) in MESHES.items():
        outcomes = on_ranks(world, run_with, data, data / name, parts)
        assert outcomes == [Outcome(result="succeeded", step=ROWS)] * world
        check(data, data / name, expected)
        (built,) = [
            line for line in read_lines(RunDir(data / name).attempt(1).events) if line["event"] == "model_built"
        ]
        units = {one["module"]: one["count"] for one in built["units"]}
        assert units.get("Qwen3DecoderLayer") == (2 if world > 1 else None)
        assert (built["optimizer_groups"], built["trained_parameters"]) == ([], 0)


def test_job_without_the_service_splits_rows_and_computes_the_same(data: Path) -> None:
    job = raw_job(data, strategy={"ulysses_size": 2}, infer={"batch_size": 2}, scaling={"num_workers": 2})
    warm_runs.run(job, data / "run", 2)
    check(data, data / "run", plain_logprobs(data))
    assert RunDir(data / "run").attempt(1).outcome() == Outcome(result="succeeded", step=ROWS)


def run_with(data: Path, folder: Path, parts: dict[str, Any]) -> Outcome:
    return run(data, folder, **parts)


def test_paused_job_resumes_at_another_size_without_repeated_or_missing_rows(data: Path) -> None:
    folder = data / "run"
    (paused,) = on_ranks(1, stopped_run, data, folder)
    assert paused == Outcome(result="paused", step=8)
    shards = {path.name: path.read_bytes() for path in (folder / "results").iterdir()}
    assert sorted(shards) == [f"part-{number:06d}.parquet" for number in range(2)]
    on_ranks(2, run_with, data, folder, {})
    assert {name: (folder / "results" / name).read_bytes() for name in shards} == shards
    check(data, folder, plain_logprobs(data))
    started = [line for line in read_lines(RunDir(folder).attempt(1).events) if line["event"] == "work_started"]
    # Two rows of the third shard were computed, and are lost.
    assert [line["replayed"] for line in started] == [0, 2]
    assert [(line["resumed_from"], line["steps"]) for line in started] == [(0, ROWS), (8, ROWS)]


def stopped_run(data: Path, folder: Path) -> Outcome:
    return run(data, folder, stop_after=5, infer={"rows_per_shard": PER_SHARD, "batch_size": 2})


def test_perplexity_and_embeddings_equal_a_plain_loop(data: Path) -> None:
    (found,) = on_ranks(1, other_outputs, data, {})
    split, _ = on_ranks(2, other_outputs, data, {"strategy": {"ulysses_size": 2}})
    np.testing.assert_allclose(split["embedding"], found["embedding"], rtol=0, atol=1e-6)
    np.testing.assert_allclose(split["mean"], plain_embeddings(data, "mean"), rtol=0, atol=1e-5)
    losses = [-float(np.mean(row)) if row else math.nan for row in plain_logprobs(data)]
    perplexities = np.array([math.nan if one is None else one for one in found["perplexity"]])
    np.testing.assert_allclose(perplexities, np.exp(np.array(losses)), rtol=1e-5)
    np.testing.assert_allclose(found["embedding"], plain_embeddings(data, "last_token"), rtol=0, atol=1e-5)


def plain_embeddings(data: Path, pooling: str) -> list[list[float]]:
    """Return the state of each row's last token, or the mean of all, divided by its norm, by plain transformers."""
    model, found = AutoModel.from_pretrained(data / FOLDER, dtype=torch.float32).eval(), []
    for ids in pq.read_table(data / "d.parquet")["ids"].to_pylist():
        with torch.no_grad():
            states = model(torch.tensor([ids])).last_hidden_state[0]
        pooled = states[-1] if pooling == "last_token" else states.mean(0)
        found.append((pooled / pooled.norm()).tolist())
    return found


def other_outputs(data: Path, parts: dict[str, Any]) -> dict[str, list[Any]]:
    found, mean = {}, {"head": {"embedding": {"pooling": "mean"}}}
    for name, column, model in (
        ("perplexity", "perplexity", {}),
        ("embeddings", "embedding", {}),
        ("mean", "embedding", mean),
    ):
        folder = data / f"{name} {len(parts)}"
        run(data, folder, infer={"output": "embeddings" if model else name}, model=model, **parts)
        found[name if model else column] = [row[column] for row in read_rows(RunDir(folder))]
    return found
