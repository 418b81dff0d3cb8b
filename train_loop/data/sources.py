"""URIs and globs → the files behind them, in name order, inside the roots that the operator allows."""

import itertools
import json
import os
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.parquet as pq

from train_loop.errors import DataError
from train_loop.run_dir import local_path
from train_loop.spec import DataSpec, SourceSpec

STDLIB = "stdlib://"
"""Python's own sources: real text that every machine has."""

Format = Literal["parquet", "jsonl", "text"]
_ENDINGS: dict[str, Format] = {
    **dict.fromkeys((".parquet", ".pq"), "parquet"),
    **dict.fromkeys((".jsonl", ".ndjson"), "jsonl"),
    **dict.fromkeys((".txt", ".text", ".md", ".rst", ".py"), "text"),
}


@dataclass(frozen=True)
class SourceFile:
    """One file of training data, as it was when it was listed."""

    path: str
    format: Format
    size: int
    mtime_ns: int


def list_files(source: SourceSpec) -> list[SourceFile]:
    """The files of a source in name order. Raises DataError for a path that matches nothing."""
    paths = sorted({path for pattern in source.paths for path in _match(pattern)}, key=str)
    files = [_describe(path, source.format) for path in paths]
    formats = sorted({file.format for file in files})
    if len(formats) > 1:
        raise DataError(
            f"{', '.join(source.paths)} holds files of several formats ({', '.join(formats)}); "
            "choose one with its format field or a narrower glob"
        )
    return files


def check_allowed(uri: str, roots: Iterable[str]) -> None:
    """Raise DataError unless a path and all that it matches, links followed, lie under one of the roots."""
    allowed = [_stdlib_root()] if uri.startswith(STDLIB) else [local_path(root).resolve() for root in roots]
    # Before anything is listed: what lies outside is not even counted for a stranger.
    for place in itertools.chain([_fixed_part(_local(uri))], _match_lazily(uri)):
        if not any(place.resolve().is_relative_to(root) for root in allowed):
            raise DataError(
                f"{uri} lies outside the allowed storage roots ({', '.join(map(str, allowed))}); move the data under "
                "one of them, or have the operator add its folder to TRAINSHED_STORAGE_ROOTS"
            )


def check_folder(uri: str, roots: Iterable[str]) -> None:
    """Raise DataError unless a URI names a folder, no glob, that lies with all its files under one of the roots."""
    path = _local(uri)
    if uri.startswith(STDLIB) or _fixed_part(path) != path:
        raise DataError(f"{uri} is no plain folder; give the file:// URI of one folder, without wildcards")
    check_allowed(uri, roots)


def _match_lazily(uri: str) -> Iterator[Path]:
    yield from _match(uri)


def check_columns(file: SourceFile, data: DataSpec) -> None:
    """Raise DataError where a file lacks a column that the spec names, going by its schema or its first rows."""
    present = _columns_of(file)
    for name in data.columns.names:
        if name not in present:
            raise DataError(f"{file.path} has no column {name!r}; it has {', '.join(present)}; correct data.columns")


def is_empty(file: SourceFile) -> bool:
    """Whether a file holds no rows at all. Raises DataError for a file that is not what its name says."""
    return not file.size or (file.format == "parquet" and parquet_rows(file.path) == 0)


def parquet_rows(path: str) -> int:
    """Rows of a Parquet file, from its footer. Raises DataError."""
    try:
        return int(pq.read_metadata(path).num_rows)
    except pa.ArrowException as error:
        raise DataError(f"{path} is no readable Parquet file: {error}; write it again or leave it out") from error


def parquet_values(path: str, column: str) -> int:
    """Values in all lists of a Parquet file's column, from its footer; an empty list counts for one."""
    metadata = pq.read_metadata(path)
    groups = (metadata.row_group(number) for number in range(metadata.num_row_groups))
    chunks = (group.column(place) for group in groups for place in range(group.num_columns))
    return sum(chunk.num_values for chunk in chunks if f"{chunk.path_in_schema}.".startswith(f"{column}."))


def _match(pattern: str) -> list[Path]:
    path = _local(pattern)
    fixed = _fixed_part(path)
    if fixed != path:
        found = [p for p in fixed.glob(str(path.relative_to(fixed))) if p.is_file()]
    elif path.is_dir():
        found = [p for p in path.rglob("*") if p.is_file() and not p.name.startswith((".", "_"))]
    else:
        found = [path] if path.is_file() else []
    if pattern.startswith(STDLIB):
        # Installed packages lie in the same folder, and are no part of the standard library.
        found = [p for p in found if p.suffix == ".py" and "site-packages" not in p.parts]
    if not found:
        raise DataError(f"{pattern} matches no file; check the path, which must be visible from service and workers")
    return found


def _local(uri: str) -> Path:
    if ".." in Path(uri).parts:
        raise DataError(f"{uri} goes up by '..'; write the path that it comes to")
    if uri.startswith(STDLIB):
        return _stdlib_root() / uri.removeprefix(STDLIB)
    if "://" not in uri and not os.path.isabs(uri):
        raise DataError(
            f"{uri} is a relative path, and service and workers have different folders; use an absolute one"
        )
    try:
        return local_path(uri)
    except ValueError as error:
        raise DataError(str(error)) from error


def _stdlib_root() -> Path:
    return Path(sysconfig.get_path("stdlib")).resolve()


def _fixed_part(path: Path) -> Path:
    """The part of a glob before its first wildcard."""
    fixed = Path(path.anchor)
    for part in path.parts[1:]:
        if any(wildcard in part for wildcard in "*?["):
            break
        fixed /= part
    return fixed


def _describe(path: Path, wanted: str) -> SourceFile:
    kind = _ENDINGS.get(path.suffix.lower()) if wanted == "auto" else wanted
    if kind is None:
        raise DataError(
            f"{path} has none of the endings that say what it is ({', '.join(_ENDINGS)}); set its format field, or "
            "leave it out of the glob"
        )
    stat = path.stat()
    return SourceFile(str(path), kind, stat.st_size, stat.st_mtime_ns)  # type: ignore[arg-type]


def _columns_of(file: SourceFile) -> list[str]:
    if file.format == "text":
        return ["text"]
    try:
        if file.format == "parquet":
            return list(pq.read_schema(file.path).names)
        return _jsonl_columns(file.path)
    except (pa.ArrowException, ValueError, OSError) as error:
        raise DataError(f"{file.path} is no readable {file.format} file: {error}; write it again") from error


def _jsonl_columns(path: str) -> list[str]:
    with open(path, "rb") as lines:
        first = next((line for line in lines if line.strip()), b"{}")
    row = json.loads(first)
    if not isinstance(row, dict):
        raise ValueError("its first line is not a JSON object")
    return list(row)
