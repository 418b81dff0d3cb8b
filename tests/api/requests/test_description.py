"""The real service against its OpenAPI document: schemathesis searches for answers that violate it."""

import io
import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from service.adapters.storage.run_dirs import LocalRunDirs
from service.api.schemas import KeyIn
from service.domain.access.roles import Role
from service.domain.jobs.job import JobState
from tests.support.builders.searches import drawn
from tests.support.builders.specs import infer_spec
from tests.support.builders.tensors import tensor_checkpoint
from tests.support.clients.examples import ANSWERS, EXAMPLES, Examples
from tests.support.fakes.service import FakeService, raw_spec, spec_body
from tests.support.servers.live import LiveService
from tests.support.waiting import wait_for
from train_loop.run_dir import RunDir
from trainshed import Api

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "response_headers_conformance",
    "ignored_auth",
    "negative_data_rejection",
    "unsupported_method",
    "allow_header_conformance",
    "use_after_free",
    "ensure_resource_availability",
)
SETTINGS = """
[phases.stateful]
generation.max-examples = 20

# The thousands of invalid specs are for POST /jobs/plan only, which parses them in the same way.
[[operations]]
include-name = "POST /jobs"
phases.coverage.enabled = false
{others}

# Each call starts a process.
[[operations]]
include-name = "GET /jobs/{job_id}/checkpoints/{step}/digests"
{example}

[[operations]]
include-name = "POST /jobs/{job_id}/checkpoints/{step}/verify"
{example}
phases.fuzzing.generation.max-examples = 2

# Each call examines the whole cluster.
[[operations]]
include-name = "POST /doctor"
enabled = false

# The cluster never answers here; tests/api/test_nodes.py covers this call.
[[operations]]
include-name = "GET /nodes"
enabled = false

# The service runs two exports at a time and answers 503 to more.
[[operations]]
include-name = "POST /jobs/{job_id}/checkpoints/{step}/export"
checks.not_a_server_error.expected-statuses = ["2xx", "4xx", 503]
"""
SEARCHES = ",".join(drawn(["coverage", "fuzzing,stateful"], 1))
"""What follows the examples: each value at its limits, or random requests and chains of them. Both with MORE."""
THOUSANDS = 0 in drawn(range(4), 1)
"""Whether this commit sends all invalid specs: one in four does, and `make more`."""
FEW = """
[[operations]]
include-name = "POST /jobs/plan"
phases.coverage.enabled = false
"""
UNREACHABLE = "http://127.0.0.1:9"
"""An address that does not answer."""
HOOK = {"project": "default", "url": UNREACHABLE, "states": ["CANCELLED"]}
LIMIT = 600.0
"""Timeout in seconds; the test takes about forty on an idle machine, and CI may be slow."""


@pytest.fixture
def service(tmp_path: Path) -> Iterator[LiveService]:
    """Start a service whose cluster never answers."""
    alone = {
        "TRAINSHED_RAY_ADDRESS": UNREACHABLE,
        "RAY_AUTH_MODE": "disabled",
        "TRAINSHED_WEBHOOK_ALLOWED": "127.0.0.1",
    }
    service = LiveService(tmp_path / "home", environment=alone)
    service.home.mkdir()
    service.start()
    yield service
    service.stop()


def job_with_a_checkpoint(client: Api) -> str:
    job = client.submit(spec_body())
    LocalRunDirs().prepare(job.run_dir, job.spec, job.scaling, attempt=1)
    tensor_checkpoint(RunDir.at(job.run_dir), 10, {"weight": torch.ones(2, 3)})
    client.export(job.id, 10)
    return job.id


def job_with_results(client: Api) -> str:
    data = {"train": {"path": "stdlib://json/*.py"}, "sequence_length": 32, "on_long_rows": "truncate"}
    job = client.submit(json.dumps(infer_spec() | {"data": data}))
    LocalRunDirs().prepare(job.run_dir, job.spec, job.scaling, attempt=1)
    content = io.BytesIO()
    pq.write_table(pa.table({"row": [0], "tokens": [2], "logprobs": [[-0.5]]}), content)
    RunDir.at(job.run_dir).results.commit(0, content.getvalue())
    return job.id


def ended_job(client: Api) -> str:
    job = client.submit(spec_body())
    client.cancel(job.id)
    wait_for(lambda: client.job(job.id).state == JobState.CANCELLED, "the end of a job")
    return job.id


def webhook(http: httpx.Client) -> str:
    return str(http.post("/webhooks", json=HOOK).json()["webhook"]["id"])


def delivery(http: httpx.Client, hook: str) -> int:
    """Return the number of a delivery of a webhook."""
    (message,) = wait_for(lambda: http.get(f"/webhooks/{hook}/deliveries").json()["data"], "a delivery")
    return int(message["number"])


