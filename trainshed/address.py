"""Lookup of the service's URL and of an API key: in TRAINSHED_URL and TRAINSHED_KEY, then in the home of a service."""

import os
from typing import TYPE_CHECKING

import httpx

from trainshed.errors import InvalidUrl, NoKeyError

if TYPE_CHECKING:
    from service.config.address import LocalService as LocalService


def find_url() -> str:
    """Return the service's URL.

    Raises InvalidUrl if it is missing or invalid, or BadSettings if the settings of the local service are invalid.
    """
    url = _variable("TRAINSHED_URL")
    if url is None:
        return _local_url()
    if not _is_url(url):
        # The part before an @ may contain a password.
        raise InvalidUrl(f"TRAINSHED_URL={url.rpartition('@')[2]!r} is not a URL; expected http://HOST:PORT")
    return url


def find_key() -> str:
    """Return the API key. Raises NoKeyError, or BadSettings if the settings of the local service are invalid."""
    key = (_variable("TRAINSHED_KEY") or _local_key()).strip()
    if not (key and key.isascii() and key.isprintable()):
        fault = "contains invalid characters" if key else "is empty"
        raise NoKeyError(f"the key {fault}; copy it into TRAINSHED_KEY again, or unset the variable")
    return key


def _variable(name: str) -> str | None:
    """Return an environment variable, or None if it is empty. Names are case-insensitive, as in the settings."""
    return {known.upper(): value for known, value in os.environ.items()}.get(name) or None


def _is_url(text: str) -> bool:
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL:
        return False
    return url.scheme in ("http", "https") and bool(url.host)


def find_local() -> "LocalService | None":
    """Return the service of this machine's home if TRAINSHED_URL is not set. None if only the client is installed."""
    return None if _variable("TRAINSHED_URL") else _local_service()


def _local_service() -> "LocalService | None":
    try:
        # Imported only here: without the extra `service`, pydantic-settings is missing.
        from service.config.address import local_service  # noqa: PLC0415
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.startswith("service"):
            raise
        return None
    return local_service()


def _local_url() -> str:
    local = _local_service()
    if local is None:
        raise InvalidUrl("TRAINSHED_URL is not set; set it to the URL of the service, http://HOST:PORT")
    return local.url


def _local_key() -> str:
    local = _local_service()
    if local is None:
        raise NoKeyError("key not found; set TRAINSHED_KEY, and TRAINSHED_URL to the URL of the service")
    try:
        return local.key_file.read_text()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NoKeyError(
            f"key not found: {local.key_file} does not exist; start the service first, or set TRAINSHED_KEY"
        ) from error
    except PermissionError as error:
        raise NoKeyError(f"no permission to read the key {local.key_file}; set TRAINSHED_KEY to your key") from error
