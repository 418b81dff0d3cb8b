"""Results of inference jobs over HTTP: pages by row id, limits, and isolation of projects."""

import io
import json
import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fastapi.testclient import TestClient

from tests.support.builders.specs import infer_spec
from tests.support.clients.command import run
from tests.support.fakes.service import FakeService, spec_body
from train_loop.data.read_results import read_page, results_schema
from train_loop.run_dir import RunDir
from train_loop.spec import InferJobSpec, parse_any
from trainshed import Client
from trainshed.cli.commands import runs

PER_SHARD = 4
NUMBERS = [1.5, None, math.inf, math.nan]
SPEC = infer_spec(infer={"output": "perplexity", "rows_per_shard": PER_SHARD}) | {
    "data": {"train": {"path": "/data/*.parquet"}, "columns": {"text": "text"}, "sequence_length": 32}
}


def _schema() -> pa.Schema:
    spec = parse_any(SPEC)
    assert isinstance(spec, InferJobSpec)
    return results_schema(spec)


SCHEMA = _schema()


@pytest.fixture
def job(client: TestClient, service: FakeService) -> str:
    """Create an inference job with two committed shards of four rows."""
    job_id = str(client.post("/jobs", content=json.dumps(SPEC)).json()["id"])
    service.reconciler().run_once()
    commit(service.run_dir(job_id), 2)
    return job_id


def commit(run_dir: RunDir, shards: int, text: str = "ä") -> None:
    for number in range(shards):
        rows = range(number * PER_SHARD, (number + 1) * PER_SHARD)
        values = {"row": list(rows), "text": [text] * PER_SHARD, "tokens": [1, 2, 3, 4], "perplexity": NUMBERS}
        content = io.BytesIO()
        pq.write_table(pa.table(values, SCHEMA), content)
        run_dir.results.commit(number, content.getvalue())


def test_results_are_paged_by_row_id(client: TestClient, service: FakeService, job: str) -> None:
    page = client.get(f"/jobs/{job}/results?limit=3").json()
    assert [row["row"] for row in page["data"]] == [0, 1, 2]
    assert [row["perplexity"] for row in page["data"]] == [1.5, None, "Infinity"]
    assert (page["data"][0]["text"], page["has_more"], page["next"]) == ("ä", True, "2")
    rest = client.get(f"/jobs/{job}/results?after=2").json()
    assert [row["row"] for row in rest["data"]] == [3, 4, 5, 6, 7]
    assert (rest["data"][0]["perplexity"], rest["has_more"], rest["next"]) == ("NaN", False, "7")
    end = client.get(f"/jobs/{job}/results?after=7").json()
    assert end == {"data": [], "has_more": False, "next": "7"}
    commit(service.run_dir(job), 3)
    assert [row["row"] for row in client.get(f"/jobs/{job}/results?after=7").json()["data"]] == [8, 9, 10, 11]


def test_page_ends_before_the_row_that_is_too_large(service: FakeService, job: str) -> None:
    run_dir = service.run_dir(job)
    commit(run_dir, 2, text="x" * 1000)
    sizes = {most: json.loads(read_page(run_dir, after=1, limit=100, most_bytes=most)) for most in (10, 2500, 10**6)}
    assert {most: [row["row"] for row in page["data"]] for most, page in sizes.items()} == {
        10: [2],
        2500: [2, 3],
        10**6: [2, 3, 4, 5, 6, 7],
    }
    assert [page["has_more"] for page in sizes.values()] == [True, True, False]


def test_results_are_refused_without_a_role_and_for_other_kinds(
    client: TestClient, service: FakeService, job: str
) -> None:
    key = client.post("/keys", json={"name": "k", "roles": {"other": "admin"}}).json()["secret"]
    with service.client(authorization=f"Bearer {key}") as stranger:
        refused = stranger.get(f"/jobs/{job}/results")
        assert (refused.status_code, refused.json()["code"]) == (404, "job_not_found")
    queued = client.post("/jobs", content=json.dumps(infer_spec())).json()["id"]
    assert client.get(f"/jobs/{queued}/results").json() == {"data": [], "has_more": False, "next": None}
    trained = client.post("/jobs", content=spec_body()).json()["id"]
    other = client.get(f"/jobs/{trained}/results")
    assert (other.status_code, other.json()["code"]) == (409, "no_results")
    for query in ("limit=0", "limit=1001", "after=-1", "after=x", "before=3"):
        assert client.get(f"/jobs/{job}/results?{query}").status_code == 422, query


def test_damaged_shard_is_an_error_of_the_read(client: TestClient, service: FakeService, job: str) -> None:
    service.run_dir(job).results.commit(1, b"no Parquet")
    answer = client.get(f"/jobs/{job}/results?after=3")
    assert (answer.status_code, answer.json()["code"]) == (503, "results_unreadable")
    assert answer.json()["detail"].startswith("the results could not be read: Parquet magic bytes not found")


def test_client_and_command_read_results_from_the_service(
    home: Path, url: str, service: FakeService, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Client(url, (home / "admin.key").read_text().strip()) as client:
        assert [row["row"] for row in client.job(job).results()] == list(range(8))
    near = run("results", job, "--limit", "5").stdout
    monkeypatch.setattr(RunDir, "exists", lambda _: False)
    assert run("results", job, "--limit", "5").stdout == near
    assert [json.loads(line)["row"] for line in near.splitlines()] == [0, 1, 2, 3, 4]


def test_command_writes_the_same_file_near_the_run_directory_and_far_from_it(
    home: Path, url: str, service: FakeService, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "_LINES", 3)
    files = [home / "near.parquet", home / "far.parquet"]
    for file in files:
        found = run("results", job, "-o", str(file))
        assert (found.stdout.strip(), found.stderr.splitlines()[0]) == (str(file), "8 rows")
        monkeypatch.setattr(RunDir, "exists", lambda _: False)
    near, far = map(pq.read_table, files)
    assert far.schema == near.schema == SCHEMA
    assert [_text(row) for row in far.to_pylist()] == [_text(row) for row in near.to_pylist()]
    assert "exists; choose a new file" in run("results", job, "-o", str(files[1])).stderr


def _text(row: dict[str, Any]) -> str:
    # NaN equals nothing.
    return repr(row)
