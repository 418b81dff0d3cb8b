"""Files of a data source, on local disks and on S3."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec import AbstractFileSystem

from tests.support.builders.specs import may_read
from tests.support.servers.s3 import S3Server, s3_server
from train_loop.data import patterns
from train_loop.data.prepare import sources
from train_loop.data.prepare.rows import cut, read_piece
from train_loop.data.prepare.sources import check_allowed, list_files
from train_loop.errors import DataError
from train_loop.spec import ColumnsSpec, SourceSpec
from train_loop.system import input_files


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with s3_server() as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment().items():
            patch.setenv(name, value)
        server.bucket("corpus")
        for key in ("", "a.txt", "deep/b b.txt", "deep/ü%20#?.txt", "_temporary/0/c.txt", "deep/.hidden", "d[1].txt"):
            server.put(f"corpus/text/{key}", key.encode())
        yield server


def names(*paths: str) -> list[str]:
    """Return the files of a source, each as its text."""
    files = list_files(SourceSpec(path=paths, format="text"))
    chunks = (chunk for piece in cut(files, 100) for chunk in read_piece(piece, ColumnsSpec(text="text")))
    return [str(row.values["text"]) for chunk in chunks for row in chunk.rows]


FOLDER = ["a.txt", "d[1].txt", "deep/b b.txt", "deep/ü%20#?.txt"]


@pytest.mark.parametrize(
    ("below", "found"),
    [
        ("", FOLDER),
        ("/", FOLDER),
        ("/*.txt", ["a.txt", "d[1].txt"]),
        ("/d[1].txt", ["d[1].txt"]),
        ("/a.txt", ["a.txt"]),
    ],
)
def test_folder_glob_and_file_match_alike_on_disk_and_s3(
    s3: S3Server, tmp_path: Path, below: str, found: list[str]
) -> None:
    for name in (*FOLDER, "_temporary/0/c.txt", "deep/.hidden"):
        (tmp_path / "text" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "text" / name).write_text(name)
    assert names(f"{tmp_path}/text{below}") == found
    assert names(f"s3://corpus/text{below}") == found


def test_files_are_listed_once_and_sorted(s3: S3Server) -> None:
    assert names("s3://corpus/text/d*", "s3://corpus/text/a.txt", "s3://corpus/text/*.txt") == ["a.txt", "d[1].txt"]


def test_overwritten_object_has_another_version(s3: S3Server) -> None:
    versions = []
    for content in (b"one", b"two"):
        s3.put("corpus/changing/a.txt", content)
        (file,) = list_files(SourceSpec(path="s3://corpus/changing/"))
        versions.append(file.version)
    assert versions[0] != versions[1]


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("s3://corpus/none/", "matches no file"),
        ("s3://nobodys-bucket/x", "matches no file"),
        ("s3://corpus/../other", r"contains '\.\.'"),
        ("simplecache::s3://corpus/text", "chains file systems with '::'"),
        ("s3://corpus/%2E%2e/other", r"contains '\.\.'"),
        ("s3://corpus/%252e%252e/other", r"contains '\.\.'"),
        ("s3://corpus/a\\..\\other", r"contains '\.\.'"),
        ("s3://corpus/.\t./other", r"contains U\+0009; write the path without it"),
        ("s3://cor pus/text", "s3://cor pus/text cannot be read: Parameter validation failed"),
        ("s3://corp*/text", "has a wildcard in the name of its bucket"),
        ("nosuch://corpus/text", "nosuch:// storage cannot be read"),
        ("/data/**.jsonl", r"invalid pattern \*\*.jsonl: \*\* is only allowed as a whole step"),
    ],
)
def test_source_without_files_is_rejected_with_the_reason(s3: S3Server, uri: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        list_files(SourceSpec(path=uri))


def test_missing_credentials_are_reported_at_once(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    fsspec.filesystem("s3").clear_instance_cache()
    with pytest.raises(DataError, match=r"s3://corpus/text cannot be read: .*; check the credentials"):
        list_files(SourceSpec(path="s3://corpus/text"))
    fsspec.filesystem("s3").clear_instance_cache()


@pytest.mark.parametrize("uri", ["s3://corpus-evil/x", "s3://corpus/textile", "/data", "gs://corpus/text"])
def test_sibling_of_a_root_is_outside(uri: str) -> None:
    policy = may_read("s3://corpus/text", "sftp://user:secret@host/data", "file:///elsewhere")
    with pytest.raises(DataError, match=r"lies outside the allowed storage roots \(") as refused:
        check_allowed(uri, policy)
    assert "secret" not in str(refused.value)
    check_allowed("s3://corpus/text/a.txt", policy)


@pytest.mark.parametrize("below", ["", "/*.txt", "/**/*.txt"])
def test_unusable_links_are_reported(tmp_path: Path, below: str) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.txt").write_text("x")
    link = tmp_path / "data" / "b.txt"
    link.symlink_to(tmp_path / "other.txt")
    with pytest.raises(DataError, match=r"b.txt is a broken link"):
        names(f"{tmp_path}/data{below}")
    (tmp_path / "other.txt").write_text("y")
    assert names(f"{tmp_path}/data{below}") == ["x", "y"]
    link.unlink()
    link.symlink_to(tmp_path, target_is_directory=True)
    if below != "/*.txt":
        with pytest.raises(DataError, match=r"b.txt is a link to a folder, which is not followed"):
            names(f"{tmp_path}/data{below}")


@pytest.mark.parametrize("below", ["", "/**/*.txt"])
def test_folder_that_cannot_be_listed_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, below: str) -> None:
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "closed").mkdir()
    scandir = os.scandir

    def refusing(path: Any) -> Any:
        # Root may list every folder.
        if str(path).endswith("closed"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    with pytest.raises(DataError, match=r"/closed cannot be listed: Permission denied; give service and workers read"):
        names(f"{tmp_path}{below}")


def test_file_uri_accepts_wildcards_and_any_character(tmp_path: Path) -> None:
    for name in ("a#1.txt", "a#2.txt", "b.txt", "b c%.txt"):
        (tmp_path / name).write_text(name)
    assert names(f"file://{tmp_path}/a#?.txt") == ["a#1.txt", "a#2.txt"]
    assert names(f"file://localhost{tmp_path}/b%20c%25.txt") == ["b c%.txt"]
    with pytest.raises(DataError, match=r"file://data/b.txt names a host or a relative path; write file:///"):
        names("file://data/b.txt")


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a standard library with the links of Debian, Homebrew and Nix, and with links that lead nowhere."""
    root = tmp_path / "lib"
    for name in ("a.py", "json/b.py", "json/_c.py", "notes.txt", "site-packages/d.py", ".hidden/e.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "out.py").write_text("outside")
    targets = {"inside.py": "a.py", "out.py": "../etc/out.py", "json/out.py": "../../etc/out.py", "etc": "../etc"}
    for name, target in (
        targets | {"broken.py": "none", "circular.py": "circular.py", "dist-packages": "none"}
    ).items():
        (root / name).symlink_to(target)
    for module in (sources, patterns, input_files):
        monkeypatch.setattr(module, "stdlib_root", lambda: root)
    return root


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("", ["a.py", "inside.py", "json/b.py"]),
        ("*.py", ["a.py", "inside.py"]),
        ("*", ["a.py", "inside.py"]),
        ("**/*.py", ["a.py", "inside.py", "json/_c.py", "json/b.py"]),
        ("*/*.py", ["json/_c.py", "json/b.py"]),
        ("json", ["json/b.py"]),
        ("json/*.py", ["json/_c.py", "json/b.py"]),
        ("json/b.py", ["json/b.py"]),
    ],
)
def test_links_that_lead_out_of_the_standard_library_are_left_out(
    library: Path, pattern: str, found: list[str]
) -> None:
    uri = f"stdlib://{pattern}"
    check_allowed(uri, may_read())
    assert [file.uri for file in list_files(SourceSpec(path=uri))] == [f"{library}/{name}" for name in found]


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("out.py", "outside Python's standard library"),
        ("json/out.py", "outside Python's standard library"),
        ("etc", "outside Python's standard library"),
        ("etc/*.py", "outside Python's standard library"),
        ("etc/out.py", "outside Python's standard library"),
        ("o*.py", "matches no file"),
        ("broken.py", "is a broken link"),
        ("site-packages/*.py", "matches no file"),
    ],
)
def test_named_file_outside_the_standard_library_is_rejected(library: Path, pattern: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        check_allowed(f"stdlib://{pattern}", may_read())


class HostedFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """Files of a host that URIs contain and listings omit, as with sftp; their version has a nonstandard key."""

    protocol = "hosted"
    cachable = False
    files: ClassVar[dict[str, bytes]] = {}

    def __init__(self, host: str, **options: Any) -> None:
        super().__init__(**options)

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path.removeprefix("hosted://user@box").rstrip("/")

    @staticmethod
    def _get_kwargs_from_urls(path: str) -> dict[str, Any]:
        return {"host": "box"} if path.startswith("hosted://user@box/") else {}

    def ls(self, path: str, detail: bool = True, **options: Any) -> list[Any]:
        found = [
            {"name": name, "size": len(content), "type": "file", "revision": content.hex()}
            for name, content in self.files.items()
            if self._strip_protocol(path) in (name, name.rpartition("/")[0])
        ]
        return found if detail else [info["name"] for info in found]

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        return self.files[path][start:end]


def test_file_system_keeps_its_host_and_reads_any_version_key() -> None:
    fsspec.register_implementation("hosted", HostedFileSystem, clobber=True)
    HostedFileSystem.files |= {f"/data/{name}": name.encode() for name in ("a.txt", "b.txt")}
    assert names("hosted://user@box/data") == names("hosted://user@box/data/*.txt") == ["a.txt", "b.txt"]
    source = SourceSpec(path="hosted://user@box/data/a.txt")
    (before,) = list_files(source)
    assert before.uri == "hosted://user@box/data/a.txt"
    HostedFileSystem.files["/data/a.txt"] = b"A.txt"
    (after,) = list_files(source)
    assert (before.size, before.version != after.version) == (after.size, True)
