"""Globs and folders: every match once, in little time, and nothing told of what a project may not read."""

import os
import random
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest

from tests.support.builders.searches import seeds
from train_loop.data import patterns
from train_loop.data.patterns import Pattern, search
from train_loop.data.prepare import sources
from train_loop.data.prepare.sources import check_allowed, list_files
from train_loop.errors import DataError
from train_loop.run_dir import ReadPolicy
from train_loop.spec import SourceSpec
from train_loop.system.input_files import limit_inputs

JOBS = ("job-01m89aapeeqbdt7xysvprv3021", "job-01m89aapeeqbdt7xysvprv3022")


def listed(path: str) -> list[str]:
    return [file.uri for file in list_files(SourceSpec(path=path, format="text"))]


def matches(names: list[str], steps: list[str]) -> bool:
    """Return whether names match steps, by definition."""
    if not steps:
        return not names
    if steps[0] == "**":
        below = len(steps) == 1 and len(names) == 1
        return below or matches(names, steps[1:]) or (bool(names) and matches(names[1:], steps))
    return bool(names) and steps[0] in (names[0], "*", f"{names[0][0]}*") and matches(names[1:], steps[1:])


def test_search_yields_every_match_once(tmp_path: Path) -> None:
    paths = [
        [*folder, name]
        for folder in ([], ["a"], ["a", "a"], ["a", "b"], ["b"], ["b", "a", "b"])
        for name in ("ax", "bx")
    ]
    for path in paths:
        tmp_path.joinpath(*path).parent.mkdir(parents=True, exist_ok=True)
        tmp_path.joinpath(*path).touch()
    chance = random.Random(0)
    for _ in range(seeds(500)):
        steps = chance.choices(["**", "*", "a", "b", "a*", "ax", "b*"], k=chance.randint(1, 5))
        expected = sorted(str(tmp_path.joinpath(*path)) for path in paths if matches(path, steps))
        pattern = Pattern.parse("/".join(steps))
        assert sorted(search(str(tmp_path), pattern)) == expected, steps
        assert [path for path in paths if pattern.matches(path)] == [path for path in paths if matches(path, steps)], (
            steps
        )


SLOW = ["**/" * 30 + "none", "**/*/" * 12 + "none", "*/" * 12 + "*", "**/" + "*a" * 60 + "*b", "*a" * 60 + "*b"]


@pytest.mark.timeout(20)
@pytest.mark.parametrize("below", SLOW)
def test_costly_pattern_ends_soon_on_disk_and_object_storage(tmp_path: Path, below: str) -> None:
    names = ["/".join(["d"] * depth + ["a" * 200]) for depth in range(12)]
    remote = fsspec.filesystem("memory")
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
        remote.pipe_file(f"/slow-globs/{name}", b"x")
    for root in (str(tmp_path), "memory://slow-globs"):
        with pytest.raises(DataError, match="matches no file"):
            listed(f"{root}/{below}")


