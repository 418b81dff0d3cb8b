"""Inputs that are not regular files: refused by name, and never waited for."""

import errno
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from train_loop.errors import DataError
from train_loop.system.input_files import open_input, read_input


def make_socket(path: Path) -> None:
    """Bind a Unix socket to a short path, as the length of these paths is limited."""
    here = os.open(path.parent, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(f"/proc/self/fd/{here}/{path.name}")
    os.close(here)


def link_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


IRREGULAR: list[tuple[str, Callable[[Path], None]]] = [
    ("FIFO", os.mkfifo),
    ("socket", make_socket),
    ("device", link_device),
]


@pytest.mark.timeout(10)
@pytest.mark.parametrize(("kind", "make"), IRREGULAR)
def test_irregular_file_is_refused_without_a_wait(tmp_path: Path, kind: str, make: Callable[[Path], None]) -> None:
    make(tmp_path / "config.json")
    with pytest.raises(DataError, match=f"config.json is a {kind}, and only regular files are read"):
        open_input(tmp_path / "config.json")


@pytest.mark.timeout(10)
def test_fifo_that_replaces_a_file_after_its_check_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.json").write_text("{}")
    os.mkfifo(tmp_path / "fifo")
    before = os.stat(tmp_path / "a.json")
    monkeypatch.setattr(os, "stat", lambda path, **_: before)
    with pytest.raises(DataError, match="fifo is a FIFO"):
        open_input(tmp_path / "fifo")


@pytest.mark.parametrize("refused", ["stat", "open"])
def test_file_without_permission_is_an_error_that_names_file_and_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    (tmp_path / "a.json").write_text("{}")

    def refuse(path: object, *_: object, **__: object) -> None:
        # The superuser of these tests may read every file.
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(os, refused, refuse)
    message = r"a.json cannot be read: Permission denied; let the users of service and workers read the file"
    with pytest.raises(DataError, match=message):
        open_input(tmp_path / "a.json")


def test_folder_is_not_opened_as_a_file(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        open_input(tmp_path)


def test_large_file_is_not_read_as_a_whole(tmp_path: Path) -> None:
    with (tmp_path / "chat.jinja").open("wb") as file:
        file.truncate(20 << 30)
    with pytest.raises(DataError, match=r"chat.jinja is larger than 64 MiB, the maximum for such a file"):
        read_input(tmp_path / "chat.jinja")
