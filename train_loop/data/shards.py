"""Shards of prepared samples: standard Parquet files, from which single samples are read by their byte offset.

The values of a column are stored plain, in one page, and are thus contiguous in the file. An index contains the
position of each sample's values. Reading samples in any order then reads their own bytes only.
"""

import hashlib
import itertools
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from train_loop.data.columns import INPUT_IDS, STORED, Column
from train_loop.data.dataset import Cells, Part, ShardFile
from train_loop.data.order import Ids
from train_loop.data.prepare.packing import Sample
from train_loop.run_dir import is_transient
from train_loop.system.retry import retry_storage

T = TypeVar("T")
_INDEX = "index.bin"
_RECORD = np.dtype([(name, "<u4") for name in ("shard", "token", "tokens", "document", "documents")])
"""Index record of a sample: its shard, and the start and number of its tokens and documents in that shard."""
RECORD_BYTES = _RECORD.itemsize
_SHARD_TOKENS = (2**20, 16 * 2**20)
"""Minimum and maximum tokens of a shard; in between, an eighth of all tokens written before it.

A small dataset is thus written during tokenisation, except its last part, and a large dataset has few files.
"""
_SHARD_ROWS = 16_384
"""Maximum rows of a shard: fewer than Parquet's writer puts into a page."""


