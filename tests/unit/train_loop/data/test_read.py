"""Reads of token rows from a user's own Parquet files while their storage is unavailable."""

import threading
from pathlib import Path

import pytest

from tests.support.ranks.torchrun import write_tokens
from train_loop.data.prepare.sources import list_files
from train_loop.data.stream import local
from train_loop.spec import SourceSpec


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a mount point with one file."""
    mount = tmp_path / "mount"
    mount.mkdir()
    write_tokens(mount / "d.parquet", rows=3, length=4, vocab=9)
    return mount


def test_rows_are_read_once_an_unmounted_folder_returns(folder: Path) -> None:
    (file,) = list_files(SourceSpec(path=str(folder / "d.parquet")))
    folder.rename(folder.with_name("away"))
    # Like an unmount, this leaves an empty folder.
    folder.mkdir()

    def mount() -> None:
        folder.rmdir()
        folder.with_name("away").rename(folder)

    timer = threading.Timer(0.5, mount)
    timer.start()
    assert local._table(file, ("ids",)).num_rows == 3
    timer.join()


def test_missing_file_among_others_fails_without_a_wait(folder: Path) -> None:
    (file,) = list_files(SourceSpec(path=str(folder / "d.parquet")))
    (folder / "other").touch()
    (folder / "d.parquet").unlink()
    with pytest.raises(FileNotFoundError):
        local._table(file, ("ids",))
