"""Shards of prepared samples: standard Parquet files, from which single samples are read by their byte offset.

The values of a column are stored plain, in one page, and are thus contiguous in the file. An index contains the
position of each sample's values. Reading samples in any order then reads their own bytes only.
"""

import hashlib
import itertools
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from train_loop.data.dataset import Cells, Part, ShardFile
from train_loop.data.order import Ids
from train_loop.data.prepare.packing import Sample
from train_loop.run_dir import is_transient
from train_loop.system.retry import retry_storage

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
_KINDS = {"input_ids": pa.int32(), "labels": pa.int32(), "documents": pa.int32(), "weights": pa.float32()}


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
            flat = {name: np.concatenate(values) for name, values in lists.items()}
            shards.append(_write_shard(folder / f"part-{number:05d}.parquet", lists, flat))
            index.write(records.tobytes())
            # One hash per column, so that the sizes of shards do not matter.
            for name, values in {**flat, "tokens": np.ascontiguousarray(records["tokens"])}.items():
                hashes[name].update(values)
            tokens += int(records["tokens"].sum())
        index.flush()
        os.fsync(index.fileno())
    columns = {name for shard in shards for name in shard.columns}
    return Part(
        fingerprint=folder.name,
        files=tuple(shards),
        labels="labels" if "labels" in columns else None,
        documents="documents",
        weights="weights" if "weights" in columns else None,
        index=str(folder / _INDEX),
        tokens=tokens,
        digest=hashlib.sha256(repr(sorted((n, one.hexdigest()) for n, one in hashes.items())).encode()).hexdigest(),
    )


def read_shards(part: Part, local: Ids) -> Iterator[Cells]:
    """Yield prepared samples by index, in the requested order."""
    for sample in local.tolist():
        try:
            yield _read_sample(part, sample)
        except OSError as error:
            if not _may_pass(error):
                raise
            yield retry_storage(partial(_read_again, part, sample), may_pass=_may_pass)


def _read_sample(part: Part, sample: int) -> Cells:
    assert part.index is not None
    record = np.frombuffer(_open(part.index).read(RECORD_BYTES, sample * RECORD_BYTES), _RECORD)
    shard, token, tokens, document, documents = record.item()
    file = part.files[shard]
    return Cells(
        _values(file, part.input_ids, token, tokens),
        _values(file, part.labels, token, tokens) if part.labels else None,
        _values(file, part.documents, document, documents) if part.documents else None,
        _values(file, part.weights, document, documents) if part.weights else None,
    )


def _read_again(part: Part, sample: int) -> Cells:
    # Files that were opened before an unmount can stay stale forever.
    _open.cache_clear()
    return _read_sample(part, sample)


def _may_pass(error: BaseException) -> bool:
    """Return whether a retry may succeed. If even the cache folder is missing, its storage is unavailable."""
    if isinstance(error, FileNotFoundError) and error.filename:
        return not Path(error.filename).parent.parent.is_dir()
    return is_transient(error)


def _values(file: ShardFile, column: str, start: int, count: int) -> NDArray[Any]:
    kind = np.dtype(_KINDS[column].to_pandas_dtype())
    place = file.columns[column] + start * kind.itemsize
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


def _columns(samples: list[Sample]) -> dict[str, list[Any]]:
    """Return the values of each sample, column by column."""
    lists: dict[str, list[Any]] = {
        "input_ids": [sample.input_ids for sample in samples],
        "documents": [np.asarray(sample.documents, np.int32) for sample in samples],
    }
    if samples[0].labels is not None:
        lists["labels"] = [sample.labels for sample in samples]
    if samples[0].weights is not None:
        lists["weights"] = [sample.weights for sample in samples]
    return lists


def _write_shard(path: Path, lists: dict[str, list[Any]], flat: dict[str, NDArray[Any]]) -> ShardFile:
    rows = len(lists["input_ids"])
    columns = {name: _list_array(values, flat[name], _KINDS[name]) for name, values in lists.items()}
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


def _list_array(values: list[Any], flat: NDArray[Any], kind: pa.DataType) -> pa.Array:
    offsets = np.cumsum([0, *map(len, values)], dtype=np.int32)
    return pa.ListArray.from_arrays(offsets, pa.array(flat, kind), type=pa.list_(pa.field("element", kind, False)))


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
