"""Where callers find a service and its key: TRAINSHED_URL and TRAINSHED_KEY, or what a running one left in its home."""

from pydantic import BaseModel, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from service.environment import read_settings


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
    return _Told().url or _found_url()


def find_key() -> str:
    """The key to call it with. Raises NoKeyError, BadSettings."""
    return _Told().key or _found_key()


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
        return file.read_text().strip()
    except FileNotFoundError as error:
        raise NoKeyError(
            f"there is no key: {file} does not exist; start the service first, or set TRAINSHED_KEY"
        ) from error
    except PermissionError as error:
        raise NoKeyError(f"there is no key: {file} may not be read; set TRAINSHED_KEY to one of your own") from error
