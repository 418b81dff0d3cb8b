"""Limits of a process that runs users' code."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from train_loop.system.landlock import landlock_version

SCRIPT = """
import json, os, socket, sys
from pathlib import Path
from train_loop.preflight.sandbox import confine

root, home = Path(sys.argv[1]), Path(os.environ["TMPDIR"])
confine([root], remote=len(sys.argv) > 2)

def attempt(call):
    try:
        return call() and "done"
    except (OSError, OverflowError) as error:
        return type(error).__name__

calls = {
    "root": lambda: (root / "rows").read_text(),
    "write to root": lambda: (root / "rows").write_text("x"),
    "secret": lambda: (root.parent / "secret").read_text(),
    "passwd": lambda: open("/etc/passwd").read(),
    "environment": lambda: open(f"/proc/{os.getppid()}/environ", "rb").read(),
    "signal": lambda: os.kill(os.getppid(), 0) or True,
    "connect": lambda: socket.create_connection(("127.0.0.1", int(os.environ["PORT"]))),
    "import": lambda: __import__("torch.utils.data") and __import__("yaml"),
    "home": lambda: (Path.home() / "a").write_text("x"),
    "large file": lambda: (home / "b").open("wb").truncate(2**40),
}
(home / "found.json").write_text(json.dumps({name: attempt(call) for name, call in calls.items()}))
"""


@pytest.mark.skipif(landlock_version() < 6, reason="the kernel has no Landlock")
def test_confined_process_reads_its_roots_and_python_alone(tmp_path: Path) -> None:
    for name in ("root", "home"):
        (tmp_path / name).mkdir()
    (tmp_path / "root" / "rows").write_text("x")
    (tmp_path / "secret").write_text("x")
    environment = os.environ | {"TMPDIR": str(tmp_path / "home"), "PORT": "9"}
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "root")]
    assert subprocess.run(command, env=environment, check=False).returncode == 0
    assert json.loads((tmp_path / "home" / "found.json").read_text()) == {
        "root": "done",
        **dict.fromkeys(("write to root", "secret", "passwd", "environment", "signal", "connect"), "PermissionError"),
        **dict.fromkeys(("import", "home"), "done"),
        "large file": "OSError",
    }
