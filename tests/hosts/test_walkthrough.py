"""docs/operate/several-hosts.md, run on two test hosts: its commands must print the page's output."""

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.clients.typed import Shell, Typed
from tests.support.hosts.hosts import REPOSITORY, Host, Lab, lab

PAGE = Path("docs/operate/several-hosts.md")
_BLOCK = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_PROMPT = re.compile(r"^(head|node1)\$ ", re.MULTILINE)
_UNITS = {"node1": "trainshed-node"}
"""The systemd unit that a host starts at boot."""


def commands() -> Iterator[tuple[str, Typed]]:
    """Return each command of the page with its host, in order."""
    for block in _BLOCK.findall(PAGE.read_text()):
        _, *parts = _PROMPT.split(block)
        for host, text in zip(parts[::2], parts[1::2], strict=True):
            command, _, answer = text.partition("\n")
            yield host, Typed(command, answer)


class Operator:
    """A simulated operator who types commands on the hosts and performs manual and systemd steps."""

    def __init__(self, made: Lab, stack: ExitStack) -> None:
        self._lab = made
        self._stack = stack
        self._shells: dict[str, Shell] = {}

    def type(self, name: str, command: str) -> tuple[str, int]:
        """Return the output and the exit code of a command on a host."""
        host = self._lab.hosts[name]
        match command.split():
            case ["scp", source, target]:
                address, _, path = target.partition(":")
                (other,) = [one for one in self._lab.hosts.values() if one.address == address]
                other.write(path, host.read(source) or "")
            case ["systemctl", "enable", "--now", unit]:
                host.start_unit(unit)
            case ["poweroff"]:
                host.kill()
            case ["poweron"]:
                self._switch_on(host)
            case _:
                return self._shell(host).type(command)
        return "", 0

    def _switch_on(self, host: Host) -> None:
        files = self._files[host.name]
        host.start()
        # A real disk keeps the user and these files.
        let_all_users_in(host)
        host.run("groupadd", "--system", "--gid", "950", "trainshed")
        host.run("useradd", "--system", "--uid", "950", "--gid", "trainshed", "--no-create-home", "trainshed")
        for path, text in files.items():
            host.write(path, text)
            host.run("chgrp", "trainshed", path)
            host.run("chmod", "640", path)
        host.start_unit(_UNITS[host.name])

    @property
    def _files(self) -> dict[str, dict[str, str]]:
        head = self._lab.hosts["head"]
        settings = (head.read("/etc/trainshed/trainshed.env") or "").replace(
            "NODE_ADDRESS=10.77.0.10", "NODE_ADDRESS=10.77.0.11"
        )
        files = {
            "/etc/trainshed/ray.token": head.read("/etc/trainshed/ray.token") or "",
            "/etc/trainshed/trainshed.env": settings,
        }
        return {"node1": files}

    def _shell(self, host: Host) -> Shell:
        if host.name not in self._shells:
            # Users have the commands of the project only after the page installs them.
            path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
            command = host.command("bash", "--norc", env={"COLUMNS": "200", "PATH": path})
            self._shells[host.name] = self._stack.enter_context(Shell({}, command=command))
        return self._shells[host.name]


def let_all_users_in(host: Host) -> None:
    """Allow all users to read this machine's Python and the project, which may lie in a home directory."""
    for place in (Path(sys.executable).resolve(), REPOSITORY):
        host.run("chmod", "a+x", *map(str, [*place.parents][:-1]))


@pytest.mark.more
@pytest.mark.timeout(600)
def test_walkthrough_of_several_hosts_matches_its_page(shared: Path) -> None:
    # As on a mounted file system.
    shared.chmod(0o755)
    with lab(["head", "node1"], shared=shared, hosts_files=["debian"]) as made, ExitStack() as stack:
        for host in made.hosts.values():
            let_all_users_in(host)
        operator = Operator(made, stack)
        for name, one in commands():
            try:
                output, code = operator.type(name, one.command)
            except subprocess.TimeoutExpired as error:
                raise AssertionError(f"{name}$ {one.command} did not end") from error
            assert code == 0, f"{name}$ {one.command}\n{output}"
            assert one.fits(output), f"{name}$ {one.command}\n{output}\n--- the page says\n{one.answer}"
