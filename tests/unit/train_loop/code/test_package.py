"""Packages of users' code: limits, digests, copies and unpacking."""

import hashlib
import io
import os
import stat
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from train_loop.code import package as module
from train_loop.code.keep import check_code_allowed, keep_package
from train_loop.code.package import Package, read_package, unpack
from train_loop.errors import DataError, ModelError, UserError
from train_loop.run_dir import ReadPolicy, RunDir
from train_loop.spec import CodeSpec
from train_loop.system.input_files import limit_inputs

FILES = {"mymodel/__init__.py": b"def build(config): ...\n", "mymodel/layers/attention.py": b"x = 1\n"}


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def zipped(path: Path, files: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def code(package: Path | str, **more: str) -> CodeSpec:
    entries = {"model": "mymodel:build", "loss": "mymodel:loss", "batch": "mymodel:collate"}
    return CodeSpec(package=str(package), **(entries | more))  # type: ignore[arg-type]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary folder for unpacked packages."""
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    return place


def test_digest_is_that_of_sha256sum_in_every_form(tmp_path: Path) -> None:
    write(tmp_path, FILES)
    lines = "".join(f"{hashlib.sha256(FILES[name]).hexdigest()}  {name}\n" for name in sorted(FILES))
    digest = hashlib.sha256(lines.encode()).hexdigest()
    forms = [tmp_path / "mymodel", zipped(tmp_path / "a.whl", FILES), zipped(tmp_path / "b.zip", FILES)]
    assert {read_package(one.as_uri()).sha256 for one in forms} == {digest}
    package = read_package(str(forms[0]))
    assert module.read_zipped(package.zipped(), "copy").sha256 == digest


def test_hidden_files_and_bytecode_are_no_part(tmp_path: Path) -> None:
    folder = write(tmp_path / "mymodel", {"__init__.py": b""})
    before = read_package(str(folder)).sha256
    write(folder, {".git/config": b"", "__pycache__/a.cpython-311.pyc": b"", ".env": b"SECRET", "a.pyc": b""})
    assert read_package(str(folder)).sha256 == before
    names = {f"mymodel/{name}": b"" for name in ("__init__.py", ".env", "__pycache__/a.pyc")}
    assert read_package(str(zipped(tmp_path / "a.zip", names))).files == {"mymodel/__init__.py": b""}


def test_folder_without_init_holds_its_modules(tmp_path: Path) -> None:
    assert [*read_package(str(write(tmp_path / "my-code", {"mymodel.py": b""}))).files] == ["mymodel.py"]


def _many(folder: Path) -> Path:
    return write(folder, {f"f{number}.py": b"" for number in range(module.MOST_FILES + 1)})


def _deep(folder: Path) -> Path:
    return write(folder, {"/".join(["d"] * 20) + "/x.py": b""})


def _linked(folder: Path, target: str) -> Path:
    write(folder, {"x.py": b""})
    (folder / "link.py").symlink_to(target)
    return folder


def _fifo(folder: Path) -> Path:
    write(folder, {"x.py": b""})
    os.mkfifo(folder / "pipe.py")
    return folder


def _large(folder: Path) -> Path:
    write(folder, {"x.py": b""})
    with (folder / "weights.bin").open("wb") as file:
        file.truncate(module.MOST_BYTES + 1)
    return folder


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda folder: folder, "not found"),
        (lambda folder: write(folder, {"readme.md": b""}), "no Python file"),
        (_many, "more than 2000 files"),
        (_deep, "more than 16 levels"),
        (_large, "at most 2000 files and 64 MiB"),
        (lambda folder: _linked(folder, "/etc/passwd"), "holds the link link.py"),
        (lambda folder: _linked(folder, "."), "holds the link link.py"),
        (_fifo, "is a FIFO"),
        (lambda folder: write(folder, {"a\x1b[2J.py": b""}), "control characters"),
        (lambda folder: write(folder.parent / "my-model", {"__init__.py": b""}), "cannot be the name of a package"),
        (lambda folder: write(folder, {"x.txt": b""}) / "x.txt", "neither a folder nor"),
    ],
)
def test_folders_beyond_a_limit_are_refused(tmp_path: Path, make: Callable[[Path], Path], problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        read_package(str(make(tmp_path / "code")))


def test_link_to_a_file_of_the_folder_is_read(tmp_path: Path) -> None:
    package = read_package(str(_linked(tmp_path / "code", "x.py")))
    assert package.files == {"link.py": b"", "x.py": b""}


@pytest.mark.parametrize(
    "name", ["../x.py", "/etc/x.py", "a/../../x.py", "a\\..\\x.py", "C:x.py", "a//x.py", "./x.py", "x" * 300, "\x1b.py"]
)
def test_archives_with_paths_that_could_leave_the_folder_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelError, match="expected a relative path"):
        read_package(str(zipped(tmp_path / "a.zip", {name: b"", "ok.py": b""})))


def _bomb(path: Path) -> None:
    zipped(path, {"x.py": bytes(module.MOST_BYTES + 1)})


def _lying(path: Path) -> None:
    """Write an archive whose headers state one byte for a large file."""
    _bomb(path)
    data = path.read_bytes()
    path.write_bytes(data.replace((module.MOST_BYTES + 1).to_bytes(4, "little"), (1).to_bytes(4, "little")))


def _with_link(path: Path) -> None:
    link = zipfile.ZipInfo("link.py")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(link, "/etc/passwd")


def _truncated(path: Path) -> None:
    zipped(path, FILES)
    path.write_bytes(path.read_bytes()[:-30])


