"""Errors of the service, each with a stable code and an HTTP status."""

from collections.abc import Sequence
from datetime import UTC, datetime

from train_loop.spec import Problem


class ServiceError(Exception):
    """The base class; `str(error)` is the message for the caller: rule, value, remedy."""

    code = "internal"
    status = 500
    challenge: str | None = None
    """The WWW-Authenticate header of the response."""
    retry_after: int | None = None
    """Seconds until the caller should retry (Retry-After)."""
    problems: Sequence[Problem] = ()
    notable = False
    """True if the service logs each occurrence."""
    outage = False
    """True if every caller gets it during an outage of the database or storage; logged once a second."""


class Unauthorized(ServiceError):
    """A missing or invalid key or token."""

    code = "unauthorized"
    status = 401
    challenge = "Bearer"
    notable = True


class RateLimited(ServiceError):
    """A call over the caller's rate limit."""

    code = "rate_limited"
    status = 429

    def __init__(self, message: str, retry_after: int, *, first: bool = True) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        # Only the first refusal of a series is logged, so that a flood does not fill the log.
        self.notable = first


class IssuerUnavailable(ServiceError):
    """An outage of the token issuer: without its keys, tokens cannot be verified."""

    code = "issuer_unavailable"
    status = 503
    notable = True

    def __init__(self, why: str, retry_after: int) -> None:
        super().__init__(
            f"the token cannot be verified: its issuer's keys are unavailable ({why}); retry in {retry_after} s, or "
            "send a key instead of a token"
        )
        self.retry_after = retry_after


class Forbidden(ServiceError):
    """A valid key or token without the required role."""

    code = "forbidden"
    status = 403


class KeyNotFound(ServiceError):
    """An unknown key id."""

    code = "key_not_found"
    status = 404

    def __init__(self, key_id: str) -> None:
        super().__init__(f"key {key_id} not found, or not visible to you; list keys with GET /keys")


class WebhookNotFound(ServiceError):
    """An unknown webhook id."""

    code = "webhook_not_found"
    status = 404

    def __init__(self, webhook_id: str) -> None:
        super().__init__(f"webhook {webhook_id} not found; list webhooks with GET /webhooks")


class DeliveryNotFound(ServiceError):
    """An unknown or deleted delivery of a webhook."""

    code = "delivery_not_found"
    status = 404

    def __init__(self, webhook_id: str, number: int) -> None:
        super().__init__(
            f"delivery {number} of {webhook_id} not found, or deleted; list deliveries with "
            f"GET /webhooks/{webhook_id}/deliveries"
        )


class WebhookLimit(ServiceError):
    """A project at its maximum number of webhooks."""

    code = "webhook_limit"
    status = 409

    def __init__(self, project: str, limit: int) -> None:
        super().__init__(f"project {project!r} already has {limit} webhooks, the maximum; delete one first")


class HostRefused(ServiceError):
    """An unknown Host header, which may come from a DNS rebinding attack on a browser."""

    code = "host_refused"
    status = 400


class JobNotFound(ServiceError):
    """An unknown job id, or a job that the caller may not see."""

    code = "job_not_found"
    status = 404

    def __init__(self, job_id: str) -> None:
        super().__init__(f"job {job_id} not found; list jobs with GET /jobs")


class CheckpointNotFound(ServiceError):
    """A step without a committed checkpoint."""

    code = "checkpoint_not_found"
    status = 404

    def __init__(self, job_id: str, step: int) -> None:
        super().__init__(
            f"checkpoint of step {step} of {job_id} not found, or deleted; list checkpoints with "
            f"GET /jobs/{job_id}/checkpoints"
        )


class CheckpointDamaged(ServiceError):
    """A checkpoint whose files do not match their checksums."""

    code = "checkpoint_damaged"
    status = 409

    def __init__(self, job_id: str, step: int, faults: Sequence[str]) -> None:
        super().__init__(
            f"the checkpoint of step {step} of {job_id} is damaged: {'; '.join(faults)}; choose another step of "
            f"GET /jobs/{job_id}/checkpoints"
        )


