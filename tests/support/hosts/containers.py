"""Containers on a test host, restricted as Kubernetes' strictest policy has them.

The root is read-only but for some folders; processes run as a user without a passwd entry, HOME, capabilities or a way
to get new privileges.
"""

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.hosts.hosts import OPT, REPOSITORY, SHARED, Host

UID = 10001
"""The user of Trainshed's images."""
IMAGE = {"PATH": f"{OPT}/.venv/bin:/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1"}
"""The environment variables of Trainshed's images."""


@dataclass(frozen=True)
class Container:
    """A command with its environment in addition to the image's, and its writable folders."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    writable: tuple[str, ...] = ("/tmp",)


def restrict(host: Host, *writable: str, uid: int = UID) -> None:
    """Make the host's file system read-only, except its storage and new, empty folders of a user."""
    let_all_users_in(host)
    for folder in writable:
        host.run("mkdir", "-p", folder)
        host.run("mount", "-t", "tmpfs", "-o", f"mode=0700,uid={uid},gid={uid}", "tmpfs", folder)
        if Path(folder) in REPOSITORY.parents:
            # The scripts of the virtual environment name its Python by this path.
            host.run("mkdir", "-p", str(REPOSITORY))
            host.run("mount", "--bind", OPT, str(REPOSITORY))
    host.run("chown", f"{uid}:{uid}", SHARED)
    for folder in (OPT, str(REPOSITORY), "/run", "/"):
        host.run("mount", "-o", "remount,ro" if folder in ("/", "/run") else "remount,bind,ro", folder)


def let_all_users_in(host: Host) -> None:
    """Allow all users to read this machine's Python and the project, which may lie in a home directory."""
    for place in (Path(sys.executable).resolve(), REPOSITORY):
        host.run("chmod", "a+x", *map(str, [*place.parents][:-1]))


def command_of(host: Host, container: Container, *, uid: int = UID) -> list[str]:
    """Return the command line that runs a container's command on a host."""
    words = [f"{name}={value}" for name, value in {**IMAGE, **container.environment}.items()]
    drop = ["--inh-caps=-all", "--ambient-caps=-all", "--bounding-set=-all", "--no-new-privs"]
    who = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", *drop]
    return host.command(*who, "env", f"--chdir={OPT}", "-i", *words, *container.command)


def start(host: Host, container: Container) -> "subprocess.Popen[bytes]":
    """Start a container; it writes to its log in the lab's folder."""
    return host.spawn_line(command_of(host, container), log=container.name)


def run(host: Host, container: Container, *, seconds: float = 60) -> str:
    """Run a container to its end and return its output. Raises AssertionError if it fails, or takes too long."""
    try:
        done = subprocess.run(
            command_of(host, container),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=seconds,
            check=False,
            text=True,
        )
    except subprocess.TimeoutExpired as error:
        raise AssertionError(f"{host.name}: {container.name} did not end within {seconds:g} s") from error
    assert done.returncode == 0, f"{host.name}: {container.name} ended with {done.returncode}: {done.stdout}"
    return done.stdout
