"""`python -m tests.support.units FILE.service`: runs a systemd unit as systemd would, on hosts that have no systemd.

It reads EnvironmentFile, Environment, ExecStart, Restart, RestartSec, KillMode and TimeoutStopSec; it ignores limits.
It runs as the unit's User if the host has that user.
When the main process ends, it kills all other processes of the unit and starts the unit again.
"""

import argparse
import os
import pwd
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

_MARK = "TEST_UNIT_ID"
_VARIABLE = re.compile(r"\$\{(\w+)\}")


@dataclass
class Unit:
    """The relevant parts of a unit file."""

    command: str
    environment: dict[str, str] = field(default_factory=dict)
    folders: list[Path] = field(default_factory=list)
    restart: bool = False
    pause: float = 0.1
    stop_seconds: float = 90.0
    mixed: bool = False
    """True if only the main process gets SIGTERM (KillMode=mixed); otherwise all processes do."""
    user: pwd.struct_passwd | None = None

    @classmethod
    def read(cls, file: Path) -> "Unit":
        """Parse a unit file. Raises FileNotFoundError if a required environment file is missing."""
        unit = cls(command="")
        for line in file.read_text().splitlines():
            name, separator, value = line.partition("=")
            if separator and not line.lstrip().startswith(("#", ";")):
                unit._set(name.strip(), value.strip())
        return unit

    def _set(self, name: str, value: str) -> None:
        match name:
            case "EnvironmentFile":
                # After "-", a missing file is not an error.
                file = Path(value.removeprefix("-"))
                if not value.startswith("-") or file.exists():
                    self.environment |= read_environment(file)
            case "Environment":
                self.environment |= dict(pair.split("=", 1) for pair in shlex.split(value))
            case "User":
                with suppress(KeyError):
                    self.user = pwd.getpwnam(value)
            case "ExecStart":
                self.command = value
            case "Restart":
                self.restart = value == "always"
            case "RestartSec":
                self.pause = float(value)
            case "KillMode":
                self.mixed = value == "mixed"
            case "TimeoutStopSec":
                self.stop_seconds = float(value)
            case "RuntimeDirectory":
                self.folders.append(Path("/run") / value)
            case "StateDirectory":
                self.folders.append(Path("/var/lib") / value)

    def arguments(self) -> list[str]:
        """Return ExecStart with its variables: ${NAME} is part of a word; $NAME alone becomes several words or none."""
        words = list[str]()
        for word in shlex.split(self.command):
            if word.startswith("$") and not word.startswith("${"):
                words += shlex.split(self.environment.get(word[1:], ""))
            else:
                words.append(_VARIABLE.sub(lambda match: self.environment.get(match[1], ""), word))
        return words


def read_environment(file: Path) -> dict[str, str]:
    """Parse an EnvironmentFile."""
    lines = (line.strip() for line in file.read_text().splitlines())
    pairs = (line.split("=", 1) for line in lines if line and not line.startswith("#"))
    return {name.strip(): " ".join(shlex.split(value)) for name, value in pairs}


class Supervisor:
    """Keeps one unit running until SIGTERM."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self._id = uuid.uuid4().hex
        self._stopped = False
        self._main: subprocess.Popen[bytes] | None = None

    def run(self, environment: Mapping[str, str]) -> None:
        """Start the unit, and restart it when it ends."""
        signal.signal(signal.SIGTERM, self._stop)
        user, own = self._unit.user, dict(environment)
        for folder in self._unit.folders:
            folder.mkdir(parents=True, exist_ok=True)
            if user is not None:
                shutil.chown(folder, user.pw_uid, user.pw_gid)
        if user is not None:
            own |= {"HOME": user.pw_dir, "USER": user.pw_name, "LOGNAME": user.pw_name}
            del own["TMPDIR"]
        whole = {**own, **self._unit.environment, _MARK: self._id}
        identity: dict[str, Any] = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []} if user else {}
        while not self._stopped:
            self._main = subprocess.Popen(self._unit.arguments(), env=whole, start_new_session=True, **identity)
            code = self._main.wait()
            self._signal_all(signal.SIGKILL)
            print(f"unit ended with {code}", flush=True)  # noqa: T201
            if not self._unit.restart:
                return
            if not self._stopped:
                time.sleep(self._unit.pause)

    def _stop(self, *_: object) -> None:
        self._stopped = True
        if self._main is not None:
            self._main.terminate()
            if not self._unit.mixed:
                self._signal_all(signal.SIGTERM)
            try:
                self._main.wait(timeout=self._unit.stop_seconds)
            except subprocess.TimeoutExpired:
                self._main.kill()
            self._signal_all(signal.SIGKILL)
        sys.exit(0)

    def _signal_all(self, number: signal.Signals) -> None:
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.pid != os.getpid() and process.environ().get(_MARK) == self._id:
                    process.send_signal(number)


def main() -> None:
    """Run one unit."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.units", description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument(
        "--without", action="append", default=[], help="beginning of variables of the unit to leave out"
    )
    arguments = parser.parse_args()
    unit = Unit.read(arguments.file)
    left_out = tuple(arguments.without)
    unit.environment = {name: value for name, value in unit.environment.items() if not name.startswith(left_out)}
    Supervisor(unit).run(os.environ)


if __name__ == "__main__":
    main()