def test_pattern_with_too_many_steps_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="it has 65 steps; expected at most 64"):
        listed(f"{tmp_path}/{'*/' * 65}")


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        here = os.open(path.parent, os.O_RDONLY)
        made.bind(f"/proc/self/fd/{here}/{path.name}")
        os.close(here)


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (os.mkfifo, "b.txt is a FIFO, and only regular files are read"),
        (make_socket, "b.txt is a socket, and only regular files are read"),
        (lambda path: path.symlink_to("/dev/zero"), "b.txt is a device, and only regular files are read"),
        (lambda path: path.symlink_to(path), "b.txt is a broken link"),
        (lambda path: path.symlink_to(path.parent / "none"), "b.txt is a broken link"),
        (lambda path: path.symlink_to(path.parent), "b.txt is a link to a folder, which is not followed"),
        (lambda path: path.symlink_to(path.parent.parent), "b.txt is a link to a folder, which is not followed"),
    ],
)
@pytest.mark.parametrize("below", ["", "/**/*.txt", "/**"])
def test_what_is_not_a_file_is_refused_without_a_wait(
    tmp_path: Path, make: Callable[[Path], Any], message: str, below: str
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.txt").touch()
    make(tmp_path / "data" / ".hidden")
    assert listed(f"{tmp_path}/data{below}") == [f"{tmp_path}/data/a.txt"]
    make(tmp_path / "data" / "b.txt")
    with pytest.raises(DataError, match=message):
        listed(f"{tmp_path}/data{below}")


def world(folder: Path, *, full: bool) -> ReadPolicy:
    """Make a storage root. Only a full world has files that project nlp may not read."""
    own = folder / "root/nlp" / JOBS[0] / "export/a.txt"
    own.parent.mkdir(parents=True)
    own.touch()
    for name in ("root/vision", "outside"):
        (folder / name).mkdir()
    (folder / "root/data").mkdir()
    for name, target in {
        "file.txt": "outside/x.txt",
        "folder": "outside/in",
        "job.txt": f"root/vision/{JOBS[1]}/a.txt",
    }.items():
        (folder / "root/data" / name).symlink_to(folder / target)
    if full:
        for name in (f"root/vision/{JOBS[1]}/export/a.txt", f"root/vision/{JOBS[1]}/a.txt", "root/_cache/f/a.txt"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).touch()
        os.mkfifo(folder / f"root/vision/{JOBS[1]}/fifo.txt")
        (folder / f"root/vision/{JOBS[1]}/link.txt").symlink_to("/etc/hostname")
        (folder / "outside/in").mkdir()
        for name in ("outside/x.txt", "outside/in/a.txt"):
            (folder / name).touch()
    root = (folder / "root").as_uri()
    return ReadPolicy(project="nlp", roots=(root,), runs=(root,), caches=(f"{root}/_cache",))


@pytest.mark.parametrize(
    "path",
    [
        "root",
        "root/**",
        "root/*/*/export/*.txt",
        "root/*/job-*/**/*.txt",
        "root/vision",
        "root/vision/job-*/a.txt",
        f"root/vision/{JOBS[1]}",
        f"root/vision/{JOBS[1]}/a.txt",
        f"root/vision/{JOBS[1]}/*.txt",
        "root/_cache",
        "root/_cache/*/a.txt",
        "root/[_]cache/f/a.txt",
        "root/data/file.txt",
        "root/data/f*.txt",
        "root/data/folder/a.txt",
        "root/data/folder/*",
        "root/data/fol*/a.txt",
        "root/data/fol*/*",
        "root/data/j*.txt",
        "root/data/job.txt",
        "root/data/**/a.txt",
        "outside/x.txt",
        "outside/*.txt",
        "*/x.txt",
    ],
)
def test_answer_does_not_depend_on_what_a_project_may_not_read(tmp_path: Path, path: str) -> None:
    answers = []
    for name, full in (("a", True), ("b", False)):
        policy = world(tmp_path / name, full=full)
        uri = f"{tmp_path}/{name}/{path}"
        try:
            check_allowed(uri, policy)
            with limit_inputs(policy):
                found = "\n".join(listed(uri))
        except DataError as error:
            found = str(error)
        answers.append(found.replace(f"{tmp_path}/{name}/", "/"))
    assert answers[0] == answers[1]
    assert JOBS[1] not in answers[0].replace(path, "")


def test_listing_of_remote_runs_leaves_out_other_projects() -> None:
    remote = fsspec.filesystem("memory")
    for project, job in zip(("nlp", "vision"), JOBS, strict=True):
        remote.pipe_file(f"/shared-runs/{project}/{job}/a.txt", b"x")
    policy = ReadPolicy(project="nlp", roots=("memory://shared-runs",), runs=("memory://shared-runs",))
    with limit_inputs(policy):
        for below in ("", "/*/job-*/a.txt", "/**/*.txt"):
            assert listed(f"memory://shared-runs{below}") == [f"memory://shared-runs/nlp/{JOBS[0]}/a.txt"]
        with pytest.raises(DataError, match="matches no file; check the path"):
            listed("memory://shared-runs/vis*/*/a.txt")


def test_links_out_of_the_standard_library_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("lib/a.py", "lib/email/b.py", "etc/sitecustomize.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    for link in ("lib/sitecustomize.py", "lib/email/c.py"):
        (tmp_path / link).symlink_to(tmp_path / "etc/sitecustomize.py")
    for module in (sources, patterns):
        monkeypatch.setattr(module, "stdlib_root", lambda: tmp_path / "lib")
    policy = ReadPolicy(project="nlp", roots=("/data",))
    both = ["a.py", "email/b.py"]
    with limit_inputs(policy):
        for uri, found in {"stdlib://": both, "stdlib://*.py": ["a.py"], "stdlib://**/*.py": both}.items():
            check_allowed(uri, policy)
            assert listed(uri) == [f"{tmp_path}/lib/{name}" for name in found]
