"""Everything that a caller can be told went wrong: a stable code and an HTTP status each."""

from collections.abc import Sequence
from datetime import UTC, datetime

from train_loop.spec import Problem


class ServiceError(Exception):
    """The root: `str(error)` is the sentence for the caller: rule, value, remedy."""

    code = "internal"
    status = 500
    challenge: str | None = None
    """How one makes oneself known (WWW-Authenticate)."""
    retry_after: int | None = None
    """Seconds after which the same call may be answered."""
    problems: Sequence[Problem] = ()
    notable = False
    """Whether the service's log tells of it."""
    outage = False
    """Whether every caller gets it while a database or storage is away; the log has one line a second for them."""


class Unauthorized(ServiceError):
    """No key or token, or one that opens nothing."""

    code = "unauthorized"
    status = 401
    challenge = "Bearer"
    notable = True


class RateLimited(ServiceError):
    """Too many calls in too short a time."""

    code = "rate_limited"
    status = 429

    def __init__(self, message: str, retry_after: int, *, first: bool = True) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        # A flood is told of where it begins: whoever makes one must not fill the log.
        self.notable = first


class IssuerUnavailable(ServiceError):
    """Tokens cannot be checked for now: who issues them does not tell its keys."""

    code = "issuer_unavailable"
    status = 503
    notable = True

    def __init__(self, why: str, retry_after: int) -> None:
        super().__init__(
            f"the token cannot be checked: its issuer does not tell its keys ({why}); try again in {retry_after} s, or "
            "send a key, which needs no issuer"
        )
        self.retry_after = retry_after


class Forbidden(ServiceError):
    """The key opens the service, but not this."""

    code = "forbidden"
    status = 403


class KeyNotFound(ServiceError):
    """No key has this id."""

    code = "key_not_found"
    status = 404

    def __init__(self, key_id: str) -> None:
        super().__init__(f"there is no key {key_id}, or none that you may see; GET /keys lists the keys there are")


class WebhookNotFound(ServiceError):
    """No webhook has this id."""

    code = "webhook_not_found"
    status = 404

    def __init__(self, webhook_id: str) -> None:
        super().__init__(f"there is no webhook {webhook_id}; GET /webhooks lists the webhooks there are")


class DeliveryNotFound(ServiceError):
    """The webhook has no delivery of this number."""

    code = "delivery_not_found"
    status = 404

    def __init__(self, webhook_id: str, number: int) -> None:
        super().__init__(
            f"{webhook_id} has no delivery {number}, or not any more; GET /webhooks/{webhook_id}/deliveries lists them"
        )


class WebhookLimit(ServiceError):
    """A project has all the webhooks that it may have."""

    code = "webhook_limit"
    status = 409

    def __init__(self, project: str, limit: int) -> None:
        super().__init__(f"project {project!r} has {limit} webhooks, and may have no more; delete one of them first")


class HostRefused(ServiceError):
    """The Host header is none of ours; a browser may have been tricked into calling."""

    code = "host_refused"
    status = 400


class JobNotFound(ServiceError):
    """No job has this id."""

    code = "job_not_found"
    status = 404

    def __init__(self, job_id: str) -> None:
        super().__init__(f"there is no job {job_id}; GET /jobs lists the jobs there are")


class CheckpointNotFound(ServiceError):
    """The job has no committed checkpoint of this step."""

    code = "checkpoint_not_found"
    status = 404

    def __init__(self, job_id: str, step: int) -> None:
        super().__init__(
            f"{job_id} has no checkpoint of step {step}, or not any more; GET /jobs/{job_id}/checkpoints lists them"
        )


class ExportNotFound(ServiceError):
    """Nobody asked for this export."""

    code = "export_not_found"
    status = 404

    def __init__(self, step: int) -> None:
        super().__init__(f"the checkpoint of step {step} was not exported like this; POST to the same path does it")


class IllegalState(ServiceError):
    """The job's state does not allow what was asked."""

    code = "illegal_state"
    status = 409


class NotAudited(ServiceError):
    """The run of the job records no samples."""

    code = "not_audited"
    status = 409

    def __init__(self, job_id: str) -> None:
        super().__init__(
            f"{job_id} does not record the samples of its steps; set training.audit_samples: true in the spec and "
            "submit or clone the job"
        )


class StaleAttempt(ServiceError):
    """An attempt is over that somebody, who has slept meanwhile, is about to submit."""

    def __init__(self, run_dir: str, attempt: int) -> None:
        super().__init__(f"attempt {attempt} in {run_dir} is over; a newer one, or the job's end, has shut it out")


class Busy(ServiceError):
    """Too many want the same at once: a job that others keep changing, exports that fill all places."""

    code = "busy"
    status = 503
    retry_after = 5


class BodyTooLarge(ServiceError):
    """The request body is over the limit."""

    code = "body_too_large"
    status = 413


class InvalidRequest(ServiceError):
    """A parameter or body that is no job spec breaks a rule."""

    code = "invalid_request"
    status = 422

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("; ".join(f"{p.pointer}: {p.message}" for p in problems))
        self.problems = problems


