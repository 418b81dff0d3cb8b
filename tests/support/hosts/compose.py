"""deploy/compose.yaml on test hosts: each service with its command, environment, secrets, volumes and health check."""

import re
import shutil
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from compose_spec import PyCompose

from tests.support.hosts.containers import UID, Container, restrict, run, start
from tests.support.hosts.hosts import SHARED, Host

FOLDER = Path("deploy")
_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")
OURS = ("trainshed:", "trainshed-worker:")
"""Name prefix of Trainshed's images."""


def read(variables: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Read the file with its variables filled in and its anchors merged. Raises ValueError if it is invalid."""
    values = variables or {}
    text = _VARIABLE.sub(lambda match: values.get(match[1], match[2] or ""), (FOLDER / "compose.yaml").read_text())
    found: dict[str, Any] = yaml.safe_load(text)
    # The schema does not support anchors: they are merged by now.
    PyCompose.from_yaml(yaml.safe_dump(found)).validate()
    return found


@dataclass
class Service:
    """One service of the file, on a host of the same name."""

    name: str
    raw: dict[str, Any]
    host: Host
    secrets: Path
    """The folder that deploy/secrets.sh filled."""

    def environment(self) -> dict[str, str]:
        """Return the service's variables."""
        found = {"HOME": "/tmp"}
        for file in self.raw.get("env_file", []):
            lines = (self.secrets / Path(file).name).read_text().splitlines()
            found |= dict(line.split("=", 1) for line in lines)
        found |= self.raw.get("environment", {})
        return found

    def container(self, *words: str) -> Container:
        """Return the service's container, or one next to it with another command."""
        entrypoint = ("prometheus",) if self.raw["image"].startswith("prom/prometheus") else ()
        return Container(self.name, words or (*entrypoint, *self.raw["command"]), self.environment())

    def prepare(self) -> None:
        """Give the host the files of the container."""
        for secret in self.raw.get("secrets", []):
            self.host.write(f"/run/secrets/{secret}", (self.secrets / secret).read_text())
            # Bind mounts keep the mode of the file.
            mode = stat.S_IMODE((self.secrets / secret).stat().st_mode)
            self.host.run("chmod", f"{mode:o}", f"/run/secrets/{secret}")
        writable = []
        for volume in self.raw.get("volumes", []):
            source, _, target = volume.partition(":")
            if source.startswith("./"):
                path = target.removesuffix(":ro")
                self.host.write(path, _without_dns((FOLDER / source).read_text()))
            elif (target or source) != SHARED:
                writable.append(target or source)
        if self.raw["image"].startswith(OURS):
            assert (self.raw["user"], self.raw["read_only"], self.raw["cap_drop"]) == (f"{UID}:{UID}", True, ["ALL"])
            restrict(self.host, *writable, *(["/dev/shm"] if "shm_size" in self.raw else []))
        else:
            for folder in writable:
                self.host.run("install", "-d", "-o", str(UID), folder)

    def start(self) -> None:
        """Start the service; it writes to its log in the lab's folder."""
        start(self.host, self.container())

    def stop(self) -> None:
        """Send SIGTERM to the first process of the container, as `docker compose stop` does."""
        self.host.run("pkill", "-TERM", "-f", "^" + " ".join(self.raw["command"][:3]))

    def healthy(self) -> bool:
        """Return the result of the service's health check."""
        kind, *words = self.raw["healthcheck"]["test"]
        assert kind == "CMD"
        try:
            run(self.host, self.container(*words), seconds=30)
        except AssertionError:
            return False
        return True


def _without_dns(text: str) -> str:
    """Replace DNS discovery with static targets: test hosts have no name server."""
    return re.sub(
        r"dns_sd_configs: \[\{names: \[head, worker\], type: A, port: (\d+), .*\}\]",
        r'static_configs: [{targets: ["head:\1", "worker:\1"]}]',
        text,
    )


def ports(raw: Mapping[str, Any]) -> Iterator[int]:
    """Return the published ports of the container; all bind to this machine only."""
    for port in raw.get("ports", []):
        address, _, inside = port.split(":")
        assert address == "127.0.0.1", port
        yield int(inside)


def why_not(image: str) -> str | None:
    """Return the reason why a third-party image cannot run here; None if it can."""
    needed = {"postgres": "initdb", "prom/prometheus": "prometheus"}.get(image.partition(":")[0])
    return None if needed is not None and shutil.which(needed) else f"{image} has no program on this machine"
