"""Connection of the CLI to the service, and output of its errors."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

import httpx

from service.api.schemas import ProblemDetails, ProblemOut
from service.cli.changes import made_by
from service.cli.ends import fail
from service.cli.told import settings
from service.client import Api, ApiError, Client
from service.config.address import NoKeyError

SHORT_SECONDS = 3.0
"""Retry timeout of a command that a user waits for."""
LONG_SECONDS = 120.0
"""Retry timeout while following a job: long enough for the service to restart."""


@contextmanager
def connect(changes: Sequence[str] = (), *, patience: float = SHORT_SECONDS) -> Iterator[Api]:
    """Yield the API of the service. On an error, print a readable line, name the --set at fault, and exit with 1."""
    settings()
    try:
        with Client(patience=patience) as client:
            yield client.api
    except NoKeyError as error:
        fail(str(error))
    except ApiError as error:
        _refused(error.problem, changes)
    except httpx.HTTPError as error:
        fail(f"the service does not answer ({error}); start it with `trainshed up`, or set TRAINSHED_URL")


def _refused(problem: ProblemDetails, changes: Sequence[str]) -> NoReturn:
    faults = [_detail(one, changes) for one in problem.errors or []]
    if len(faults) > 1:
        fail(f"{len(faults)} things are wrong:", faults)
    fail(faults[0] if faults else problem.detail)


def _detail(problem: ProblemOut, changes: Sequence[str]) -> str:
    change = made_by(problem.pointer, changes)
    return f"{problem.pointer or '/'}: {problem.message}" + (f" (--set {change})" if change else "")
