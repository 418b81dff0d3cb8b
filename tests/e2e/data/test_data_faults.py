"""Data preparation and streaming on real Ray during storage and process failures: every sample exactly once."""

import gzip
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
import yaml
from ray._private.internal_api import memory_summary

from tests.support.builders.specs import raw_spec, spec
from tests.support.ranks.own_ray import own_ray
from tests.support.servers.s3 import S3Server, s3_server
from tests.support.waiting import running, wait_for
from train_loop.data.dataset import Dataset, Rows
from train_loop.data.order import Order, StepOrder
from train_loop.data.prepare.cache import find_dataset
from train_loop.data.prepare.packing import Sample
from train_loop.data.prepare.pipeline import prepare
from train_loop.data.shards import write_part
from train_loop.data.stream.local import StreamPlan, read_rows
from train_loop.data.stream.ray_data import BLOCKS_HELD, block_bytes, by_step, open_splits
from train_loop.spec import JobSpec, parse


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with s3_server() as server:
        server.bucket("data")
        yield server


@pytest.fixture(scope="module", autouse=True)
def address(s3: S3Server) -> Iterator[str]:
    """Return the address of a Ray cluster whose workers find the S3 server."""
    with own_ray(store_bytes=200_000_000, environment=s3.environment()) as address:
        yield address


def silent(event: str, **fields: object) -> None:
    """Ignore a report."""


def texts(count: int) -> list[str]:
    return [f"document {n} " + " ".join(f"word{(n * i) % 97}" for i in range(n % 40)) for n in range(count)]


def json_lines(count: int) -> bytes:
    return "\n".join(json.dumps({"text": text}) for text in texts(count)).encode()


def text_spec(path: object) -> JobSpec:
    return spec(data={"train": {"path": str(path)}, "columns": {"text": "text"}, "sequence_length": 64})


def assert_same_samples(one: Dataset, other: Dataset) -> None:
    first, second = (read_rows(dataset, np.arange(dataset.samples)) for dataset in (one, other))
    assert np.array_equal(first.input_ids, second.input_ids)
    assert np.array_equal(first.position_ids, second.position_ids)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Return the samples prepared from the same text on the local disk."""
    folder = tmp_path_factory.mktemp("local")
    (folder / "a.jsonl").write_bytes(json_lines(400))
    return prepare(text_spec(folder / "a.jsonl"), folder / "_cache", silent)


def test_temporary_storage_refusal_changes_nothing(s3: S3Server, tmp_path: Path, expected: Dataset) -> None:
    s3.put("data/text/a.jsonl.gz", gzip.compress(json_lines(400)))
    before = s3.refused
    with ThreadPoolExecutor(1) as pool:
        with s3.refuse():
            found = pool.submit(prepare, text_spec("s3://data/text/*.jsonl.gz"), tmp_path, silent)
            wait_for(lambda: s3.refused > before + 3, "requests that were refused")
        assert_same_samples(found.result(timeout=120), expected)


def prepare_alone(job: Path, cache: Path, address: str) -> "subprocess.Popen[str]":
    """Run `python -m train_loop.prepare` on the test's Ray, in a separate process."""
    command = [sys.executable, "-m", "train_loop.prepare", str(job), "--cache", str(cache)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ | {"RAY_ADDRESS": address}, text=True
    )


def written(folder: Path, path: object) -> Path:
    """Write a spec for the text at a path and return its file."""
    job = raw_spec(data={"train": {"path": str(path)}, "columns": {"text": "text"}, "sequence_length": 64})
    (folder / "spec.yaml").write_text(yaml.safe_dump(job))
    return folder / "spec.yaml"


def test_concurrent_jobs_prepare_the_same_data_once(address: str, tmp_path: Path, expected: Dataset) -> None:
    (tmp_path / "a.jsonl").write_bytes(json_lines(400))
    job = written(tmp_path, tmp_path / "a.jsonl")
    both = [prepare_alone(job, tmp_path / "_cache", address) for _ in range(2)]
    outputs = [process.communicate(timeout=120) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    events = [line.split()[0] for _, errors in outputs for line in errors.splitlines() if "=" in line]
    assert events.count("preparing") == events.count("training_tokenizer") == 1, outputs
    assert outputs[0][0] == outputs[1][0]
    assert_same_samples(find_dataset(parse(yaml.safe_load(job.read_text())), tmp_path / "_cache"), expected)


def test_killed_preparation_leaves_nothing_readable(
    s3: S3Server, address: str, tmp_path: Path, expected: Dataset
) -> None:
    s3.put("data/killed/a.jsonl", json_lines(400))
    # The tokenizer exists already, so the process dies while it writes the samples.
    job = text_spec("s3://data/killed/a.jsonl")
    assert expected.tokenizer is not None
    job = job.model_copy(update={"model": job.model.model_copy(update={"tokenizer": expected.tokenizer})})
    (tmp_path / "spec.json").write_text(job.model_dump_json())
    before = s3.refused
    process = prepare_alone(tmp_path / "spec.json", tmp_path / "_cache", address)
    assert process.stderr is not None
    # Ray may warn of a slow machine.
    assert any(line.startswith("preparing") for line in process.stderr), "it ended without preparing anything"
    with s3.refuse():
        wait_for(lambda: s3.refused > before or process.poll() is not None, "a read that is waiting")
        process.kill()
        process.communicate(timeout=30)
    left = [path for path in (tmp_path / "_cache").iterdir() if path.is_dir()]
    assert all(".tmp-" in path.name for path in left), "the killed process has committed"
    assert left
    assert_same_samples(prepare(job, tmp_path / "_cache", silent), expected)


@pytest.fixture(scope="module")
def numbered(s3: S3Server) -> Dataset:
    """Return 200 samples in small row groups on S3; sample i contains the number i."""
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"ids": [[i] * 4 for i in range(200)]}), sink, row_group_size=16)
    s3.put("data/numbered/rows.parquet", sink.getvalue().to_pybytes())
    data = {"train": {"path": "s3://data/numbered/"}, "columns": {"input_ids": "ids"}}
    return find_dataset(spec(data=data | {"packing": False, "sequence_length": 4}), Path("/nowhere"))