class InvalidSpec(InvalidRequest):
    """A job spec that cannot run; `problems` names everything that is wrong with it."""

    code = "invalid_spec"


class IdempotencyMismatch(ServiceError):
    """An Idempotency-Key came back with another body."""

    code = "idempotency_mismatch"
    status = 422

    def __init__(self, key: str) -> None:
        super().__init__(f"Idempotency-Key {key!r} was used with another body; send the same body, or a new key")


class NotReady(ServiceError):
    """The service runs, and cannot answer now."""

    code = "not_ready"
    status = 503
    retry_after = 5
    outage = True


class Migrating(NotReady):
    """The database is being brought up to date."""

    code = "migrating"


class GoingAway(NotReady):
    """The service is ending."""

    code = "leaving"


class PreflightStarting(NotReady):
    """The helper that checks specs is not ready; a submit would wait for it."""

    code = "preflight_starting"

    def __init__(self, why: str) -> None:
        super().__init__(f"no spec can be checked yet: the helper process {why}; try again in a few seconds")


class DatabaseUnreachable(NotReady):
    """The database does not answer now; it may later."""

    code = "database_unreachable"

    @classmethod
    def because(cls, reason: str) -> "DatabaseUnreachable":
        """Return the error for a caller, who cannot change the reason."""
        return cls(f"the database does not answer: {reason}; the service continues once it does: try again then")


class DatabaseFull(NotReady):
    """The database has no room for a write."""

    code = "storage_full"
    status = 507

    def __init__(self) -> None:
        super().__init__(
            "the database has no disk space left, and nothing was stored; what is stored can be read. Ask the operator "
            "to free space, then try again"
        )


class DatabaseUnusable(ServiceError):
    """The database can never be used as it is: a wrong URL, another schema, a damaged file."""

    code = "database_unusable"
    status = 503


class SecretsUnreadable(DatabaseUnusable):
    """The webhook secrets of the database are encrypted with a key that the service does not have."""

    def __init__(self) -> None:
        super().__init__(
            "the webhook secrets in the database are encrypted with another key; set TRAINSHED_SECRET_KEY to the key "
            "of the service that encrypted them, or restore its key file (docs/operate/operations.md, Secrets at rest)"
        )


class BackupFailed(ServiceError):
    """A backup could not be written, or cannot be restored; nothing has changed."""

    code = "backup_failed"
    status = 409


class HomeUnusable(ServiceError):
    """The home, or the folder of its database, cannot be written to."""

    code = "home_unusable"
    status = 503


class KeyUnusable(ServiceError):
    """A file that must hold a key is missing, empty or unreadable."""

    code = "key_unusable"
    status = 503


class HomeInUse(ServiceError):
    """Another process has the home or its database."""

    code = "home_in_use"
    status = 409


class KeyInFlight(ServiceError):
    """A request with the same Idempotency-Key is still at work."""

    code = "idempotency_in_flight"
    status = 409

    def __init__(self, key: str) -> None:
        super().__init__(f"a request with Idempotency-Key {key!r} is still at work; send it again in a few seconds")


class PreflightFailed(ServiceError):
    """The helper process that looks at data and model did not answer."""

    code = "preflight_failed"
    status = 503
    retry_after = 5


class VerifyFailed(ServiceError):
    """The helper process that reads a checkpoint did not answer."""

    code = "verify_failed"
    status = 503
    retry_after = 5


class ClusterError(ServiceError):
    """The cluster did not do what it was asked to; the next pass asks again."""

    code = "cluster_error"
    status = 503


class ClusterUnreachable(ClusterError):
    """The cluster does not answer."""

    code = "cluster_unreachable"
    retry_after = 5

    def __init__(self, cluster: str, since: str) -> None:
        super().__init__(
            f"{cluster} does not answer since {since}; check the head node and its network, then try again"
        )


class StorageFault(ServiceError):
    """Storage does not keep what run directories rely on."""

    code = "storage_fault"
    status = 503


class StorageAway(ServiceError):
    """The storage root of a run does not answer; what is asked of it can be asked again later."""

    code = "storage_unavailable"
    status = 503
    retry_after = 5
    outage = True

    def __init__(self, root: str, since: float | None, error: str) -> None:
        when = "" if since is None else f" since {datetime.fromtimestamp(since, UTC):%Y-%m-%d %H:%M:%S} UTC"
        remote = "://" in root and not root.startswith("file://")
        remedy = "repeat the request once it answers" if remote else "mount it again, then repeat the request"
        super().__init__(f"storage {root} has been unavailable{when}: {error}; {remedy}")
        self.root = root
        self.since = since
        """Unix seconds; None if only a part of it failed."""
        self.error = error


class StorageFull(StorageAway):
    """The storage of run directories answers, and has no room for a write."""

    code = "storage_full"
    status = 507

    def __init__(self, root: str, error: str) -> None:
        super().__init__(root, None, error)
        self.args = (f"storage {root} has no space left: {error}; free some, then repeat the request",)
