"""Shared parts of the service's tests: a small spec, a manual clock, and a service on fakes."""

import copy
import hashlib
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.testclient import TestClient

from service.adapters.helper_processes.checkpoints import HelperTools
from service.adapters.prometheus import PrometheusMetrics
from service.adapters.storage.run_dirs import LocalRunDirs
from service.api.authentication import Guard
from service.api.build import Parts, build_api
from service.domain.access.code import CodePolicy
from service.domain.access.roles import OPERATOR
from service.domain.jobs.decision import Retry
from service.domain.jobs.job import Job, JobState
from service.domain.jobs.observation import SubmissionStatus
from service.domain.queue.policy import PriorityLimits, QueuePolicy
from service.domain.queue.snapshot import QueueSnapshot
from service.domain.webhooks.ssrf import AllowList
from service.errors import ResultsUnreadable
from service.lifecycle.startup import DatabaseStartup, opened
from service.ports import Cancellation, Cluster, JobCounts, JobStore, Metrics, NoTracer, RunDirs, Tracer
from service.use_cases.access.access import Access, Tokens
from service.use_cases.access.rate_limits import Limits, Rates
from service.use_cases.checkpoints import CheckpointActions
from service.use_cases.doctor.doctor import Doctor
from service.use_cases.jobs.jobs import Grace, Jobs
from service.use_cases.jobs.reconcile import Reconciler, ReconcileTimings
from service.use_cases.jobs.submit import JobRequest, Submitter
from service.use_cases.metrics import ServiceMetrics
from service.use_cases.webhooks.webhooks import Webhooks
from tests.support.fakes.doctor import VERSIONS, FakeClusterProbe, FakeStorageProbe
from tests.support.fakes.stores import MemoryCluster, MemoryJobStore, MemoryKeyStore, MemoryPreflight
from tests.support.fakes.webhooks import MemorySender, MemoryWebhookStore
from train_loop.data.read_results import answer_page
from train_loop.run_dir import JsonLines, Outcome, RunDir
from train_loop.spec import JobSpec, parse

KEY = "a-key-for-tests"
RETRY = Retry(base=10.0, cap=100.0)
_SPEC: dict[str, Any] = {
    "name": "tiny",
    "model": {
        "config": {
            "model_type": "qwen3",
            "vocab_size": 512,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
        },
        "dtype": "fp32",
    },
    "data": {"train": {"path": "stdlib://"}, "sequence_length": 128},
    "training": {"learning_rate": 1e-3, "max_steps": 20},
    "scaling": {"num_workers": 2},
}


def raw_spec(**parts: Any) -> dict[str, Any]:
    """Return a spec as plain data; each part is merged into the field of its name."""
    raw = copy.deepcopy(_SPEC)
    for name, value in parts.items():
        raw[name] = {**raw.get(name, {}), **value} if isinstance(value, dict) else value
    return raw


def spec_body(**parts: Any) -> str:
    """Return the spec of `raw_spec` as JSON text."""
    return json.dumps(raw_spec(**parts))


def a_spec(**parts: Any) -> JobSpec:
    """Return the parsed spec of `raw_spec`."""
    return parse(raw_spec(**parts))


def a_job(job_id: str = "job-1", *, run_dir: str = "file:///nowhere", now: float = 0.0, **parts: Any) -> Job:
    """Return a queued job."""
    return Job(job_id, a_spec(**parts), run_dir, created_at=now, updated_at=now)


class InProcessPages:
    """ResultPages that are read in this process."""

    def results(self, run_dir: str, *, after: int | None, limit: int, cancellation: Cancellation) -> bytes:
        """Return a page. Raises ResultsUnreadable."""
        page = answer_page({"run_dir": run_dir, "after": after, "limit": limit, "most_bytes": 1 << 23})
        if page.startswith(b'{"unreadable"'):
            raise ResultsUnreadable(f"the results could not be read: {json.loads(page)['unreadable']}")
        return page


