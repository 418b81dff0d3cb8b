"""The service as users run it: a separate process with embedded Ray that can be stopped, killed and restarted."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import yaml

from service.api.schemas import JobOut
from service.config.address import ServiceAddress
from service.domain.jobs.job import JobState
from tests.support.builders.specs import TINY, raw_spec
from tests.support.ranks.hold import HOLDS_VARIABLE, hold, limit_micro_batches
from tests.support.ranks.torchrun import write_tokens
from tests.support.servers.worker_forks import worker_forks
from tests.support.waiting import SERVICE_PAUSE, wait_for
from train_loop.run_dir import RunDir, read_lines
from trainshed import Api, Client

_MEMORY = "MemoryRanOutError"


class LiveService:
    """The service on a separate home, with optional environment variables and storage roots.

    Ray's workers are forked from a process that has done their imports; `step_seconds` are added to each training step.
    With `quick`, its preflight helper starts at once and accepts every spec. Its Ray survives `kill` and not `stop`.
    """

    def __init__(
        self,
        home: Path,
        *,
        environment: dict[str, str] | None = None,
        roots: tuple[str, ...] = (),
        quick: bool = False,
        step_seconds: float = 0.0,
    ) -> None:
        self.home = home
        self._environment = environment or {}
        self._roots = (f"file://{home}/data", *roots)
        self._quick = quick
        # Another cluster has its own workers.
        self._forks = {} if "TRAINSHED_RAY_ADDRESS" in self._environment else worker_forks(step_seconds=step_seconds)
        self._process: subprocess.Popen[bytes] | None = None
        self._client: Client | None = None
        self.url = ""

    @property
    def client(self) -> Api:
        """The API of the running service."""
        assert self._client is not None
        return self._client.api

    def start(self, *, quick: bool = False) -> None:
        """Start the service, or restart it on the same home; `quick` is for this start only."""
        (self.home / "service.json").unlink(missing_ok=True)
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("TRAINSHED_", "RAY_"))}
        environment |= {
            "TRAINSHED_HOME": str(self.home),
            "TRAINSHED_PORT": "0",
            "TRAINSHED_STORAGE_ROOTS": ",".join(self._roots),
            "TRAINSHED_RETRY_SECONDS": "0.5",
            "TRAINSHED_RECONCILE_SECONDS": "0.2",
            "TRAINSHED_RAY_CPUS": "3",
            "RAY_AUTH_MODE": "token",
            "RAY_worker_niceness": "0",
            "OMP_NUM_THREADS": "1",
        }
        environment |= self._forks | self._environment | {HOLDS_VARIABLE: str(self.home)}
        with (self.home / "service.log").open("ab") as log:
            module = "tests.support.servers.quick_service" if quick or self._quick else "service.serve"
            self._process = subprocess.Popen([sys.executable, "-m", module], stdout=log, stderr=log, env=environment)
        address = wait_for(self._address, f"a service on {self.home}")
        self.url = address.url
        self._client = Client(address.url, (self.home / "admin.key").read_text().strip())

    def _address(self) -> ServiceAddress | None:
        assert self._process is not None
        assert self._process.poll() is None, (self.home / "service.log").read_text()[-4000:]
        file = self.home / "service.json"
        return ServiceAddress.model_validate_json(file.read_bytes()) if file.exists() else None

    def kill(self) -> None:
        """SIGKILL only the service; its Ray keeps running."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """Stop the service and its Ray as an operator would. Raises AssertionError if a job restarted without a cause.

        The resumed run is right, so that its test would not notice.
        """
        self._end(signal.SIGTERM)
        assert (found := self._uncaused_losses()) == [], found

    def _uncaused_losses(self) -> list[dict[str, Any]]:
        """Return the losses of worker groups that no kill, hang or lost host explains, of jobs that resumed."""
        found = []
        for file in sorted(self.home.glob("runs/*/job-*/attempts/*/events.jsonl")):
            events = list(read_lines(file))
            losses = [event for event in events if event["event"] == "workers_lost"]
            started = max((event["seq"] for event in events if event["event"] == "training_started"), default=0)
            unexplained = [loss for loss in losses if loss["cause"] in ("error", "disconnected")]
            # A rank that runs out of memory shrinks its micro-batches in the next group.
            found += [loss for loss in unexplained if loss["seq"] < started and _MEMORY not in loss["error"]]
        return found

    def _end(self, number: signal.Signals) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait(timeout=90)
            self._process = None

    def submit(self, **parts: dict[str, Any]) -> str:
        """Submit a small job on two workers that share each sequence and return its id."""
        return self.client.submit(yaml.safe_dump(small_job(self.home, **parts))).id

    def wait_for_state(self, job_id: str, *states: JobState, seconds: float = 120) -> JobOut:
        """Wait until the job is in one of the states. Raises AssertionError where it ends in another."""

        def reached() -> JobOut | None:
            job = self.client.job(job_id)
            why = job.reason.message if job.reason else None
            assert job.state in states or not job.state.terminal, f"{job.state}: {why}\n{self.debug_report(job_id)}"
            return job if job.state in states else None

        return wait_for(reached, f"{job_id} in {' or '.join(states)}", seconds=seconds, pause=SERVICE_PAUSE)

    def wait_for_step(self, job_id: str, step: int) -> None:
        """Wait until the job has trained a step."""
        wait_for(
            lambda: any(line["step"] >= step for line in self.metrics(job_id)),
            f"step {step}",
            seconds=120,
            pause=SERVICE_PAUSE,
        )

    def hold(self, job_id: str, step: int | None) -> None:
        """Let the job train no step after this one until the next call; None lets it train to its end."""
        hold(self.home, job_id, step)

    def limit_micro_batches(self, job_id: str, size: int | None) -> None:
        """Let a rank of the job lack memory in steps with larger micro-batches; None lets it have enough again."""
        limit_micro_batches(self.home, job_id, size)

    def run_dir(self, job_id: str) -> RunDir:
        """Return the run directory of the job."""
        return RunDir.at(self.client.job(job_id).run_dir)

    def events(self, job_id: str, name: str | None = None) -> list[dict[str, Any]]:
        """Return the events of all attempts, or those of one kind."""
        lines = [line for attempt in self.run_dir(job_id).attempts() for line in read_lines(attempt.events)]
        return [line for line in lines if name in (None, line["event"])]

    def metrics(self, job_id: str) -> list[dict[str, Any]]:
        """Return the metrics lines of all attempts."""
        return [line for attempt in self.run_dir(job_id).attempts() for line in read_lines(attempt.metrics)]

    def debug_report(self, job_id: str) -> str:
        """Return the information that a person needs to debug a failed job."""
        logs = [path for attempt in self.run_dir(job_id).attempts() for path in sorted(attempt.logs.glob("*.log"))]
        texts = [f"--- {path}\n{path.read_text()[-3000:]}" for path in logs]
        return "\n".join([str(self.events(job_id)), *texts])

    def driver(self, job_id: str) -> psutil.Process:
        """Return the process of the job's newest driver."""
        root = str(self.run_dir(job_id).root)
        found = [p for p in psutil.process_iter(["cmdline"]) if _drives(p.info["cmdline"] or [], root)]
        assert len(found) == 1, found
        return found[0]


