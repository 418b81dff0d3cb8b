"""All series of /metrics, and the observations that a changed job adds to them. The docs and alerts use these names."""

from dataclasses import dataclass
from typing import Literal

from service.domain.jobs.job import Job, JobState

# Not `job`: Prometheus uses that label for the scraped target.
_JOB = ("project", "job_id", "name")


@dataclass(frozen=True)
class Series:
    """One series, without the prefix `trainshed_`.

    With `whole`, its value is that of the whole service. All replicas report the same value: use `max`, not `sum`.
    """

    name: str
    kind: Literal["gauge", "counter", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    whole: bool = False

    @property
    def full_name(self) -> str:
        """Return the name in Prometheus; for a histogram, the prefix of its names."""
        return f"trainshed_{self.name}"


def _whole(name: str, text: str, *labels: str) -> Series:
    return Series(name, "gauge", text, labels, whole=True)


# Series of the whole service.
JOBS = _whole("jobs", "Stored jobs.", "state", "project")
GOODPUT = _whole("goodput_ratio", "Fraction of the running jobs' wall time spent on new steps.", "project")
OLDEST_WAIT = _whole("queue_oldest_seconds", "Time since the oldest queued job was queued.", "project")
BACKLOG = _whole("webhook_backlog", "Webhook messages that are not delivered yet.")
WEBHOOKS = _whole(
    "webhooks", "Webhooks by status: active, failing (a message was rejected five times), or disabled.", "status"
)
CLUSTER_UP = _whole("cluster_up", "1 if Ray answers, 0 after ten seconds without an answer.")
CLUSTER_SILENT = _whole(
    "cluster_silent_seconds",
    "Time since Ray's last answer, 0 if it answers, with the Kubernetes node of its head.",
    "head_node",
)
DATABASE_UP = _whole("database_up", "1 if the database answers; if 0, series from the database are missing.")

# Series of each running job, for at most 200 jobs.
JOB_ATTEMPT = _whole("job_attempt", "Number of the newest attempt.", *_JOB)
JOB_STEP = _whole("job_step", "Optimizer steps done.", *_JOB)
JOB_STEP_SECONDS = _whole("job_step_seconds", "Median time of the last 50 logged steps.", *_JOB)
JOB_TOKENS = _whole("job_tokens_per_second", "Tokens per second of all workers, at the newest logged step.", *_JOB)
JOB_LOSS = _whole("job_loss", "Training loss at the newest logged step.", *_JOB)
JOB_DATA_WAIT = _whole("job_data_wait_ratio", "Fraction of the newest logged step spent waiting for data.", *_JOB)
JOB_RESTARTS = _whole("job_restarts", "Number of restarts of the training after faults.", *_JOB)
JOB_PROGRESS_AGE = _whole(
    "job_progress_age_seconds", "Time since the newest logged step, or the start of the newest attempt.", *_JOB
)
JOB_CHECKPOINT_AGE = _whole(
    "job_checkpoint_age_seconds", "Time since the newest checkpoint, or the start of the newest attempt.", *_JOB
)
JOB_WAITS = _whole("job_waits", "1 with the reason code of a job that makes no progress.", *_JOB, "code")

# Series of one process.
BUILD = Series("build_info", "gauge", "1, with the version of Trainshed.", ("version",))
HTTP_REQUESTS = Series("http_requests_total", "counter", "HTTP responses.", ("method", "route", "status"))
HTTP_SECONDS = Series("http_request_seconds", "histogram", "Time until a response starts.", ("method", "route"))
STREAMS = Series("stream_clients", "gauge", "Open streams.")
MOVES = Series("job_moves_total", "counter", "State changes of jobs, by new state.", ("state",))
ATTEMPTS = Series("attempts_total", "counter", "Finished attempts.", ("outcome",))
QUEUE_WAIT = Series("queue_wait_seconds", "histogram", "Time from queued to start.")
PASS_SECONDS = Series("reconcile_pass_seconds", "histogram", "Duration of a reconcile pass.")
LAG = Series("reconcile_lag_seconds", "gauge", "Time since the last complete reconcile pass.")

ALL = tuple(value for value in dict(globals()).values() if isinstance(value, Series))


def wait_seconds(before: Job, after: Job) -> float | None:
    """Return the seconds that a job waited before it started; None if this change does not start it."""
    if before.state not in (JobState.QUEUED, JobState.PAUSED) or after.state is not JobState.STARTING:
        return None
    # A clock that was set back must not give a negative wait.
    return max(after.times[JobState.STARTING] - before.times.get(before.state, before.created_at), 0.0)


def attempt_results(before: Job, after: Job) -> tuple[str, ...]:
    """Return the results of the attempts that this change ended."""
    over = sum(attempt.ended_at is not None for attempt in before.attempts)
    return tuple(attempt.result or "unknown" for attempt in after.attempts[over:] if attempt.ended_at is not None)
