"""The demos, if the service refuses or the job fails: a problem in one line, and no traceback."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from examples import demo, demo_elastic
from service.api.schemas import JobOut, ProblemDetails, ReasonOut
from service.domain.jobs.job import JobState
from trainshed import ApiError, NoKeyError

REFUSED = ApiError(
    ProblemDetails(type="about:blank", title="Invalid spec", status=422, code="invalid_spec", detail="stdlib is away")
)
REASON: dict[str, Any] = {"code": "failed", "message": "a worker has no memory", "remedy": "add some"}
JOB: dict[str, Any] = {"id": "job-1", "state": JobState.FAILED, "attempt": 1}
FAILED = JobOut.model_construct(**JOB, reason=ReasonOut.model_construct(**REASON))


def running(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, submit: Callable[[Any], JobOut]) -> None:
    """Replace the service of both demos by one that answers a submit with `submit`."""

    @contextmanager
    def service(home: Path, **settings: str) -> Iterator[tuple[Any, str]]:
        no_lines = SimpleNamespace(data=[], has_more=False)
        client = SimpleNamespace(
            submit=submit,
            job=lambda job_id: FAILED,
            events=lambda *_, **__: no_lines,
            metrics=lambda *_, **__: no_lines,
        )
        yield client, "http://service"

    monkeypatch.setattr(demo, "service", service)
    monkeypatch.setattr(demo_elastic, "service", service)
    monkeypatch.setattr("tempfile.mkdtemp", lambda prefix: str(tmp_path))


@pytest.mark.parametrize("main", [demo.main, demo_elastic.main])
@pytest.mark.parametrize(
    "error",
    [REFUSED, NoKeyError("key not found"), httpx.ConnectError("refused"), PermissionError(13, "denied")],
    ids=repr,
)
def test_demo_prints_the_refusal_of_the_service_and_exits_1(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    main: Callable[[], int],
    error: Exception,
) -> None:
    def refuse(spec: object) -> JobOut:
        raise error

    running(monkeypatch, tmp_path, refuse)
    assert main() == 1
    assert f"FAILED {error}\n" in capsys.readouterr().out


@pytest.mark.parametrize("main", [demo.main, demo_elastic.main])
def test_demo_prints_the_reason_of_a_job_that_failed_before_training(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], main: Callable[[], int]
) -> None:
    running(monkeypatch, tmp_path, lambda spec: FAILED)
    assert main() == 1
    assert "a worker has no memory" in " ".join(capsys.readouterr().out.split())
