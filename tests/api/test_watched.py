"""Metrics, log and traces of a real process and of a service on fakes."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs

from service.adapters.otel import OtelTraces
from service.adapters.sql.database import open_database
from service.adapters.sql.store import SqlJobStore
from service.adapters.traces import open_traces
from service.ports import NewJob, NoTracer
from tests.support.fakes.service import FakeService, a_job
from tests.support.servers.otlp import Collector, collector
from tests.support.waiting import wait_for
from train_loop.extras import install

STARTED = re.compile(r"Trainshed listens on (http://\S+) \(docs: /docs\)\n")


@dataclass
class Process:
    """A service process on a cluster that never answers, which sends its spans to a test collector."""

    process: subprocess.Popen[str]
    client: httpx.Client
    log: Path
    collector: Collector
    store: SqlJobStore

    def lines(self, **wanted: object) -> list[dict[str, Any]]:
        """Return the lines of its log, parsed as JSON, that contain `wanted`."""
        # The last line may be incomplete.
        whole = self.log.read_text().split("\n")[:-1]
        return [line for line in map(json.loads, whole) if wanted.items() <= line.items()]


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    home = tmp_path_factory.mktemp("watched")
    with collector() as spans, (home / "log").open("w") as log:
        environment = os.environ | {
            "TRAINSHED_HOME": str(home),
            "TRAINSHED_PORT": "0",
            "TRAINSHED_RAY_ADDRESS": "http://127.0.0.1:9",
            "TRAINSHED_LOGS": "json",
            "OTEL_EXPORTER_OTLP_ENDPOINT": spans.url,
            # Only the limit of the service ends the wait for a hanging collector.
            "OTEL_EXPORTER_OTLP_TIMEOUT": "600",
            "OTEL_BSP_SCHEDULE_DELAY": "100",
        }
        command = [sys.executable, "-m", "service.serve"]
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True) as process:
            try:
                assert process.stdout is not None
                started = STARTED.fullmatch(process.stdout.readline())
                assert started is not None, (home / "log").read_text()
                headers = {"authorization": f"Bearer {(home / 'admin.key').read_text().strip()}"}
                with httpx.Client(base_url=started[1], headers=headers, timeout=60) as client:
                    # Opening a new SQLite database twice at once would lock it for a moment.
                    wait_for(lambda: client.get("/jobs").status_code == 200, "an open database")
                    engine = open_database(f"sqlite:///{home}/trainshed.db")
                    yield Process(process, client, home / "log", spans, SqlJobStore(engine))
                    engine.dispose()
            finally:
                process.kill()


def test_every_request_is_a_line_of_json(watched: Process) -> None:
    assert watched.client.get("/jobs?limit=1", headers={"x-request-id": "r-1"}).status_code == 200
    assert watched.client.get("/jobs/unknown%0Aelse", headers={"x-request-id": "r-2"}).status_code == 404
    assert watched.client.get("/readyz", headers={"x-request-id": "r-3"}).status_code in (200, 503)
    assert watched.client.get("/jobs", headers={"x-request-id": "r-4", "authorization": ""}).status_code == 401
    (line,) = wait_for(lambda: watched.lines(request_id="r-4", event="request"), "the line of the last request")
    assert (line["key"], line["status"]) == (None, 401)
    (line,) = watched.lines(request_id="r-1")
    assert line.pop("ms") > 0
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+Z", line.pop("time"))
    assert line == {
        "level": "info",
        "event": "request",
        "request_id": "r-1",
        "key": "operator",
        "method": "GET",
        "route": "/jobs",
        "path": "/jobs",
        "status": 200,
    }
    (line,) = watched.lines(request_id="r-2")
    assert (line["route"], line["path"], line["status"]) == ("/jobs/{job_id}", "/jobs/unknown%0Aelse", 404)
    assert watched.lines(request_id="r-3") == [], "health probes are not logged"


def test_metrics_of_a_process_count_its_work(watched: Process) -> None:
    watched.store.add(NewJob(a_job(project="seen")))
    answer = watched.client.get("/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    passes = re.compile(r"^trainshed_reconcile_pass_seconds_count [1-9]", re.MULTILINE)
    wait_for(lambda: passes.search(watched.client.get("/metrics").text), "a pass of the reconciler")
    assert watched.client.get("/elsewhere").status_code == 404
    assert watched.client.request("BREW", "/jobs").status_code == 405
    following = "trainshed_stream_clients 1.0"
    with watched.client.stream("GET", "/jobs/job-1/events", headers={"accept": "text/event-stream"}) as stream:
        lines = stream.iter_lines()
        assert next(lines) == ": begin"
        text = watched.client.get("/metrics").text
        assert following in text
    assert 'trainshed_http_requests_total{method="GET",route="/jobs/{job_id}/events",status="200"} 1.0' in text
    assert 'trainshed_http_requests_total{method="GET",route="(none)",status="404"} 1.0' in text
    assert 'trainshed_http_requests_total{method="(other)",route="/jobs",status="405"} 1.0' in text
    queued = 'trainshed_jobs{project="seen",state="QUEUED"} 1.0'
    wait_for(lambda: queued in watched.client.get("/metrics").text, "the job in the counts of the database")
    wait_for(lambda: following not in watched.client.get("/metrics").text, "the end of the stream")


# This test is the last one with `watched`, because it ends the process.
def test_spans_have_routes_and_a_hanging_collector_does_not_delay_shutdown(watched: Process) -> None:
    assert watched.client.get("/jobs/unknown").status_code == 404
    (span, *_) = wait_for(lambda: watched.collector.named("GET /jobs/{job_id}"), "the span of a request")
    assert span.attributes["http.route"] == "/jobs/{job_id}"
    assert wait_for(lambda: watched.collector.named("reconcile.pass"), "the span of a pass")
    assert not watched.collector.named("GET /readyz")
    watched.collector.answers.clear()
    assert watched.client.get("/jobs").status_code == 200
    watched.process.send_signal(signal.SIGTERM)
    assert watched.process.wait(timeout=60) == 0
    watched.collector.answers.set()
    assert [line for line in watched.lines() if line["level"] not in ("info", "warning")] == []


def test_job_span_is_a_child_of_a_pass_span(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with collector() as spans:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", spans.url)
        service, traces = FakeService(tmp_path), open_traces(os.environ)
        assert isinstance(traces, OtelTraces)
        job, stopped = service.submit(), threading.Event()
        reconciler = service.reconciler(traces=traces)
        thread = threading.Thread(target=reconciler.run, args=(stopped,), kwargs={"interval": 0.01})
        thread.start()
        wait_for(lambda: service.cluster.launches, "a submission")
        stopped.set()
        thread.join()
        traces.close()
        (step, *_) = spans.named("reconcile.job")
        assert step.attributes == {"trainshed.job.id": job.id}
        assert step.parent in [one.id for one in spans.named("reconcile.pass")]


def test_traces_are_off_by_default_and_missing_packages_log_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(open_traces({}), NoTracer)
    # Simulate that the extra is not installed.
    monkeypatch.delitem(sys.modules, "service.adapters.otel")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with capture_logs() as lines:
        assert isinstance(open_traces({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}), NoTracer)
    assert [(line["event"], line["remedy"]) for line in lines] == [("traces_are_off", install("opentelemetry"))]
