"""Paths and globs of a spec → files in name order, within the storage roots that the operator allows."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from train_loop.data.files import File, file_system, is_gone, is_local
from train_loop.errors import DataError
from train_loop.run_dir import ReadPolicy, local_path
from train_loop.spec import JobSpec, SourceSpec
from train_loop.system.input_files import stdlib_root

STDLIB = "stdlib://"
"""Scheme of Python's own source files: real text that every machine has."""
_PACKAGES = ("site-packages", "dist-packages")

Format = Literal["parquet", "jsonl", "text"]
_ENDINGS: dict[str, Format] = {
    **dict.fromkeys((".parquet", ".pq"), "parquet"),
    **dict.fromkeys((".jsonl", ".ndjson"), "jsonl"),
    **dict.fromkeys((".txt", ".text", ".md", ".rst", ".py"), "text"),
}
_CODECS = {".gz": "gzip", ".zst": "zstd"}


@dataclass(frozen=True)
class SourceFile(File):
    """A listed file of training data, with its format."""

    format: Format
    codec: str | None
    """Compression of the whole file; None without compression."""


def list_files(source: SourceSpec) -> list[SourceFile]:
    """Return the files of a source in name order. Raises DataError for a path that matches nothing."""
    found = {file.uri: file for pattern in source.paths for file in _match(pattern)}
    files = [_describe(found[uri], source.format) for uri in sorted(found)]
    formats = sorted({file.format for file in files})
    if len(formats) > 1:
        raise DataError(
            f"{', '.join(source.paths)} holds files of several formats ({', '.join(formats)}); "
            "choose one with its format field or a narrower glob"
        )
    return files


def is_missing(uri: str) -> bool:
    """Return whether a local path is missing; for a glob, the folder before its first wildcard. Raises DataError."""
    return not uri.startswith(STDLIB) and is_local(_absolute(uri)) and is_gone(Path(_fixed_part(_absolute(uri))))


def check_allowed(uri: str, policy: ReadPolicy) -> None:
    """Check a path and all files that it matches, links resolved. Raises DataError if the project may not read one."""
    path = _absolute(uri)
    own = str(stdlib_root()) if uri.startswith(STDLIB) else None

    def check(place: str) -> None:
        if is_local(place):
            # os.path.realpath would accept circular links.
            place = str(Path(place).resolve())
        if own is None:
            if refusal := policy.refusal(place, named=uri):
                raise DataError(refusal)
        elif not Path(place).is_relative_to(own):
            raise DataError(f"{uri} lies outside Python's standard library; name files in it")

    # Check before the listing: it must not reveal even the number of files outside.
    check(_fixed_part(path))
    for file in _match(uri):
        check(file.uri)


def check_folder(uri: str, policy: ReadPolicy) -> None:
    """Check a URI that must name a folder, without wildcards. Raises DataError as `check_allowed`."""
    path = _absolute(uri)
    if uri.startswith(STDLIB) or _fixed_part(path) != path:
        raise DataError(f"{uri} is not a plain folder; give the file:// URI of one folder, without wildcards")
    try:
        local_path(uri)
    except ValueError as error:
        raise DataError(str(error)) from error
    check_allowed(uri, policy)


def check_sources(spec: JobSpec, policy: ReadPolicy | None) -> None:
    """Check all paths of a spec's training data; None allows everything. Raises DataError as `check_allowed`."""
    for uri in (uri for source in spec.data.sources for uri in source.paths):
        if policy is not None:
            check_allowed(uri, policy)


def _match(pattern: str) -> list[File]:
    path = _absolute(pattern)
    try:
        found = _find(path) if pattern != STDLIB else [file for part in _stdlib_parts() for file in _find(part)]
    except DataError:
        raise
    except ValueError as error:
        raise DataError(f"invalid pattern {pattern}: {error}") from error
    if pattern.startswith(STDLIB):
        # Installed packages lie in the same folder but do not belong to the standard library.
        packages = tuple(f"/{name}/" for name in _PACKAGES)
        found = [file for file in found if file.name.endswith(".py") and not any(p in file.uri for p in packages)]
    if not found:
        raise DataError(f"{pattern} matches no file; check the path, which must be visible from service and workers")
    return found


def _find(path: str) -> list[File]:
    system = file_system(path)
    below = system.find(path)
    if [file.uri for file in below] == [path]:
        # A file, even if its name looks like a pattern.
        return below
    if below:
        # In a folder, hidden files and names with a leading _ are not data: _SUCCESS, _temporary …
        return [file for file in below if not _hides(file.uri.removeprefix(path), (".", "_"))]
    fixed = _fixed_part(path)
    found = system.glob(path) if fixed != path else []
    return [file for file in found if "/." in path or not _hides(file.uri.removeprefix(fixed), (".",))]


def _hides(below: str, marks: tuple[str, ...]) -> bool:
    return any(step.startswith(marks) for step in below.split("/"))


def _absolute(uri: str) -> str:
    """Return a remote URI without its trailing slash, or a local path as an absolute path. Raises DataError."""
    if ".." in Path(uri).parts:
        raise DataError(f"{uri} contains '..'; write the resolved path")
    if "::" in uri:
        raise DataError(f"{uri} chains file systems with '::', which is not allowed; give the URI of the data itself")
    if uri.startswith(STDLIB):
        return str(stdlib_root() / uri.removeprefix(STDLIB))
    if "://" not in uri and not os.path.isabs(uri):
        raise DataError(
            f"{uri} is a relative path, but service and workers have different folders; use an absolute path"
        )
    try:
        return str(local_path(uri)) if is_local(uri) else uri.rstrip("/")
    except ValueError as error:
        raise DataError(str(error)) from error


def _stdlib_parts() -> list[str]:
    """Return the entries of the standard library's folder, without hidden entries and installed packages."""
    parts = (str(part) for part in stdlib_root().iterdir() if part.name not in _PACKAGES)
    return [part for part in parts if not _hides(Path(part).name, (".", "_"))]


def _fixed_part(path: str) -> str:
    """Return the part of a glob before its first wildcard."""
    steps = path.split("/")
    wild = next((place for place, step in enumerate(steps) if any(w in step for w in "*?[")), len(steps))
    return "/".join(steps[:wild]) or "/"


def _describe(file: File, wanted: str) -> SourceFile:
    stem, ending = os.path.splitext(file.name.lower())
    codec = _CODECS.get(ending)
    kind: Any = _ENDINGS.get(os.path.splitext(stem)[1] if codec else ending) if wanted == "auto" else wanted
    if kind is None:
        raise DataError(
            f"{file.uri} has an unknown ending; expected one of {', '.join(_ENDINGS)}, optionally followed by "
            f"{', '.join(_CODECS)}; set its format field, or select other files by a glob, such as /data/*.jsonl"
        )
    if codec and kind == "parquet":
        raise DataError(f"{file.uri} is Parquet inside {codec}; decompress it, as Parquet has its own compression")
    return SourceFile(file.uri, file.size, file.version, kind, codec)