class CheckpointUnknown(ServiceError):
    """A checkpoint of a format that this version does not read, such as that of a newer version."""

    code = "checkpoint_unknown"
    status = 409


class ExportNotFound(ServiceError):
    """An export that was not requested."""

    code = "export_not_found"
    status = 404

    def __init__(self, step: int) -> None:
        super().__init__(f"export of step {step} with these options not found; create it with POST to the same path")


class IllegalState(ServiceError):
    """A request that the job's state does not allow."""

    code = "illegal_state"
    status = 409


class NotAudited(ServiceError):
    """A job whose run records no samples."""

    code = "not_audited"
    status = 409

    def __init__(self, job_id: str) -> None:
        super().__init__(
            f"{job_id} does not record the samples of its steps; set training.audit_samples: true in the spec and "
            "submit or clone the job"
        )


class StaleAttempt(ServiceError):
    """An attempt that was fenced off before a delayed service submitted it."""

    def __init__(self, run_dir: str, attempt: int) -> None:
        super().__init__(f"attempt {attempt} in {run_dir} was fenced off by a newer attempt or by the end of the job")


class UnusableRunDir(ServiceError):
    """A run directory whose spec cannot be read, or is that of another run: no attempt can start in it."""

    def __init__(self, path: str, error: str) -> None:
        super().__init__(f"{path} cannot be used: {error}")


class Busy(ServiceError):
    """Too many concurrent requests: a job that changes constantly, or too many exports at once."""

    code = "busy"
    status = 503
    retry_after = 5


class BodyTooLarge(ServiceError):
    """A request body over the size limit."""

    code = "body_too_large"
    status = 413


class InvalidRequest(ServiceError):
    """An invalid parameter or body (of a job spec: InvalidSpec)."""

    code = "invalid_request"
    status = 422

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("; ".join(f"{p.pointer}: {p.message}" for p in problems))
        self.problems = problems


class InvalidSpec(InvalidRequest):
    """A job spec that cannot run; `problems` lists every broken rule."""

    code = "invalid_spec"


class IdempotencyMismatch(ServiceError):
    """A reused Idempotency-Key with a different body."""

    code = "idempotency_mismatch"
    status = 422

    def __init__(self, key: str) -> None:
        super().__init__(f"Idempotency-Key {key!r} was used with another body; send the same body, or a new key")


class NotReady(ServiceError):
    """A service that runs but cannot answer now."""

    code = "not_ready"
    status = 503
    retry_after = 5
    outage = True


class Migrating(NotReady):
    """A database migration in progress."""

    code = "migrating"


class GoingAway(NotReady):
    """A service that is shutting down."""

    code = "leaving"


class PreflightStarting(NotReady):
    """A submit before the helper process that checks specs is ready."""

    code = "preflight_starting"

    def __init__(self, why: str) -> None:
        super().__init__(f"no spec can be checked yet: the helper process {why}; retry in a few seconds")


class ClusterStarting(NotReady):
    """A plan that needs the nodes of the cluster before the service has listed them."""

    code = "cluster_starting"

    def __init__(self) -> None:
        super().__init__("the nodes of the cluster are not known yet; retry in a few seconds")


class DatabaseUnreachable(NotReady):
    """A temporary outage of the database."""

    code = "database_unreachable"

    @classmethod
    def because(cls, reason: str) -> "DatabaseUnreachable":
        """Return the error for a caller, without a remedy: a caller cannot fix the database."""
        return cls(f"the database does not answer: {reason}; the service reconnects automatically: retry later")


class DatabaseFull(NotReady):
    """A database without disk space for a write."""

    code = "storage_full"
    status = 507

    def __init__(self) -> None:
        super().__init__(
            "the database has no disk space left, and nothing was stored; reads still work. Ask the operator to free "
            "space, then retry"
        )


class DatabaseUnusable(ServiceError):
    """A permanent database error: a wrong URL, an unknown schema, a damaged file."""

    code = "database_unusable"
    status = 503


