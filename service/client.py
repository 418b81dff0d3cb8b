"""The typed Python client."""

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TypeVar

import httpx
from pydantic import BaseModel, JsonValue, ValidationError

from service.api.access_schemas import DeedOut, KeyIn, Keys, Me, NewKey
from service.api.ledger_schemas import CheckpointOut, Checkpoints, ExportIn, ExportOut, Verified
from service.api.plan_schemas import PlanOut
from service.api.schemas import (
    CancelIn,
    CloneIn,
    JobOut,
    JobPage,
    LinePage,
    Page,
    PauseIn,
    ProblemDetails,
    ResumeIn,
    TextPage,
)
from service.domain.job import JobState
from train_loop.spec import ScalingSpec

T = TypeVar("T", bound=BaseModel)
Params = Mapping[str, str | int | list[str] | None]


class ApiError(Exception):
    """The service said no; `problem` is what it said."""

    def __init__(self, problem: ProblemDetails) -> None:
        super().__init__(problem.detail)
        self.problem = problem


class Client:
    """One service. Every call raises ApiError, or httpx.HTTPError where nobody answers."""

    def __init__(self, url: str, key: str, *, transport: httpx.BaseTransport | None = None) -> None:
        headers = {"Authorization": f"Bearer {key}"}
        # A submit looks at data and model first, which may take its time.
        self._http = httpx.Client(base_url=url, headers=headers, timeout=180, transport=transport)

    def __enter__(self) -> "Client":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def submit(self, spec: str | bytes, *, idempotency_key: str | None = None) -> JobOut:
        """Submit a spec in YAML or JSON."""
        headers = {"Idempotency-Key": idempotency_key} if idempotency_key else {}
        return _parse(JobOut, self._http.post("/jobs", content=spec, headers=headers))

    def clone(
        self,
        job_id: str,
        *,
        from_checkpoint: int | None = None,
        overrides: Mapping[str, JsonValue] | None = None,
        idempotency_key: str | None = None,
    ) -> JobOut:
        """Submit a job that goes on from a checkpoint of another one, with some of its spec different."""
        wish = CloneIn(from_checkpoint=from_checkpoint, overrides=dict(overrides or {}))
        headers = {"Idempotency-Key": idempotency_key} if idempotency_key else {}
        return _parse(JobOut, self._http.post(f"/jobs/{job_id}/clone", content=wish.model_dump_json(), headers=headers))

    def plan(self, spec: str | bytes) -> PlanOut:
        """What a spec comes to."""
        return _parse(PlanOut, self._http.post("/jobs/plan", content=spec))

    def jobs(
        self,
        *,
        states: Sequence[JobState] = (),
        project: str | None = None,
        labels: Mapping[str, str] | None = None,
        after: str | None = None,
        limit: int = 50,
    ) -> JobPage:
        """A page of jobs, newest first."""
        wanted = {f"label.{key}": value for key, value in (labels or {}).items()}
        params: Params = {"state": [s.value for s in states], "project": project, "after": after, "limit": limit}
        return self._get(JobPage, "/jobs", {**params, **wanted})

    def job(self, job_id: str) -> JobOut:
        """One job."""
        return self._get(JobOut, f"/jobs/{job_id}", {})

    def cancel(self, job_id: str, *, grace_seconds: float | None = None, checkpoint: bool = True) -> JobOut:
        """Ask for the end of a job."""
        wish = CancelIn(grace_seconds=grace_seconds, checkpoint=checkpoint)
        return _parse(JobOut, self._http.post(f"/jobs/{job_id}/cancel", content=wish.model_dump_json()))

    def pause(self, job_id: str, *, grace_seconds: float | None = None) -> JobOut:
        """Ask a job to save and to leave the cluster until it is resumed."""
        wish = PauseIn(grace_seconds=grace_seconds)
        return _parse(JobOut, self._http.post(f"/jobs/{job_id}/pause", content=wish.model_dump_json()))

    def resume(self, job_id: str, *, scaling: ScalingSpec | None = None) -> JobOut:
        """Let a paused job go on, at another size if one is given."""
        wish = ResumeIn(scaling=scaling)
        return _parse(JobOut, self._http.post(f"/jobs/{job_id}/resume", content=wish.model_dump_json()))

    def delete(self, job_id: str) -> None:
        """Forget a job that has ended."""
        answer = self._http.delete(f"/jobs/{job_id}")
        if not answer.is_success:
            raise _error(answer)

    def events(self, job_id: str, *, after: str | None = None, limit: int = 100) -> LinePage:
        """A page of events over all attempts."""
        return self._get(LinePage, f"/jobs/{job_id}/events", {"after": after, "limit": limit})

    def metrics(self, job_id: str, *, after: str | None = None, limit: int = 100) -> LinePage:
        """A page of metrics lines over all attempts."""
        return self._get(LinePage, f"/jobs/{job_id}/metrics", {"after": after, "limit": limit})

    def logs(
        self,
        job_id: str,
        *,
        attempt: int | None = None,
        rank: int | None = None,
        after: str | None = None,
        limit: int = 100,
    ) -> TextPage:
        """A page of one log's lines; of the driver's and the newest attempt's, unless told otherwise."""
        params: Params = {"attempt": attempt, "rank": rank, "after": after, "limit": limit}
        return self._get(TextPage, f"/jobs/{job_id}/logs", params)

    def checkpoints(self, job_id: str) -> Checkpoints:
        """The committed checkpoints, oldest first."""
        return self._get(Checkpoints, f"/jobs/{job_id}/checkpoints", {})

    def verify(self, job_id: str, step: int) -> Verified:
        """Read all of a checkpoint; large ones take their time."""
        return _parse(Verified, self._http.post(f"/jobs/{job_id}/checkpoints/{step}/verify", timeout=None))

    def pin(self, job_id: str, step: int) -> CheckpointOut:
        """Keep a checkpoint whatever retention says."""
        return _parse(CheckpointOut, self._http.post(f"/jobs/{job_id}/checkpoints/{step}/pin"))

    def unpin(self, job_id: str, step: int) -> CheckpointOut:
        """Leave a checkpoint to retention again."""
        return _parse(CheckpointOut, self._http.delete(f"/jobs/{job_id}/checkpoints/{step}/pin"))

    def exported(self, job_id: str, step: int, wish: ExportIn | None = None) -> ExportOut:
        """How far an export is."""
        params = (wish or ExportIn()).model_dump(exclude_none=True)
        return self._get(ExportOut, f"/jobs/{job_id}/checkpoints/{step}/export", params)

    def export(self, job_id: str, step: int, wish: ExportIn | None = None) -> ExportOut:
        """Begin to make a Hugging Face folder of a checkpoint."""
        body = (wish or ExportIn()).model_dump_json()
        return _parse(ExportOut, self._http.post(f"/jobs/{job_id}/checkpoints/{step}/export", content=body))

    def create_key(self, wish: KeyIn) -> NewKey:
        """Make a key; its secret is in this answer alone."""
        return _parse(NewKey, self._http.post("/keys", content=wish.model_dump_json()))

    def keys(self) -> Keys:
        """The keys that open a project of which one is an admin, newest first."""
        return self._get(Keys, "/keys", {})

    def revoke_key(self, key_id: str) -> None:
        """Let a key open nothing from now on."""
        answer = self._http.delete(f"/keys/{key_id}")
        if not answer.is_success:
            raise _error(answer)

    def me(self) -> Me:
        """What the key in use opens."""
        return self._get(Me, "/me", {})

    def audit(self, *, project: str | None = None, after: int | None = None, limit: int = 50) -> Page[DeedOut]:
        """A page of the writes in projects of which one is an admin, newest first."""
        return self._get(Page[DeedOut], "/audit", {"project": project, "after": after, "limit": limit})

    def _get(self, kind: type[T], path: str, params: Params) -> T:
        given = {name: value for name, value in params.items() if value not in (None, [])}
        return _parse(kind, self._http.get(path, params=given))


def _parse(kind: type[T], response: httpx.Response) -> T:
    if response.is_success:
        return kind.model_validate_json(response.content)
    raise _error(response)


def _error(response: httpx.Response) -> Exception:
    """What the service said, or, where it was somebody else who answered, the status."""
    try:
        return ApiError(ProblemDetails.model_validate_json(response.content))
    except ValidationError:
        what = f"{response.status_code} from {response.url}, which does not answer like Trainshed"
        return httpx.HTTPStatusError(what, request=response.request, response=response)