def write_part(samples: Iterable[Sample], folder: Path) -> Part:
    """Write samples durably into a folder; its name becomes their fingerprint."""
    samples, shards, tokens, hashes = iter(samples), list[ShardFile](), 0, defaultdict[str, Any](hashlib.sha256)
    with (folder / _INDEX).open("wb") as index:
        for number in itertools.count():
            least, most = _SHARD_TOKENS
            chunk = list(_next_shard(samples, max(least, min(most, tokens // 8))))
            if not chunk:
                break
            lists, records = _columns(chunk), _records(number, chunk)
            flat = {column.name: np.concatenate(values) for column, values in lists.items()}
            shards.append(_write_shard(folder / f"part-{number:05d}.parquet", lists, flat))
            index.write(records.tobytes())
            # One hash per column, so that the sizes of shards do not matter.
            for name, values in {**flat, "tokens": np.ascontiguousarray(records["tokens"])}.items():
                hashes[name].update(values)
            tokens += int(records["tokens"].sum())
        index.flush()
        os.fsync(index.fileno())
    written = {name for shard in shards for name in shard.columns}
    return Part(
        fingerprint=folder.name,
        files=tuple(shards),
        **{column.name: column.name for column in STORED if column.name in written},
        index=str(folder / _INDEX),
        tokens=tokens,
        digest=hashlib.sha256(repr(sorted((n, one.hexdigest()) for n, one in hashes.items())).encode()).hexdigest(),
    )


def read_shards(part: Part, local: Ids) -> Iterator[Cells]:
    """Yield prepared samples by index, in the requested order."""
    columns = tuple(part.stored)
    for sample in local.tolist():
        yield _retried(partial(_read_sample, part, columns, sample))


def sample_lengths(part: Part, start: int, stop: int) -> Ids:
    """Return the number of tokens of prepared samples [start, stop)."""
    return _retried(partial(_read_lengths, part, start, stop))


def _read_sample(part: Part, columns: tuple[Column, ...], sample: int) -> Cells:
    assert part.index is not None
    record = np.frombuffer(_open(part.index).read(RECORD_BYTES, sample * RECORD_BYTES), _RECORD)
    shard, token, tokens, document, documents = record.item()
    file = part.files[shard]
    return {
        column.name: _values(file, column, token, tokens)
        if column.stored == "token"
        else _values(file, column, document, documents)
        for column in columns
    }


def _read_lengths(part: Part, start: int, stop: int) -> Ids:
    assert part.index is not None
    records = _open(part.index).read((stop - start) * RECORD_BYTES, start * RECORD_BYTES)
    lengths: Ids = np.frombuffer(records, _RECORD)["tokens"].astype(np.int64)
    return lengths


def _retried(read: Callable[[], T]) -> T:
    """Return what `read` returns; retry while the storage is unavailable."""
    try:
        return read()
    except OSError as error:
        if not may_pass(error):
            raise
    return retry_storage(partial(_read_again, read), may_pass=may_pass)


def _read_again(read: Callable[[], T]) -> T:
    # Files that were opened before an unmount can stay stale forever.
    _open.cache_clear()
    return read()


def may_pass(error: BaseException) -> bool:
    """Return whether a retry may succeed for prepared data. Without its cache folder, the storage is unavailable."""
    if isinstance(error, FileNotFoundError) and error.filename:
        return not Path(error.filename).parent.parent.is_dir()
    return is_transient(error)


def _values(file: ShardFile, column: Column, start: int, count: int) -> NDArray[Any]:
    kind = np.dtype(column.dtype)
    place = file.columns[column.name] + start * kind.itemsize
    return np.frombuffer(_open(file.path).read(count * kind.itemsize, place), kind)


class _Opened:
    """A file for reads at any offset; it is closed when the last reference to it disappears."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_RDONLY)

    def read(self, count: int, place: int) -> bytes:
        data = os.pread(self._descriptor, count, place)
        if len(data) != count:
            # Fewer tokens would look like a shorter sample.
            raise OSError(f"{self._path} is truncated: it ends at byte {place + len(data)}, before {place + count}")
        return data

    def __del__(self) -> None:
        # The attribute is missing if the file could not be opened.
        if (descriptor := self.__dict__.get("_descriptor")) is not None:
            os.close(descriptor)


_open = lru_cache(maxsize=256)(_Opened)


def _next_shard(samples: Iterator[Sample], enough: int) -> Iterator[Sample]:
    tokens = 0
    for sample in itertools.islice(samples, _SHARD_ROWS):
        yield sample
        tokens += len(sample.input_ids)
        if tokens >= enough:
            return


def _columns(samples: list[Sample]) -> dict[Column, list[Any]]:
    """Return the values of each sample, column by column."""
    stored = [column for column in STORED if getattr(samples[0], column.name) is not None]
    return {one: [np.asarray(getattr(sample, one.name), one.dtype) for sample in samples] for one in stored}


def _write_shard(path: Path, lists: dict[Column, list[Any]], flat: dict[str, NDArray[Any]]) -> ShardFile:
    rows = len(lists[INPUT_IDS])
    columns = {column.name: _list_array(values, flat[column.name]) for column, values in lists.items()}
    with path.open("wb") as file:
        # One plain page per column, whatever its size.
        pq.write_table(
            pa.table(columns),
            file,
            row_group_size=rows,
            data_page_size=2**30,
            compression="none",
            use_dictionary=False,
            write_statistics=False,
        )
        file.flush()
        os.fsync(file.fileno())
    return ShardFile(path=str(path), rows=rows, size=path.stat().st_size, columns=_places(path, flat))


def _list_array(values: list[Any], flat: NDArray[Any]) -> pa.Array:
    offsets, items = np.cumsum([0, *map(len, values)], dtype=np.int32), pa.array(flat)
    return pa.ListArray.from_arrays(offsets, items, type=pa.list_(pa.field("element", items.type, False)))


def _places(path: Path, flat: dict[str, NDArray[Any]]) -> dict[str, int]:
    """Return the byte offset of each column's values: they are the last bytes of its only page."""
    group = pq.read_metadata(path).row_group(0)
    chunks = {chunk.path_in_schema.split(".")[0]: chunk for chunk in map(group.column, range(group.num_columns))}
    places = {}
    for name, values in flat.items():
        chunk = chunks[name]
        place = chunk.data_page_offset + chunk.total_compressed_size - values.nbytes
        written = np.fromfile(path, values.dtype, len(values), offset=place)
        # A mismatch means that the Parquet library has changed its layout.
        assert np.array_equal(written, values), f"{path}: the values of {name} do not lie in one plain page"
        places[name] = place
    return places


def _records(shard: int, samples: list[Sample]) -> NDArray[Any]:
    records = np.zeros(len(samples), _RECORD)
    records["shard"] = shard
    records["tokens"] = [len(sample.input_ids) for sample in samples]
    records["documents"] = [len(sample.documents) for sample in samples]
    for start, count in (("token", "tokens"), ("document", "documents")):
        records[start] = np.cumsum(records[count]) - records[count]
    return records
