"""All series of /metrics; the adapter, the dashboards, the alert rules and the docs use these definitions."""

from dataclasses import dataclass
from typing import Literal

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
GOODPUT = _whole("goodput_ratio", "Time of new steps, as a part of all, of jobs that run.", "project")
OLDEST_WAIT = _whole("queue_oldest_seconds", "How long the job that has waited longest has been queued.", "project")
BACKLOG = _whole("webhook_backlog", "Webhook messages that are not delivered yet.")
CLUSTER_UP = _whole("cluster_up", "1 if Ray answers, 0 if it has not for ten seconds.")
DATABASE_UP = _whole("database_up", "1 if the database answers; 0 leaves out all that is asked of it.")

# Series of each running job, for at most 200 jobs.
JOB_STEP = _whole("job_step", "Optimizer steps done.", *_JOB)
JOB_STEP_SECONDS = _whole("job_step_seconds", "Median time of the last 50 logged steps.", *_JOB)
JOB_TOKENS = _whole("job_tokens_per_second", "Tokens per second of all workers, at the newest logged step.", *_JOB)
JOB_LOSS = _whole("job_loss", "Training loss at the newest logged step.", *_JOB)
JOB_DATA_WAIT = _whole("job_data_wait_ratio", "Part of the newest logged step that waited for data.", *_JOB)
JOB_RESTARTS = _whole("job_restarts", "How often training has started again.", *_JOB)
JOB_PROGRESS_AGE = _whole(
    "job_progress_age_seconds", "Since its newest logged step, or the start of its newest attempt.", *_JOB
)
JOB_CHECKPOINT_AGE = _whole(
    "job_checkpoint_age_seconds", "Since its newest committed checkpoint, or the start of its newest attempt.", *_JOB
)
JOB_WAITS = _whole("job_waits", "1 for what a job waits for that makes no progress.", *_JOB, "code")

# Series of one process.
BUILD = Series("build_info", "gauge", "1, with the version of Trainshed.", ("version",))
HTTP_REQUESTS = Series("http_requests_total", "counter", "Answers.", ("method", "route", "status"))
HTTP_SECONDS = Series("http_request_seconds", "histogram", "Until an answer begins.", ("method", "route"))
STREAMS = Series("stream_clients", "gauge", "Those who follow a job now.")
MOVES = Series("job_moves_total", "counter", "Jobs that came into a state.", ("state",))
ATTEMPTS = Series("attempts_total", "counter", "Attempts that ended.", ("outcome",))
QUEUE_WAIT = Series("queue_wait_seconds", "histogram", "From the queue to the start.")
PASS_SECONDS = Series("reconcile_pass_seconds", "histogram", "A look after every job.")
LAG = Series("reconcile_lag_seconds", "gauge", "Since every job was last looked after.")

ALL = tuple(value for value in dict(globals()).values() if isinstance(value, Series))
