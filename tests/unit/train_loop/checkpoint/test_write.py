"""Checkpoint files: the written bytes, for direct and cached writes."""

import errno
import fcntl
import hashlib
import mmap
import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from train_loop.checkpoint.files import writer
from train_loop.checkpoint.files.writer import ProcessWriter, write_file, write_files

SIZE = 20_000
MEMORY = mmap.mmap(-1, SIZE)
MEMORY.write(os.urandom(SIZE))
WHOLE = memoryview(MEMORY)
"""Bytes that start at a page boundary."""


@given(cuts=st.lists(st.one_of(st.sampled_from([4096, 8192, 12288]), st.integers(0, SIZE)), max_size=5))
def test_file_contains_its_pieces(tmp_path_factory: pytest.TempPathFactory, cuts: list[int]) -> None:
    path = tmp_path_factory.getbasetemp() / "pieces"
    written = write_file(path, [WHOLE[start:end] for start, end in pairwise(sorted(cuts))])
    content = path.read_bytes()
    assert content == WHOLE[min(cuts, default=0) : max(cuts, default=0)]
    assert (written.size, written.sha256) == (len(content), hashlib.sha256(content).hexdigest())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder that supports writes past the page cache."""
    try:
        os.close(os.open(tmp_path / "probe", os.O_WRONLY | os.O_CREAT | os.O_DIRECT))
    except OSError as error:
        pytest.skip(f"the file system of {tmp_path} writes nothing past its cache: {error.strerror}")
    return tmp_path


def watched(monkeypatch: pytest.MonkeyPatch, direct: Exception | None, *, at_most: int = SIZE) -> list[bool]:
    """Record for each write if it bypasses the page cache; these writes can fail or end early."""
    writev, seen = os.writev, list[bool]()

    def watch(descriptor: int, pieces: Sequence[memoryview]) -> int:
        seen.append(bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT))
        if seen[-1] and direct is not None:
            raise direct
        return writev(descriptor, [pieces[0][:at_most]] if seen[-1] else pieces)

    monkeypatch.setattr(os, "writev", watch)
    return seen


def test_whole_blocks_bypass_the_page_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = watched(monkeypatch, None)
    write_file(folder / "file", [WHOLE[:10_000], memoryview(b"objects")])
    assert seen == [True, False]
    assert (folder / "file").read_bytes() == bytes(WHOLE[:10_000]) + b"objects"


def test_rejected_direct_write_falls_back_to_the_page_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = watched(monkeypatch, OSError(errno.EINVAL, "Invalid argument"))
    write_file(folder / "file", [WHOLE])
    assert seen == [True, False]
    assert (folder / "file").read_bytes() == WHOLE


@pytest.mark.parametrize("at_most", [512, 4096, 6000, 8192])
def test_short_direct_writes_are_completed(folder: Path, monkeypatch: pytest.MonkeyPatch, at_most: int) -> None:
    seen = watched(monkeypatch, None, at_most=at_most)
    write_file(folder / "file", [WHOLE[:16_384], memoryview(b"objects")])
    assert seen[0]
    assert not seen[-1]
    assert (folder / "file").read_bytes() == bytes(WHOLE[:16_384]) + b"objects"


def test_disk_error_is_raised_without_a_second_write(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = watched(monkeypatch, OSError(errno.EIO, "Input/output error"))
    with pytest.raises(OSError, match="Input/output error"):
        write_file(folder / "file", [WHOLE])
    assert seen == [True]


def test_process_writer_follows_growing_shared_memory(tmp_path: Path) -> None:
    descriptor = os.memfd_create("shared")
    process = ProcessWriter(descriptor)
    for number, size in enumerate((8192, 20_000, 5000)):
        os.ftruncate(descriptor, size)
        shared = memoryview(mmap.mmap(descriptor, size))
        shared[:] = bytes([number + 1]) * size
        files = {"first": [shared[:4096]], "second": [shared[4096:], memoryview(b"objects"), memoryview(b"more")]}
        written = process.write(tmp_path, files)
        for name, pieces in files.items():
            assert (tmp_path / name).read_bytes() == b"".join(pieces)
            assert written[name].sha256 == hashlib.sha256(b"".join(pieces)).hexdigest()
    process.close()
    os.close(descriptor)


def test_process_writer_reports_the_failed_path(tmp_path: Path) -> None:
    descriptor = os.memfd_create("shared")
    process = ProcessWriter(descriptor)
    with pytest.raises(FileNotFoundError, match="missing/file"):
        process.write(tmp_path / "missing", {"file": [memoryview(b""), memoryview(b"objects")]})
    assert process.write(tmp_path, {"file": [memoryview(b""), memoryview(b"objects")]})["file"].size == 7
    process.close()
    os.close(descriptor)


def test_files_are_written_concurrently_and_an_error_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {f"{number}": [WHOLE[number * 1000 :]] for number in range(9)}
    written = write_files(tmp_path, files)
    assert list(written) == list(files)
    for name, (piece,) in files.items():
        assert (tmp_path / name).read_bytes() == piece
        assert written[name].sha256 == hashlib.sha256(piece).hexdigest()
    one = writer.write_file

    def full(path: Path, pieces: Any) -> Any:
        if path.name == "5":
            raise OSError(errno.ENOSPC, "No space left on device")
        return one(path, pieces)

    monkeypatch.setattr(writer, "write_file", full)
    with pytest.raises(OSError, match="No space left"):
        write_files(tmp_path, files)
