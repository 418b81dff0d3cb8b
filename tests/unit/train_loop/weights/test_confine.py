"""The process that reads weights: no network, no other files, limited memory; and nothing is left of a failure."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from train_loop.system.confine.landlock import landlock_version

SCRIPT = """
import json, os, socket, sys
from pathlib import Path
import torch
from train_loop.errors import UserError
from train_loop.weights.confine import leave_network, run_confined
from train_loop.weights.convert import Options, convert

root, port = Path(sys.argv[1]), int(sys.argv[2])

def attempt(call):
    try:
        return call() and "done"
    except (OSError, MemoryError, RuntimeError) as error:
        return type(error).__name__

def work():
    return {
        "connect": attempt(lambda: socket.create_connection(("127.0.0.1", port), timeout=5)),
        "secret": attempt(lambda: (root / "secret").read_text()),
        "outside": attempt(lambda: (root / "written").write_text("x")),
        "inside": attempt(lambda: (root / "work" / "a").write_text("x")),
        "given": attempt(lambda: (root / "given").read_text()),
        "process": attempt(lambda: os.fork() or os._exit(0)),
        "memory": attempt(lambda: torch.empty(2**30, dtype=torch.uint8).fill_(1).any().item()),
    }

def limits(**given):
    return run_confined(readable=[root / "given"], writable=root / "work", largest=0, memory_bytes=2**28, **given)

def refused(call):
    try:
        return str(call())
    except UserError as error:
        return str(error)

found = limits(work=work)
found["uid"] = os.getuid()
found["network"] = limits(work=lambda: {"left": leave_network()})["left"]
found["large"] = refused(lambda: limits(work=lambda: torch.empty(2**30, dtype=torch.uint8).fill_(1)))
found["dead"] = refused(lambda: limits(work=lambda: os.kill(os.getpid(), 11)))
torch.save({"a": torch.ones(2)}, root / "a.pt")
torch.save({"a": torch.ones(2), "b": 3}, root / "b.pt")
found["half"] = refused(lambda: convert(root / "b.pt", root / "out", Options()))
found["after"] = sorted(path.name for path in root.iterdir())
found["notes"] = convert(root / "a.pt", root / "out", Options()).notes
found["again"] = refused(lambda: convert(root / "a.pt", root / "out", Options()))
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("confined")
    (root / "work").mkdir()
    for name in ("secret", "given"):
        (root / name).write_text("x")
    command = [sys.executable, "-c", SCRIPT, str(root), "9"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_process_that_reads_has_limits(found: dict[str, Any]) -> None:
    assert (found["inside"], found["given"]) == ("done", "done")
    assert found["memory"] in ("RuntimeError", "MemoryError")
    if landlock_version() >= 1:
        assert (found["secret"], found["outside"]) == ("PermissionError", "PermissionError")
    if os.getuid():
        assert found["process"] == "BlockingIOError"


@pytest.mark.skipif(sys.platform != "linux", reason="namespaces are of Linux")
def test_process_that_reads_has_no_network(found: dict[str, Any]) -> None:
    if not found["network"] and landlock_version() < 4:
        pytest.skip("the kernel gives this user neither a network namespace nor Landlock for TCP")
    # Its own loopback is down; an open port of the host would answer with a refusal.
    assert found["connect"] in ("OSError", "PermissionError")


def test_exceeded_limits_are_named(found: dict[str, Any]) -> None:
    assert found["large"].startswith(
        "reading takes over 256 MiB of memory besides the largest files; raise --memory-mib"
    )
    assert found["dead"] == "the process that reads the files ended with status 11; the files may be damaged"


def test_failed_conversion_leaves_nothing_and_a_done_one_is_kept(found: dict[str, Any]) -> None:
    assert "also holds b (of type int)" in found["half"]
    assert found["after"] == ["a.pt", "b.pt", "given", "secret", "work"]
    assert found["notes"] == [
        "config.json not found next to the weights; a job needs it: copy it into the folder, or give --config"
    ]
    assert "already exists; choose a new folder" in found["again"]