class SecretsUnreadable(DatabaseUnusable):
    """Webhook secrets in the database that are encrypted with an unknown key."""

    def __init__(self) -> None:
        super().__init__(
            "the webhook secrets in the database are encrypted with another key; set TRAINSHED_SECRET_KEY to the key "
            "of the service that encrypted them, or restore its key file (docs/operate/operations.md, Secrets at rest)"
        )


class BackupFailed(ServiceError):
    """A failed backup or restore; nothing has changed."""

    code = "backup_failed"
    status = 409


class HomeUnusable(ServiceError):
    """A home or database folder without write permission."""

    code = "home_unusable"
    status = 503


class KeyUnusable(ServiceError):
    """A missing, empty or unreadable key file."""

    code = "key_unusable"
    status = 503


class HomeInUse(ServiceError):
    """A home or database that another process uses."""

    code = "home_in_use"
    status = 409


class AddressUnusable(ServiceError):
    """An address on which the service cannot listen."""

    code = "address_unusable"
    status = 409
    remedy = "set TRAINSHED_PORT or TRAINSHED_HOST to another one, or end what listens there (ss -ltnp shows it)"

    def __init__(self, address: str, fault: str) -> None:
        super().__init__(f"cannot listen on {address}: {fault}; {self.remedy}")
        self.fault = fault


class KeyInFlight(ServiceError):
    """An Idempotency-Key whose first request is still in progress."""

    code = "idempotency_in_flight"
    status = 409

    def __init__(self, key: str) -> None:
        super().__init__(f"a request with Idempotency-Key {key!r} is still in progress; retry in a few seconds")


class PreflightFailed(ServiceError):
    """A failure of the helper process that checks data and model."""

    code = "preflight_failed"
    status = 503
    retry_after = 5


class VerifyFailed(ServiceError):
    """A failure of the helper process that reads a whole checkpoint."""

    code = "verify_failed"
    status = 503
    retry_after = 5


class ResultsUnreadable(ServiceError):
    """A failure of the helper process that reads results."""

    code = "results_unreadable"
    status = 503
    retry_after = 5


class NoResults(ServiceError):
    """A job of a kind that has no results."""

    code = "no_results"
    status = 409

    def __init__(self, job_id: str, kind: str) -> None:
        super().__init__(f"{job_id} is a job of kind: {kind}, which has no results; list its checkpoints instead")


class ClusterError(ServiceError):
    """A failed request to the cluster; the next pass retries it."""

    code = "cluster_error"
    status = 503


class ClusterUnreachable(ClusterError):
    """An outage of the cluster."""

    code = "cluster_unreachable"
    retry_after = 5

    def __init__(
        self, cluster: str, since: str, remedy: str = "check the head node and its network, then retry"
    ) -> None:
        super().__init__(f"{cluster} has not answered since {since}; {remedy}")


class StorageFault(ServiceError):
    """Storage without the guarantees that run directories need."""

    code = "storage_fault"
    status = 503


class StorageAway(ServiceError):
    """An outage of a run's storage root; the caller can retry later."""

    code = "storage_unavailable"
    status = 503
    retry_after: int | None = 5
    outage = True

    def __init__(self, root: str, since: float | None, error: str) -> None:
        when = "" if since is None else f" since {datetime.fromtimestamp(since, UTC):%Y-%m-%d %H:%M:%S} UTC"
        remote = "://" in root and not root.startswith("file://")
        remedy = "retry once it answers" if remote else "mount it again, then retry"
        super().__init__(f"storage {root} has been unavailable{when}: {error}; {remedy}")
        self.root = root
        self.since = since
        """Start of the outage (Unix seconds); None if only a part of the storage failed."""
        self.error = error


class StorageFull(StorageAway):
    """Storage of run directories without space for a write."""

    code = "storage_full"
    status = 507

    def __init__(self, root: str, error: str) -> None:
        super().__init__(root, None, error)
        self.args = (f"storage {root} has no space left: {error}; free space, then retry",)


class RunFileRefused(StorageAway):
    """A link, FIFO or folder in the place of a file of a run directory, which could lead out of it."""

    code = "run_file_refused"
    status = 409
    retry_after = None
    outage = False

    def __init__(self, root: str, error: str) -> None:
        super().__init__(root, None, error)
        self.args = (error,)
