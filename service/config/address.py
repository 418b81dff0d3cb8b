"""Address and key file of the service on this machine, for clients on the same machine."""

import os
import socket
from pathlib import Path
from typing import NamedTuple

import psutil
from pydantic import BaseModel, ValidationError

from service.config.environment import read_settings
from service.config.running import SettingsRecord
from train_loop.system.peer import is_peer


class ServiceAddress(BaseModel):
    """home/service.json: where the running service listens, and its settings."""

    url: str
    pid: int
    settings: SettingsRecord = SettingsRecord()
    """Empty if an older service wrote the file."""


class LocalService(NamedTuple):
    """The service of this machine's home, running or not."""

    url: str
    key_file: Path
    """The file with the operator's key."""
    address_file: Path

    def runs(self) -> bool:
        """Return whether the service is running."""
        return find_process(self.address_file) is not None

    def accepted(self, connection: socket.socket) -> bool:
        """Return whether the running service has accepted a connection. Only then may it receive a key."""
        found = find_process(self.address_file)
        return found is not None and is_peer(connection, found[1])


def find_process(address_file: Path) -> tuple[ServiceAddress, psutil.Process] | None:
    """Return the address of the running service and the process that wrote it; None if it does not run."""
    try:
        address = ServiceAddress.model_validate_json(address_file.read_bytes())
        written, home = address_file.stat(), address_file.parent.stat()
        process = psutil.Process(address.pid)
        # The pid may have been reused since.
        ours = process.create_time() <= written.st_mtime + 1 and process.status() != psutil.STATUS_ZOMBIE
        # The owner of the home can read its key anyway.
        ours = ours and process.uids().effective in (os.geteuid(), home.st_uid)
    except (OSError, ValidationError, psutil.Error):
        return None
    return (address, process) if ours else None


def local_service() -> LocalService:
    """Return the service of the home in the settings. Raises BadSettings."""
    settings = read_settings()
    try:
        url = ServiceAddress.model_validate_json(settings.address_file.read_bytes()).url
    except (OSError, ValidationError):
        # No service is running; a new service would listen here.
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        url = f"http://{host}:{settings.port}"
    return LocalService(url, settings.admin_key, settings.address_file)
