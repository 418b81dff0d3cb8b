"""Removal of unpacked packages: those that a process uses stay, of the others the newest ones."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from train_loop.code.cleanup import KEPT, remove_unused
from train_loop.code.package import Package, code_home, unpack, unpacked

USE = """
import sys, tempfile
from pathlib import Path
tempfile.tempdir = sys.argv[1]
from train_loop.code.package import Package, unpack
for name in sys.argv[2:]:
    unpack(Package("x", {"m.py": name.encode(), "p/__init__.py": b""}))
print("ready", flush=True)
sys.stdin.read()
"""


def package(name: str) -> Package:
    return Package("x", {"m.py": name.encode(), "p/__init__.py": b""})


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return code_home()


@contextmanager
def process(home: Path, *names: str) -> Iterator[None]:
    """Run a process that has unpacked packages."""
    command = [sys.executable, "-c", USE, str(home.parent), *names]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "ready\n"
        yield
        assert running.stdin is not None
        running.stdin.close()


def test_unused_packages_are_removed_and_used_ones_stay(home: Path) -> None:
    used, unused = unpacked(package("used").sha256), unpacked(package("unused").sha256)
    with process(home, "unused"):
        assert unused.is_dir()
    with process(home, "used"):
        remove_unused(home, keep=0)
        assert (used / "m.py").read_bytes() == b"used"
        assert not unused.exists()
        assert sorted(path.name for path in home.iterdir()) == [used.name, f"{used.name}.lock"]
    remove_unused(home, keep=0)
    assert list(home.iterdir()) == []


def test_unpacking_leaves_a_bounded_number_of_unused_packages(home: Path) -> None:
    names = [f"{number:02d}" for number in range(KEPT + 5)]
    with process(home, *names):
        assert len(list(home.glob("*.lock"))) == len(names)
    for number, name in enumerate(names):
        os.utime(home / f"{unpacked(package(name).sha256).name}.lock", (number, number))
    unpack(package("another"))
    left = {unpacked(package(name).sha256).name for name in names[-KEPT:]} | {unpacked(package("another").sha256).name}
    assert {path.name for path in home.iterdir() if path.is_dir()} == left


def test_folders_that_a_dead_process_left_are_removed_after_a_week(home: Path) -> None:
    home.mkdir(mode=0o700)
    old, new = home / "old-1", home / "tmp-2"
    for folder in (old, new):
        (folder / "p").mkdir(parents=True)
        (folder / "p").chmod(0o555)
    week_ago = time.time() - 8 * 86400
    os.utime(old, (week_ago, week_ago))
    remove_unused(home)
    assert [path.name for path in home.iterdir()] == ["tmp-2"]
    remove_unused(home / "missing")


def test_folder_that_others_could_open_or_a_link_is_left_alone(home: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    (other / "data").mkdir(parents=True)
    week_ago = time.time() - 8 * 86400
    os.utime(other / "data", (week_ago, week_ago))
    home.symlink_to(other)
    remove_unused(home, keep=0)
    home.unlink()
    other.rename(home)
    home.chmod(0o755)
    remove_unused(home, keep=0)
    assert (home / "data").is_dir()
