"""Settings of the CLI, its connection to the service, and output of errors of both."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import httpx

from service.api.schemas import ProblemDetails
from service.config.environment import BadSettings, read_settings, unknown_variables
from service.config.settings import Settings
from train_loop.spec import show
from trainshed import Api, ApiError, Client, Line, NoKeyError
from trainshed.address import find_url
from trainshed.cli.exit_codes import fail
from trainshed.cli.spec_text import SpecText
from trainshed.errors import InvalidUrl

SHORT_SECONDS = 3.0
"""Retry timeout of a command that a user waits for."""
_CALLS = {
    r"GET /jobs/([^/\s]+)/checkpoints": r"`trainshed checkpoints \1`",
    r"GET /webhooks/([^/\s]+)/deliveries": r"`trainshed webhooks deliveries \1`",
    r"POST /webhooks/([^/\s]+)/test\b": r"`trainshed webhooks test \1`",
    r"GET /webhooks\b": "`trainshed webhooks ls`",
    r"GET /keys\b": "`trainshed keys ls`",
    r"GET /jobs\b": "`trainshed ps`",
    r"GET /openapi\.json": "`trainshed schema`",
    r"GET /metrics\b": "the metrics page",
    r"POST /jobs/\S+/checkpoints/\S+/export\b": "`trainshed export`",
    r"POST to the same path": "`trainshed export`",
}
"""Calls of the REST API in its remedies, and the commands that make them."""
_NO_SUCH_CALL = ("not_found", "method_not_allowed")
"""Error codes of a path or method that the API does not have."""
LONG_SECONDS = 120.0
"""Retry timeout while following a job: long enough for the service to restart."""
_PAGE = 1000
"""Events of an answer."""


def load_settings() -> Settings:
    """Return the settings and warn about unknown variables. Exits with one line per invalid variable and code 1."""
    for line in unknown_variables():
        print(f"trainshed: warning: {show(line)}", file=sys.stderr)
    try:
        find_url()
        return read_settings()
    except BadSettings as error:
        fail("invalid configuration", error.problems)
    except InvalidUrl as error:
        fail("invalid configuration", (str(error),))


@contextmanager
def connect(spec: SpecText | None = None, *, retry_seconds: float = SHORT_SECONDS) -> Iterator[Api]:
    """Yield the API of the service. On an error, print a readable line and exit with 1.

    Errors of a spec name the line of its file, or the --set at fault.
    """
    load_settings()
    try:
        with Client(patience=retry_seconds) as client:
            yield client.api
    except NoKeyError as error:
        fail(str(error))
    except ApiError as error:
        _fail_with(error.problem, spec or SpecText("", b""))
    except httpx.HTTPError as error:
        fail(f"the service does not answer ({error}); start it with `trainshed up`, or set TRAINSHED_URL")


def newest_event(api: Api, job_id: str, event: str) -> Line | None:
    """Return the newest event of a job with a name; None if there is none."""
    page = api.events(job_id, contains=event, limit=_PAGE)
    found = [line for line in page.data if line.get("event") == event]
    while page.has_more:
        page = api.events(job_id, after=page.next, contains=event, limit=_PAGE)
        found += [line for line in page.data if line.get("event") == event]
    return found[-1] if found else None


def _fail_with(problem: ProblemDetails, spec: SpecText) -> NoReturn:
    if problem.code in _NO_SUCH_CALL:
        fail(
            f"the service at {find_url()} does not have this call; set TRAINSHED_URL to http://HOST:PORT without a "
            "path, or install the version of trainshed that the service has"
        )
    errors = [in_options(in_commands(spec.error(one))) for one in problem.errors or []]
    if len(errors) > 1:
        fail(f"{len(errors)} things are wrong:", errors)
    fail(errors[0] if errors else in_commands(problem.detail))


def in_options(message: str) -> str:
    """Return a message about a parameter of a call with the option or argument that sent it."""
    named = re.match(r"/(query|path)/(\w+)(?=:)", message)
    if named is None:
        return message
    name = named[2].upper() if named[1] == "path" else f"--{named[2].replace('_', '-')}"
    return f"{name}{message[named.end() :]}"


def in_commands(message: str) -> str:
    """Return a message of the REST API with commands in the place of its calls."""
    for call, command in _CALLS.items():
        message = re.sub(call, command, message)
    return message
