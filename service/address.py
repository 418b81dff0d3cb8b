"""Where callers find a service and its key: TRAINSHED_URL and TRAINSHED_KEY, or what a running one left in its home."""

import httpx
from pydantic import BaseModel, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from service.environment import BadSettings, read_settings


class ServiceAddress(BaseModel):
    """home/service.json: where the running service listens."""

    url: str
    pid: int


class NoKeyError(LookupError):
    """There is no key to call with; `str(error)` says where one was looked for."""


class _Told(BaseSettings):
    """What overrides the home."""

    model_config = SettingsConfigDict(env_prefix="TRAINSHED_", env_ignore_empty=True)

    url: str | None = None
    key: str | None = None


def find_url() -> str:
    """The service's URL. Raises BadSettings."""
    told = _Told().url
    if told is not None and not _is_url(told):
        # What is before an @ may be a password.
        raise BadSettings((f"TRAINSHED_URL={told.rpartition('@')[2]!r} is no URL; write http://HOST:PORT",))
    return told or _found_url()


def find_key() -> str:
    """The key to call it with. Raises NoKeyError, BadSettings."""
    key = (_Told().key or _found_key()).strip()
    if not (key.isascii() and key.isprintable()):
        raise NoKeyError("the key holds characters that no key has; copy it anew into TRAINSHED_KEY, or unset that")
    return key


def _is_url(text: str) -> bool:
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL:
        return False
    return url.scheme in ("http", "https") and bool(url.host)


def _found_url() -> str:
    settings = read_settings()
    try:
        return ServiceAddress.model_validate_json(settings.address_file.read_bytes()).url
    except (OSError, ValidationError):
        # None runs on this home; whoever starts one makes it listen here.
        return f"http://{settings.host}:{settings.port}"


def _found_key() -> str:
    file = read_settings().admin_key
    try:
        return file.read_text()
    except FileNotFoundError as error:
        raise NoKeyError(
            f"there is no key: {file} does not exist; start the service first, or set TRAINSHED_KEY"
        ) from error
    except PermissionError as error:
        raise NoKeyError(f"there is no key: {file} may not be read; set TRAINSHED_KEY to one of your own") from error
