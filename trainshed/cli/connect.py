"""Settings of the CLI, its connection to the service, and output of errors of both."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

import httpx

from service.api.schemas import ProblemDetails, ProblemOut
from service.config.environment import BadSettings, read_settings, strangers
from service.config.settings import Settings
from train_loop.spec import show
from trainshed import Api, ApiError, Client, NoKeyError
from trainshed.address import find_url
from trainshed.cli.common import override_at
from trainshed.cli.exit_codes import fail
from trainshed.errors import InvalidUrl

SHORT_SECONDS = 3.0
"""Retry timeout of a command that a user waits for."""
LONG_SECONDS = 120.0
"""Retry timeout while following a job: long enough for the service to restart."""


def load_settings() -> Settings:
    """Return the settings and warn about unknown variables. Exits with one line per invalid variable and code 1."""
    for line in strangers():
        print(f"trainshed: warning: {show(line)}", file=sys.stderr)
    try:
        find_url()
        return read_settings()
    except BadSettings as error:
        fail("invalid configuration", error.problems)
    except InvalidUrl as error:
        fail("invalid configuration", (str(error),))


@contextmanager
def connect(overrides: Sequence[str] = (), *, retry_seconds: float = SHORT_SECONDS) -> Iterator[Api]:
    """Yield the API of the service. On an error, print a readable line, name the --set at fault, and exit with 1."""
    load_settings()
    try:
        with Client(patience=retry_seconds) as client:
            yield client.api
    except NoKeyError as error:
        fail(str(error))
    except ApiError as error:
        _fail_with(error.problem, overrides)
    except httpx.HTTPError as error:
        fail(f"the service does not answer ({error}); start it with `trainshed up`, or set TRAINSHED_URL")


def _fail_with(problem: ProblemDetails, overrides: Sequence[str]) -> NoReturn:
    errors = [_detail(one, overrides) for one in problem.errors or []]
    if len(errors) > 1:
        fail(f"{len(errors)} things are wrong:", errors)
    fail(errors[0] if errors else problem.detail)


def _detail(problem: ProblemOut, overrides: Sequence[str]) -> str:
    override = override_at(problem.pointer, overrides)
    return f"{problem.pointer or '/'}: {problem.message}" + (f" (--set {override})" if override else "")
