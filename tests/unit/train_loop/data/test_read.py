"""Reads of token rows from a user's own Parquet files while their storage is unavailable."""

import threading
from pathlib import Path

import pytest

from tests.support.ranks.torchrun import write_tokens
from train_loop.data.prepare.sources import list_files
from train_loop.data.stream import local
from train_loop.errors import DataError
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


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "not found: it was deleted or moved during the run"), (b"PAR1", "has changed during the run")],
)
def test_file_that_is_deleted_or_replaced_during_the_run_is_named_without_a_wait(
    folder: Path, content: bytes | None, message: str
) -> None:
    (file,) = list_files(SourceSpec(path=str(folder / "d.parquet")))
    (folder / "other").touch()
    (folder / "d.parquet").unlink()
    if content is not None:
        (folder / "d.parquet").write_bytes(content)
    with pytest.raises(DataError, match=f"^{folder}/d.parquet {message}; restore it, and clone the job"):
        local._table(file, ("ids",))
