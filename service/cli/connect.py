"""How the CLI calls the service, and what a refusal looks like."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import typer

from service.address import NoKeyError
from service.client import Api, ApiError, Client

_PATIENCE_SECONDS = 3.0
"""Somebody waits at a terminal."""


@contextmanager
def connect() -> Iterator[Api]:
    """A client of the service; its refusals end the command with a readable line and exit code 1."""
    try:
        with Client(patience=_PATIENCE_SECONDS) as client:
            yield client.api
    except NoKeyError as error:
        _fail(str(error), [])
    except ApiError as error:
        _fail(error.problem.detail, [f"  {e.pointer or '/'}: {e.message}" for e in error.problem.errors or []])
    except httpx.HTTPError as error:
        _fail(f"the service does not answer ({error}); start it with `trainshed serve`, or set TRAINSHED_URL", [])


def _fail(message: str, details: list[str]) -> None:
    print("\n".join([f"trainshed: {message}", *details]), file=sys.stderr)
    raise typer.Exit(1)