def drain_all(plan: StreamPlan) -> "list[Future[list[Rows]]]":
    """Return the rows of every data rank, read concurrently."""
    splits = open_splits(plan, plan.start, plan.steps)
    pool = ThreadPoolExecutor(len(splits))
    futures = [pool.submit(list, by_step(split, plan.order.per_rank)) for split in splits]
    pool.shutdown(wait=False)
    return futures


def assert_exact(plan: StreamPlan, futures: "list[Future[list[Rows]]]") -> None:
    for rank, future in enumerate(futures):
        stream = future.result(timeout=120)[: plan.steps]
        assert len(stream) == plan.steps
        for step, rows in enumerate(stream):
            ids = plan.order.step(plan.start + step * plan.order.global_batch)[rank]
            assert rows.samples.tolist() == ids.tolist()
            assert rows.input_ids[:, 0].tolist() == ids.tolist()


def reading_workers() -> list[psutil.Process]:
    """Return the processes of Ray that read blocks now."""
    family = psutil.Process().children(recursive=True)
    return [process for process in family if "_read_block" in " ".join(_command(process))]


def _command(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.NoSuchProcess:
        return []


def test_slow_and_killed_data_worker_costs_no_sample(s3: S3Server, numbered: Dataset) -> None:
    deal = StepOrder(Order(200, 0, shuffle=True, dataset="x", end=10**6), 2, 4)
    plan = StreamPlan(numbered, deal, 40, 48)
    before = s3.refused
    with s3.refuse():
        futures = drain_all(plan)
        wait_for(lambda: s3.refused > before, "a Data worker that waits for storage")
        (victim, *_) = wait_for(reading_workers, "a Data worker that reads")
        victim.kill()
        wait_for(lambda: not running([victim]), "its death")
        assert not any(future.done() for future in futures)
    assert_exact(plan, futures)


def plasma_bytes() -> float:
    """Return the size of the objects in Ray's object store, in bytes."""
    # Another Ray may run on this machine.
    summary = memory_summary(ray.get_runtime_context().gcs_address, stats_only=True)
    (line,) = [line for line in summary.splitlines() if line.startswith("Plasma memory usage")]
    return float(line.split()[3]) * 2**20


def resting_bytes() -> float:
    """Return the size of the object store once it is stable for a second."""
    seen = [plasma_bytes()]

    def rests() -> bool:
        seen.append(plasma_bytes())
        return len(seen) > 20 and len(set(seen[-20:])) == 1

    wait_for(rests, "an object store that no longer grows")
    return seen[-1]


def test_read_ahead_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The data is over ten times larger than the read-ahead limit of two slow ranks."""
    rows, length = 4096, 2048
    # Small blocks, so that there are many of them.
    monkeypatch.setattr("train_loop.data.stream.ray_data._BLOCK_STEPS", 8)
    draw = np.random.default_rng(0)
    samples = (Sample(draw.integers(0, 99, length, np.int32), None, None, [length]) for _ in range(rows))
    dataset = Dataset(fingerprint="x", parts=(write_part(samples, tmp_path),), sequence_length=length)
    deal = StepOrder(Order(rows, 0, shuffle=True, dataset="x", end=10**9), 2, 2)
    plan = StreamPlan(dataset, deal, 0, rows // 4)
    bound = 2 * BLOCKS_HELD * block_bytes(plan)
    assert rows * length * 12 > 10 * bound
    ranks = [by_step(split, 2) for split in open_splits(plan, 0, plan.steps)]
    with ThreadPoolExecutor(2) as pool:

        def take(steps: int) -> None:
            list(pool.map(lambda rank: list(itertools.islice(rank, steps)), ranks))

        for _ in range(3):
            take(64)
            assert resting_bytes() <= bound
        take(plan.steps)
