"""How the CLI finds the service: TRAINSHED_URL and TRAINSHED_KEY, or what a running service left in its home."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import typer
from pydantic import BaseModel
from pydantic_settings import BaseSettings, SettingsConfigDict

from service.client import ApiError, Client
from service.settings import Settings


class Connection(BaseSettings):
    """What overrides the home."""

    model_config = SettingsConfigDict(env_prefix="TRAINSHED_", env_ignore_empty=True)

    url: str | None = None
    key: str | None = None


class _Address(BaseModel):
    url: str


@contextmanager
def connect() -> Iterator[Client]:
    """A client of the service; its refusals end the command with a readable line and exit code 1."""
    try:
        with Client(_url(), _key()) as client:
            yield client
    except ApiError as error:
        _fail(error.problem.detail, [f"  {e.pointer or '/'}: {e.message}" for e in error.problem.errors or []])
    except httpx.HTTPError as error:
        _fail(f"the service does not answer ({error}); start it with `trainshed serve`, or set TRAINSHED_URL", [])


def _url() -> str:
    settings = Settings()
    try:
        found = _Address.model_validate_json(settings.address_file.read_bytes()).url
    except (FileNotFoundError, ValueError):
        found = f"http://{settings.host}:{settings.port}"
    return Connection().url or found


def _key() -> str:
    key, file = Connection().key, Settings().admin_key
    if key is None and not file.exists():
        _fail(f"there is no key: {file} does not exist; start the service first, or set TRAINSHED_KEY", [])
    return key or file.read_text().strip()


def _fail(message: str, details: list[str]) -> None:
    print("\n".join([f"trainshed: {message}", *details]), file=sys.stderr)
    raise typer.Exit(1)
