"""Checks of a service's home that need no service: folder, key, free disk space, port."""

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from service.config.listen import check_address
from service.config.settings import Settings
from service.domain.doctor.finding import Finding, failed, ok, skipped, warning
from service.errors import AddressUnusable

_SHORT_KEY = 32
_LITTLE, _TOO_LITTLE = 10.0, 1.0
"""Free disk space in GiB below which the check warns or fails: for checkpoints and the database."""


def check_home(config: Settings, *, runs: bool) -> Iterator[Finding]:
    """Yield a finding for each check. `runs`: a service uses the port already."""
    yield _writable(config.home)
    yield _private(config.home)
    yield _key(config.admin_key, group_may_read=config.admin_key_file is not None)
    yield _disk(config.home)
    yield skipped("home.port", "the service has it") if runs else _port(config.host, config.port)


def _writable(home: Path) -> Finding:
    remedy = "give it to the user that runs the service, or set TRAINSHED_HOME to a folder that may be written to"
    try:
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=home) as file:
            file.write(b"x")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return failed("home.writable", f"{home}: {error.strerror}", remedy)
    return ok("home.writable", f"{home}")


def _private(home: Path) -> Finding:
    try:
        mode = stat.S_IMODE(home.stat().st_mode)
    except OSError as error:
        return skipped("home.private", f"{home}: {error.strerror}")
    if mode & 0o007:
        remedy = f"chmod 700 {home}; the service does that when it starts, if the folder is its own"
        return warning("home.private", f"other users may enter {home} ({mode:04o})", remedy)
    return ok("home.private", f"other users may not enter {home} ({mode:04o})")


def _key(file: Path, *, group_may_read: bool) -> Finding:
    """Check the key file's permissions. Kubernetes gives a mounted Secret to the pod's group (fsGroup): mode 0440."""
    try:
        mode = stat.S_IMODE(file.stat().st_mode)
    except OSError as error:
        if group_may_read:
            remedy = "TRAINSHED_ADMIN_KEY_FILE must name a readable file with a key in one line"
            return failed("home.key", f"{file}: {error.strerror}", remedy)
        return skipped("home.key", f"{file}: {error.strerror}; the service makes it when it starts")
    if group_may_read and mode & 0o037 == 0o004:
        remedy = "in a container that is as it should be; elsewhere chmod 640, with the service's group"
        return warning("home.key", f"{file} may be read by every user of this machine ({mode:04o})", remedy)
    if mode & (0o037 if group_may_read else 0o077):
        remedy = f"chmod 600 {file}; where others may have read it, remove it, and the next start makes another one"
        return failed("home.key", f"{file} may be read or written by others ({mode:04o})", remedy)
    if 0 < (length := _key_length(file)) < _SHORT_KEY:
        remedy = f"write {_SHORT_KEY} or more, for example those of `openssl rand -hex 32`"
        return warning("home.key", f"{file} holds a key of {length} characters, which can be guessed", remedy)
    whose = "its owner's and its group's" if mode & 0o040 else "its owner's"
    return ok("home.key", f"{file} is {whose} alone")


def _key_length(file: Path) -> int:
    """Return the number of characters, or 0 if the file is unreadable, which the service reports at startup."""
    try:
        return len(file.read_text().strip())
    except (OSError, UnicodeDecodeError):
        return 0


def _disk(home: Path) -> Finding:
    try:
        free = shutil.disk_usage(home).free / 2**30
    except OSError as error:
        return skipped("home.disk", f"{home}: {error.strerror}")
    seen, remedy = f"{free:.1f} GiB are free", "make room, or set TRAINSHED_RUNS to a larger disk"
    if free < _TOO_LITTLE:
        return failed("home.disk", seen, remedy)
    return warning("home.disk", seen, remedy) if free < _LITTLE else ok("home.disk", seen)


def _port(host: str, port: int) -> Finding:
    try:
        check_address(host, port)
    except AddressUnusable as error:
        return failed("home.port", f"{host}:{port}: {error.fault}", error.remedy)
    return ok("home.port", f"{host}:{port} is free")