def _corrupt(path: Path) -> None:
    zipped(path, {"x.py": os.urandom(1000)})
    data = bytearray(path.read_bytes())
    data[200:260] = bytes(60)
    path.write_bytes(data)


def _crowded(path: Path) -> None:
    zipped(path, {f"f{number}.py": b"" for number in range(module.MOST_FILES + 1)})


def _conflicting(path: Path) -> None:
    zipped(path, {"a.py": b"", "a.py/b.py": b""})


def _alike(path: Path) -> None:
    zipped(path, {"mod/m.py": b"", "mod/M.py": b""})


def _alike_in_unicode(path: Path) -> None:
    zipped(path, {"\u00e9.py": b"", "e\u0301.py": b""})


def _with_nul(path: Path) -> None:
    zipped(path, {"m.py_x.py": b""})
    path.write_bytes(path.read_bytes().replace(b"m.py_x.py", b"m.py\0x.py"))


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (_alike, "holds mod/m.py and mod/M.py, one file on some file systems; rename one"),
        (_alike_in_unicode, "one file on some file systems; rename one"),
        (_with_nul, r"holds the name 'm.py\\x00x.py', which has a NUL; pack it again"),
        (_bomb, "at most 2000 files and 64 MiB"),
        (_lying, "more than 1 MiB|not a complete"),
        (_with_link, "holds the link"),
        (_truncated, "not a complete"),
        (_corrupt, "not a complete|cannot be unpacked"),
        (_crowded, "holds 2001 files"),
        (_conflicting, "below a file of the same name"),
        (lambda path: path.write_bytes(b"PK"), "not a complete"),
    ],
)
def test_hostile_archives_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], object], problem: str
) -> None:
    monkeypatch.setattr(module, "MOST_BYTES", 2**20)
    make(tmp_path / "a.whl")
    with pytest.raises(ModelError, match=problem):
        read_package(str(tmp_path / "a.whl"))


def test_package_outside_the_roots_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "elsewhere" / "mymodel", {"__init__.py": b""})
    with limit_inputs(ReadPolicy(project="nlp", roots=(str(tmp_path / "root"),))), pytest.raises(DataError):
        read_package(str(folder))


def test_unpacked_files_are_private_read_only_and_repaired(tmp_path: Path, home: Path) -> None:
    package = Package("x", FILES)
    folder = unpack(package)
    assert folder.parent.stat().st_mode & 0o777 == 0o700
    assert (folder / "mymodel/__init__.py").stat().st_mode & 0o222 == 0
    assert unpack(package) == folder
    (folder / "mymodel/__init__.py").unlink()
    (folder / "mymodel/__init__.py").write_bytes(b"import os")
    (folder / "mymodel/extra.py").write_bytes(b"")
    assert {p.read_bytes() for p in unpack(package).rglob("*.py")} == set(FILES.values())


def test_folder_of_another_user_is_not_used(home: Path) -> None:
    (home / f"trainshed-code-{os.getuid()}").mkdir(mode=0o777)
    (home / f"trainshed-code-{os.getuid()}").chmod(0o777)
    with pytest.raises(PermissionError, match="not a folder of this user alone"):
        unpack(Package("x", FILES))


def test_run_keeps_the_code_it_began_with(tmp_path: Path) -> None:
    folder, run_dir = write(tmp_path / "mymodel", {"__init__.py": b"a = 1"}), RunDir.at(str(tmp_path / "run"))
    spec = code(folder, sha256=read_package(str(folder)).sha256)
    first = keep_package(spec, run_dir)
    assert (first.package.sha256, first.warning) == (spec.sha256, None)
    write(folder, {"__init__.py": b"a = 2"})
    resumed = keep_package(spec, run_dir)
    assert resumed.package.files == {"mymodel/__init__.py": b"a = 1"}
    assert resumed.warning is not None
    assert str(spec.sha256) in resumed.warning
    assert read_package(str(folder)).sha256 in resumed.warning
    folder.rename(tmp_path / "gone")
    assert keep_package(spec, run_dir).warning is None


def test_package_that_changed_before_the_start_is_refused_with_both_digests(tmp_path: Path) -> None:
    folder, run_dir = write(tmp_path / "mymodel", {"__init__.py": b"a = 1"}), RunDir.at(str(tmp_path / "run"))
    spec = code(folder, sha256=read_package(str(folder)).sha256)
    write(folder, {"__init__.py": b"a = 2"})
    with pytest.raises(ModelError, match="changed since the submission") as caught:
        keep_package(spec, run_dir)
    assert str(spec.sha256) in str(caught.value)
    assert read_package(str(folder)).sha256 in str(caught.value)
    assert not run_dir.code.exists()


def test_damaged_or_replaced_copy_is_refused(tmp_path: Path) -> None:
    folder, run_dir = write(tmp_path / "mymodel", {"__init__.py": b"a = 1"}), RunDir.at(str(tmp_path / "run"))
    spec = code(folder, sha256=read_package(str(folder)).sha256)
    keep_package(spec, run_dir)
    run_dir.code.write_bytes(Package("x", FILES).zipped())
    with pytest.raises(ModelError, match="copy is damaged"):
        keep_package(spec, run_dir)
    run_dir.code.write_bytes(io.BytesIO(b"PK").getvalue())
    with pytest.raises(ModelError, match="not a complete"):
        keep_package(spec, run_dir)


def test_project_without_permission_runs_no_code() -> None:
    check_code_allowed()
    with limit_inputs(ReadPolicy(project="nlp", roots=())), pytest.raises(ModelError, match="TRAINSHED_ALLOW_CODE"):
        check_code_allowed()
    with limit_inputs(ReadPolicy(project="nlp", roots=(), code=True)):
        check_code_allowed()
