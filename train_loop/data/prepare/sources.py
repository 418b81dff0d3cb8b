"""Paths and globs of a spec → files in name order, within the storage roots that the operator allows."""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote

from train_loop.data.files import File, file_system, is_gone, is_local, split_glob
from train_loop.data.strict_json import LINES_OF_LIST
from train_loop.errors import DataError
from train_loop.run_dir import ReadPolicy, local_path
from train_loop.spec import JobSpec, SourceSpec, check_source
from train_loop.spec.text.printable import hidden_character
from train_loop.system.input_files import current_policy, limit_inputs, stdlib_root

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
    return not uri.startswith(STDLIB) and is_local(_absolute(uri)) and is_gone(Path(split_glob(_absolute(uri))[0]))


def check_allowed(uri: str, policy: ReadPolicy) -> None:
    """Check a path, and that it matches files that the project may read, links resolved. Raises DataError.

    The error for files that the project may not read is the same whether they exist or not.
    """
    fixed, _ = split_glob(_absolute(uri))
    # os.path.realpath would accept circular links.
    place = str(Path(fixed).resolve()) if is_local(fixed) else fixed
    if uri.startswith(STDLIB):
        if not Path(place).is_relative_to(stdlib_root()):
            raise DataError(f"{uri} lies outside Python's standard library; name files in it")
    # Check before the listing: it must not reveal even the number of files outside.
    elif refusal := policy.refusal(place, named=uri):
        raise DataError(refusal)
    with limit_inputs(policy):
        _match(uri)


def check_plain(uri: str, policy: ReadPolicy, *, kind: Literal["file", "folder"] = "folder") -> None:
    """Check a URI that must name one file or folder, without wildcards. Raises DataError as `check_allowed`."""
    path = _absolute(uri)
    if uri.startswith(STDLIB) or split_glob(path)[1]:
        raise DataError(f"{uri} is not a plain {kind}; give the file:// URI of one {kind}, without wildcards")
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
    policy = current_policy()
    if policy is not None and not is_local(path):
        # A local search has left them out.
        found = [file for file in found if not policy.hides(file.uri)]
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
    fixed, below_fixed = split_glob(path)
    found = system.glob(path) if below_fixed else []
    return [file for file in found if "/." in path or not _hides(file.uri.removeprefix(fixed), (".",))]


def _hides(below: str, marks: tuple[str, ...]) -> bool:
    return any(step.startswith(marks) for step in below.split("/"))


def _absolute(uri: str) -> str:
    """Return a remote URI without its trailing slash, or a local path as an absolute path. Raises DataError."""
    if ".." in re.split(r"[/\\]", _decoded(uri)):
        raise DataError(f"{uri} contains '..'; write the resolved path")
    if "::" in uri:
        raise DataError(f"{uri} chains file systems with '::', which is not allowed; give the URI of the data itself")
    if uri.startswith(STDLIB):
        return str(stdlib_root() / uri.removeprefix(STDLIB))
    if not is_local(uri) and (hidden := hidden_character(uri)) is not None:
        # Libraries remove some of these characters, and would read another place than the checked one.
        raise DataError(f"{uri!r} contains {hidden}; write the path without it")
    if not is_local(uri) and any(wildcard in uri.split("/")[2] for wildcard in "*?"):
        raise DataError(f"{uri} has a wildcard in the name of its bucket or host; write the whole name")
    try:
        check_source(uri)
        return str(local_path(uri)) if is_local(uri) else uri.rstrip("/")
    except ValueError as error:
        raise DataError(str(error)) from error


def _decoded(uri: str) -> str:
    """Return a URI without percent-encoding, however often it is encoded: proxies decode it, too."""
    while (decoded := unquote(uri)) != uri:
        uri = decoded
    return uri


def _stdlib_parts() -> list[str]:
    """Return the entries of the standard library's folder, without hidden entries, packages and links out of it."""
    root = stdlib_root()
    # A broken or circular link does not exist, and must not be resolved.
    parts = [part for part in root.iterdir() if part.name not in _PACKAGES and os.path.exists(part)]
    parts = [part for part in parts if part.resolve().is_relative_to(root)]
    return [str(part) for part in parts if not _hides(part.name, (".", "_"))]


def _remedy(name: str) -> str:
    """Return how to use a file of another format, by its name."""
    if name.endswith(".json"):
        return f"set format: jsonl if each line is an object, else {LINES_OF_LIST}"
    if name.endswith((".csv", ".tsv")):
        return "convert it to Parquet, as the guide of data shows, or set its format field"
    return "set its format field"


def _describe(file: File, wanted: str) -> SourceFile:
    stem, ending = os.path.splitext(file.name.lower())
    codec = _CODECS.get(ending)
    kind: Any = _ENDINGS.get(os.path.splitext(stem)[1] if codec else ending) if wanted == "auto" else wanted
    if kind is None:
        raise DataError(
            f"{file.uri} has an unknown ending; expected one of {', '.join(_ENDINGS)}, optionally followed by "
            f"{', '.join(_CODECS)}; {_remedy(stem if codec else file.name.lower())}, or select other files by a glob, "
            "such as /data/*.jsonl"
        )
    if codec and kind == "parquet":
        raise DataError(f"{file.uri} is Parquet inside {codec}; decompress it, as Parquet has its own compression")
    return SourceFile(file.uri, file.size, file.version, kind, codec)
