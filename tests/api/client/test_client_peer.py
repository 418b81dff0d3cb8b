"""Keys of the home reach only the service of the home, whoever listens on its port."""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.clients.command import run
from tests.support.fakes.service import KEY
from trainshed import AsyncClient, Client
from trainshed.cli import ids

SQUATTER = """
import json, os, socket, sys
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
answer = sys.argv[1].encode()
while True:
    connection, _ = server.accept()
    with connection:
        connection.settimeout(5)
        print(json.dumps(connection.recv(1 << 16).decode(errors="replace")), flush=True)
        head = b"HTTP/1.1 200 OK\\r\\nconnection: close\\r\\ncontent-length: %d\\r\\n\\r\\n"
        connection.sendall(head % len(answer) + answer)
"""


class Squatter:
    """A process of another user, if this one is root, that listens on a port and records what it receives."""

    def __init__(self, answer: str = "{}") -> None:
        command = [sys.executable, "-c", SQUATTER, answer]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.url = f"http://127.0.0.1:{int(self.process.stdout.readline())}"

    def end(self) -> list[str]:
        """End it and return what it has received."""
        self.process.kill()
        output, _ = self.process.communicate()
        return [json.loads(line) for line in output.splitlines()]

    def close(self) -> None:
        """End it, unless that has been done."""
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def squatter() -> Iterator[Squatter]:
    one = Squatter()
    yield one
    one.close()


@pytest.fixture
def dead_home(tmp_path: Path, squatter: Squatter, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create the home of a service that has died, on whose port another program listens now."""
    for name in ("TRAINSHED_URL", "TRAINSHED_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TRAINSHED_HOME", str(tmp_path))
    monkeypatch.setenv("TRAINSHED_PORT", squatter.url.rpartition(":")[2])
    (tmp_path / "admin.key").write_text(f"{KEY}\n")
    dead = subprocess.Popen(["true"])
    dead.wait()
    (tmp_path / "service.json").write_text(json.dumps({"url": squatter.url, "pid": dead.pid}))
    return tmp_path


def call_sync() -> None:
    with (
        Client(patience=0) as client,
        pytest.raises(httpx.ConnectError, match=r"no service runs in .*; another program"),
    ):
        client.api.me()


def call_async() -> None:
    async def call() -> None:
        async with AsyncClient(patience=0) as client:
            with pytest.raises(httpx.ConnectError, match=r"no service runs in .*; another program"):
                await client.api.me()

    asyncio.run(call())


def call_cli() -> None:
    for command in (["ps"], ["doctor"]):
        done = run(*command)
        assert done.exit_code == 1, command
        assert "start it with `trainshed up`" in done.stderr + done.stdout
        assert "Traceback" not in done.stderr
        assert done.exception is None or isinstance(done.exception, SystemExit)


def complete() -> None:
    assert ids.complete_job("job-") == []


@pytest.mark.parametrize("call", [call_sync, call_async, call_cli, complete])
def test_key_is_not_sent_to_another_program_on_the_port(
    dead_home: Path, squatter: Squatter, call: Callable[[], None]
) -> None:
    call()
    assert "".join(squatter.end()) == ""


def no_record(home: Path) -> None:
    (home / "service.json").unlink()


def not_the_listener(home: Path) -> None:
    write_pid(home, os.getpid())


def reused_pid(home: Path) -> None:
    """Record the squatter's own pid: it has the pid of the dead service, but started after the record was written."""
    os.utime(home / "service.json", (time.time() - 600, time.time() - 600))


def write_pid(home: Path, pid: int) -> None:
    record = json.loads((home / "service.json").read_text())
    (home / "service.json").write_text(json.dumps(record | {"pid": pid}))


@pytest.mark.parametrize("state", [no_record, not_the_listener, reused_pid])
def test_key_is_not_sent_whatever_the_record_says(
    dead_home: Path, squatter: Squatter, state: Callable[[Path], None]
) -> None:
    write_pid(dead_home, squatter.process.pid)
    state(dead_home)
    call_sync()
    assert "".join(squatter.end()) == ""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a second user")
def test_key_is_not_sent_to_process_of_another_user_that_the_record_names(dead_home: Path, squatter: Squatter) -> None:
    write_pid(dead_home, squatter.process.pid)
    call_sync()
    assert "".join(squatter.end()) == ""


@pytest.mark.parametrize("answer", ["", "{}", "[]", "null", "hello", "<html>", '{"data": 3}', "\x01\x02"])
def test_answer_of_another_program_is_one_line(dead_home: Path, answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    other = Squatter(answer)
    # An explicit URL and key: the user decides.
    monkeypatch.setenv("TRAINSHED_URL", other.url)
    monkeypatch.setenv("TRAINSHED_KEY", "a-key")
    for command in (["ps"], ["show", "job-" + 26 * "0"], ["usage"]):
        done = run(*command)
        assert (done.exit_code, done.stderr.count("\n")) == (1, 1), (command, done.output, done.exception)
        assert "does not answer" in done.stderr
        assert isinstance(done.exception, SystemExit)
    assert all("Bearer a-key" in text for text in other.end())
