"""Everything that a caller can be told went wrong: a stable code and an HTTP status each."""

from train_loop.spec import Problem


class ServiceError(Exception):
    """The root: `str(error)` is the sentence for the caller: rule, value, remedy."""

    code = "internal"
    status = 500


class Unauthorized(ServiceError):
    """No key, or one that opens nothing."""

    code = "unauthorized"
    status = 401


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


class StaleAttempt(ServiceError):
    """An attempt is over that somebody, who has slept meanwhile, is about to submit."""

    def __init__(self, run_dir: str, attempt: int) -> None:
        super().__init__(f"attempt {attempt} in {run_dir} is over; a newer one, or the job's end, has shut it out")


class Busy(ServiceError):
    """Too many want the same at once: a job that others keep changing, exports that fill all places."""

    code = "busy"
    status = 503


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


class VerifyFailed(ServiceError):
    """The helper process that reads a checkpoint did not answer."""

    code = "verify_failed"
    status = 503


class ClusterError(ServiceError):
    """The cluster did not do what it was asked to; the next pass asks again."""

    code = "cluster_error"
    status = 503


class StorageFault(ServiceError):
    """Storage does not keep what run directories rely on."""

    code = "storage_fault"
    status = 503
