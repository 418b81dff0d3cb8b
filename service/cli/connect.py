"""Connection of the CLI to the service, and output of its errors."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import httpx

from service.address import NoKeyError
from service.api.schemas import ProblemDetails
from service.cli.ends import fail
from service.cli.spec_text import SpecText
from service.cli.told import settings
from service.client import Api, ApiError, Client

SHORT_SECONDS = 3.0
"""Retry timeout of a command that a user waits for."""
LONG_SECONDS = 120.0
"""Retry timeout while following a job: long enough for the service to restart."""


@contextmanager
def connect(spec: SpecText | None = None, *, patience: float = SHORT_SECONDS) -> Iterator[Api]:
    """Yield the API of the service. On an error, print a readable line and exit with 1.

    Errors of a spec name the line of its file, or the --set at fault.
    """
    settings()
    try:
        with Client(patience=patience) as client:
            yield client.api
    except NoKeyError as error:
        fail(str(error))
    except ApiError as error:
        _refused(error.problem, spec or SpecText("", b""))
    except httpx.HTTPError as error:
        fail(f"the service does not answer ({error}); start it with `trainshed up`, or set TRAINSHED_URL")


def _refused(problem: ProblemDetails, spec: SpecText) -> NoReturn:
    faults = [spec.error(one) for one in problem.errors or []]
    if len(faults) > 1:
        fail(f"{len(faults)} things are wrong:", faults)
    fail(faults[0] if faults else problem.detail)