def _drives(command: list[str], root: str) -> bool:
    # The shell with which Ray starts drivers has the same words in one argument.
    return "train_loop.ray_train.driver" in command and root in command


def small_job(home: Path, **parts: dict[str, Any]) -> dict[str, Any]:
    """Return a job of some seconds: a tiny Qwen3 on random tokens, two workers, a checkpoint every ten steps."""
    data = home / "data" / "tokens.parquet"
    if not data.exists():
        data.parent.mkdir(parents=True, exist_ok=True)
        write_tokens(data, rows=400, length=32, vocab=TINY["vocab_size"])
    base: dict[str, dict[str, Any]] = {
        # It would double the collectives of a step, which are what a step of so small a model takes.
        "model": {"gradient_checkpointing": "none"},
        "data": {"train": {"path": f"file://{data}"}, "columns": {"input_ids": "ids"}, "packing": False},
        "training": {
            "max_steps": 40,
            "global_batch_size": 4,
            "per_device_train_batch_size": 2,
            "audit_samples": True,
        },
        "strategy": {"ulysses_size": 2},
        "checkpoint": {"every_steps": 10},
        "scaling": {"num_workers": 2, "resources_per_worker": {"CPU": 0.5}},
    }
    return raw_spec(**{name: base.get(name, {}) | parts.get(name, {}) for name in base.keys() | parts.keys()})