def examples(client: Api, http: httpx.Client) -> Examples:
    """Create what the calls need to succeed; return their parameters and bodies."""
    hook, other_hook, ended = webhook(http), webhook(http), ended_job(client)
    key = client.create_key(KeyIn(name="alice", roles={"default": Role.VIEWER})).key
    paused = client.submit(spec_body())
    return {
        "*": {"job_id": client.submit(spec_body()).id, "key_id": key.id, "webhook_id": hook},
        "{number}": {"number": delivery(http, hook)},
        "{step}": {"job_id": job_with_a_checkpoint(client), "step": 10},
        "post /jobs": {"body": raw_spec()},
        "post /jobs/plan": {"body": raw_spec()},
        "post /keys": {"body": {"name": "another", "roles": {"default": "viewer"}}},
        "post /jobs/{job_id}/pause": {"job_id": paused.id},
        "post /jobs/{job_id}/resume": {"job_id": paused.id},
        "get /jobs/{job_id}/audit": {"job_id": client.submit(spec_body(training={"audit_samples": True})).id},
        "get /jobs/{job_id}/results": {"job_id": job_with_results(client)},
        "delete /jobs/{job_id}": {"job_id": ended},
        "post /webhooks": {"body": HOOK},
        "delete /webhooks/{webhook_id}": {"webhook_id": other_hook},
    }


def run(service: LiveService, folder: Path) -> "subprocess.CompletedProcess[str]":
    """Run schemathesis until it ends."""
    address = json.loads((service.home / "service.json").read_bytes())["url"]
    authorization = f"Bearer {(service.home / 'admin.key').read_text().strip()}"
    with httpx.Client(base_url=address, headers={"authorization": authorization}, timeout=60) as http:
        (folder / "examples.json").write_text(json.dumps(examples(service.client, http)))
    # The coverage phase makes the same call as the example.
    example = f"phases.examples.enabled = {str('coverage' not in SEARCHES).lower()}"
    settings = SETTINGS.replace("{others}", "" if THOUSANDS else FEW).replace("{example}", example)
    (folder / "schemathesis.toml").write_text(settings)
    variables = {
        # Schemathesis runs in another folder and imports its hooks from here.
        "PYTHONPATH": str(Path.cwd()),
        "SCHEMATHESIS_HOOKS": "tests.support.clients.described",
        EXAMPLES: str(folder / "examples.json"),
        ANSWERS: str(folder / "answers"),
    }
    command = [str(Path(sys.executable).with_name("schemathesis")), "run", f"{address}/openapi.json"]
    command += ["--phases", f"examples,{SEARCHES}"]
    command += ["--header", f"Authorization: {authorization}", "--checks", ",".join(CHECKS), "--continue-on-failure"]
    command += ["--max-examples", "4", "--seed", "1", "--generation-deterministic"]
    command += ["--no-color", "--suppress-health-check", "all", "--request-timeout", "60"]
    return subprocess.run(
        command, cwd=folder, env=os.environ | variables, capture_output=True, text=True, timeout=LIMIT, check=False
    )


@pytest.mark.slow
@pytest.mark.timeout(LIMIT + 100)
def test_service_conforms_to_its_openapi_document(service: LiveService, tmp_path: Path) -> None:
    ended = run(service, tmp_path)
    (tmp_path / "output").write_text(ended.stdout)
    log = (service.home / "service.log").read_text()
    assert ended.returncode == 0, f"{ended.stdout[-20000:]}\n{ended.stderr[-3000:]}\n{log[-5000:]}"
    assert "request_failed" not in log
    answers = defaultdict[str, set[int]](set)
    for line in (tmp_path / "answers").read_text().splitlines():
        status, _, call = line.partition(" ")
        answers[call].add(int(status))
    never = {call: sorted(found) for call, found in answers.items() if not any(200 <= one < 300 for one in found)}
    assert not never, "these calls never succeeded; add what they need to `examples`"
    accepting = {call for call, found in answers.items() if not any(400 <= one < 500 for one in found)}
    if "coverage" in SEARCHES:
        # Specs may be left to the other search.
        assert accepting <= {"post /jobs", "post /jobs/plan"}


def test_openapi_document_is_consistent(tmp_path: Path) -> None:
    document = FakeService(tmp_path).app().openapi()
    text = json.dumps(document)
    schemas = document["components"]["schemas"]
    for name in re.findall(r'"#/components/schemas/([^"]+)"', text):
        assert name in schemas
    assert "$defs" not in text
    calls = [call for methods in document["paths"].values() for call in methods.values()]
    names = [call["operationId"] for call in calls]
    assert len(set(names)) == len(names)
    assert {tag for call in calls for tag in call["tags"]} <= {tag["name"] for tag in document["tags"]}
    links = document["paths"]["/jobs"]["post"]["responses"]["201"]["links"]
    assert {"jobs_get", "jobs_cancel", "runs_logs", "checkpoints_checkpoints"} <= links.keys() <= set(names)
    assert {"X-Request-Id", "Location"} == document["paths"]["/jobs"]["post"]["responses"]["200"]["headers"].keys()
