"""URL and key for clients: TRAINSHED_URL and TRAINSHED_KEY, or the files in the home of the service."""

import httpx
from pydantic import BaseModel, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from service.config.environment import BadSettings, read_settings


class ServiceAddress(BaseModel):
    """Content of home/service.json: the address of the running service."""

    url: str
    pid: int


class NoKeyError(LookupError):
    """A missing or unusable key; `str(error)` contains the file that was tried."""


class _Told(BaseSettings):
    """Variables that override the files in the home."""

    model_config = SettingsConfigDict(env_prefix="TRAINSHED_", env_ignore_empty=True)

    url: str | None = None
    key: str | None = None


def find_url() -> str:
    """Return the service's URL. Raises BadSettings."""
    told = _Told().url
    if told is not None and not _is_url(told):
        # The part before an @ may contain a password.
        raise BadSettings((f"TRAINSHED_URL={told.rpartition('@')[2]!r} is not a URL; expected http://HOST:PORT",))
    return told or _found_url()


def find_key() -> str:
    """Return the key for the service. Raises NoKeyError, BadSettings."""
    key = (_Told().key or _found_key()).strip()
    if not (key.isascii() and key.isprintable()):
        raise NoKeyError("the key contains invalid characters; copy it into TRAINSHED_KEY again, or unset the variable")
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
        # No service runs on this home; a service that starts on it listens here.
        return f"http://{settings.host}:{settings.port}"


def _found_key() -> str:
    file = read_settings().admin_key
    try:
        return file.read_text()
    except FileNotFoundError as error:
        raise NoKeyError(
            f"key not found: {file} does not exist; start the service first, or set TRAINSHED_KEY"
        ) from error
    except PermissionError as error:
        raise NoKeyError(f"no permission to read the key {file}; set TRAINSHED_KEY to your key") from error
