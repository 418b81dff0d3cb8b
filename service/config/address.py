"""Address and key file of the service on this machine, for clients on the same machine."""

from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel, ValidationError

from service.config.environment import read_settings


class ServiceAddress(BaseModel):
    """home/service.json: where the running service listens."""

    url: str
    pid: int


class LocalService(NamedTuple):
    """The service of this machine's home, running or not."""

    url: str
    key_file: Path
    """The file with the operator's key."""


def local_service() -> LocalService:
    """Return the service of the home in the settings. Raises BadSettings."""
    settings = read_settings()
    try:
        url = ServiceAddress.model_validate_json(settings.address_file.read_bytes()).url
    except (OSError, ValidationError):
        # No service is running; one that starts would listen here.
        url = f"http://{settings.host}:{settings.port}"
    return LocalService(url, settings.admin_key)