@dataclass
class Clock:
    """A clock whose time a test sets."""

    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class FakeService:
    """The service with a scripted cluster and preflight; run directories are real."""

    root: Path
    store: JobStore = field(default_factory=MemoryJobStore)
    cluster: MemoryCluster = field(default_factory=MemoryCluster)
    preflight: MemoryPreflight = field(default_factory=MemoryPreflight)
    clock: Clock = field(default_factory=Clock)
    ids: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    run_dirs: RunDirs = field(default_factory=LocalRunDirs)
    rules: QueuePolicy = field(default_factory=QueuePolicy)
    queue: QueueSnapshot = field(default_factory=QueueSnapshot)
    keys: MemoryKeyStore = field(default_factory=MemoryKeyStore)
    counts: JobCounts = field(default_factory=MemoryJobStore)
    metrics: Metrics = field(default_factory=PrometheusMetrics)
    tokens: Tokens | None = None
    limits: Limits = field(default_factory=Limits)
    priorities: PriorityLimits = field(default_factory=PriorityLimits)
    code: CodePolicy = field(default_factory=CodePolicy)
    hooks: MemoryWebhookStore = field(default_factory=MemoryWebhookStore)
    sender: MemorySender = field(default_factory=MemorySender)

    def __post_init__(self) -> None:
        if isinstance(self.store, MemoryJobStore):
            self.keys.done = self.hooks.done = self.store.audit_log
            self.counts = self.store

    @property
    def access(self) -> Access:
        """Return the use cases of keys."""
        operator = hashlib.sha256(KEY.encode()).hexdigest()
        return Access(self.keys, operator, self.clock, lambda: f"{len(self.keys.keys) + 1:04d}", self.tokens)

    @property
    def webhooks(self) -> Webhooks:
        """Return the use cases of webhooks."""
        return Webhooks(self.hooks, self.sender, AllowList(), self.clock, lambda: f"{len(self.hooks.webhooks) + 1:04d}")

    @property
    def jobs(self) -> Jobs:
        """Return the use cases of jobs."""
        return Jobs(
            store=self.store,
            cluster=self.cluster,
            run_dirs=self.run_dirs,
            preflight=self.preflight,
            queue=self.queue,
            grace=Grace(cancel=30.0, pause=300.0),
            clock=self.clock,
        )

    @property
    def submitter(self) -> Submitter:
        """Return the use cases of new jobs."""
        new_id, priorities = (lambda: f"job-{next(self.ids):04d}"), self.priorities
        return Submitter(self.jobs, self.root.as_uri(), new_id=new_id, priorities=priorities, code=self.code)

    @property
    def service_metrics(self) -> ServiceMetrics:
        """Return the use case of service metrics."""
        return ServiceMetrics(self.counts, self.store, self.run_dirs, self.metrics, self.clock, self.queue)

    @property
    def doctor(self) -> Doctor:
        """Return a doctor whose checks all pass."""
        return Doctor(FakeClusterProbe(), FakeStorageProbe(), VERSIONS)

    def app(self, *, max_body_bytes: int = 1 << 16, startup: DatabaseStartup | None = None) -> FastAPI:
        """Return the HTTP API."""
        return build_api(self.parts(max_body_bytes, startup))

    def parts(self, max_body_bytes: int = 1 << 16, startup: DatabaseStartup | None = None) -> Parts:
        """Return the parts of the HTTP API."""
        submitter, tools = self.submitter, HelperTools(timeout=60.0)
        checkpoints = CheckpointActions(submitter.jobs, self.run_dirs, tools, self.keys, self.clock)
        guard = Guard(self.access, Rates(self.limits, self.clock), max_body_bytes)
        return Parts(
            submitter=submitter,
            checkpoints=checkpoints,
            guard=guard,
            service_metrics=self.service_metrics,
            webhooks=self.webhooks,
            doctor=self.doctor,
            results=InProcessPages(),
            startup=startup or opened(),
        )

    def client(self, **headers: str) -> TestClient:
        """Return a client with the key; `client(authorization="")` sends none."""
        return TestClient(self.app(), base_url="http://127.0.0.1", headers={"authorization": f"Bearer {KEY}"} | headers)

    def reconciler(
        self, *, store: JobStore | None = None, cluster: Cluster | None = None, traces: Tracer | None = None
    ) -> Reconciler:
        """Return a new reconciler, as after a restart of the service."""
        return Reconciler(
            store or self.store,
            cluster or self.cluster,
            self.run_dirs,
            self.clock,
            owner="me",
            timings=ReconcileTimings(lease=30.0, retry=RETRY),
            rules=self.rules,
            queue=self.queue,
            metrics=self.metrics,
            traces=traces or NoTracer(),
        )

    def submit(self, **parts: Any) -> Job:
        """Submit a job through the use case."""
        return self.submitter.submit(JobRequest(OPERATOR, spec_body(**parts).encode())).view.job

    def get(self, job_id: str) -> Job:
        """Return the stored job."""
        return self.jobs.find(OPERATOR, job_id)

    def run_dir(self, job_id: str) -> RunDir:
        """Return the job's run directory."""
        return RunDir.at(self.get(job_id).run_dir)

    def event(self, job_id: str, event: str, *, attempt: int = 1, **fields: Any) -> None:
        """Write an event as the workers do."""
        JsonLines(self.run_dir(job_id).attempt(attempt).events, attempt=attempt).append(event=event, **fields)

    def metric(self, job_id: str, *, attempt: int = 1, **fields: Any) -> None:
        """Write a metrics line as the workers do."""
        JsonLines(self.run_dir(job_id).attempt(attempt).metrics, attempt=attempt).append(**fields)

    def end(self, job_id: str, outcome: Outcome, *, attempt: int = 1) -> None:
        """Write the outcome as the driver does."""
        self.run_dir(job_id).attempt(attempt).write_outcome(outcome)


def started(service: FakeService) -> Job:
    """Submit a job, and return it once its first attempt trains."""
    job = service.submit()
    service.reconciler().run_once()
    service.cluster.submissions[f"{job.id}-1"] = SubmissionStatus.RUNNING
    service.event(job.id, "training_started", steps=20, replayed=0)
    service.reconciler().run_once()
    assert service.get(job.id).state is JobState.RUNNING
    return job
