"""Writers of run directories follow no link below them: it could lead to files that only the service may write."""

import ast
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.builders.run_dirs import parent_of, sample
from train_loop.run_dir import (
    ExportStatus,
    ExportWish,
    Fence,
    IrregularFileError,
    Outcome,
    RootMarker,
    RunDir,
    SinkPlace,
    Stop,
    write_place,
    write_run_marker,
)
from train_loop.spec import ScalingSpec

STATUS = ExportStatus(step=1, wish=ExportWish(dtype="fp32"), state="running", time=0.0)
WRITERS: dict[str, tuple[str, Callable[[RunDir], object]]] = {
    "stop request": ("control", lambda run: run.write_stop(Stop(mode="pause", attempt=1))),
    "fence": ("control", lambda run: run.write_fence(9)),
    "entry of the fence": ("control/fence", lambda run: run.raise_fence_to(Fence(9, 1), by="service")),
    "pin": ("control/pins", lambda run: run.pin(1)),
    "removed pin": ("control/pins", lambda run: run.unpin(1)),
    "size": ("attempts", lambda run: run.attempt(1).write_size(ScalingSpec())),
    "outcome": ("attempts/1", lambda run: run.attempt(1).write_outcome(Outcome(result="failed"))),
    "status of an export": ("export", lambda run: run.exports.write(STATUS)),
    "results": ("results", lambda run: run.results.commit(0, b"rows")),
    "position of a sink": ("sinks", lambda run: write_place(run.sink_file("wandb"), SinkPlace())),
}
"""The folder that a link replaces, and the writer, by content."""

WRITING = {"write_durably", "replace_durably", "create_new"}
"""Functions that write files."""


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", WRITERS)
def test_writer_refuses_a_link_to_another_run(tmp_path: Path, name: str) -> None:
    place, write = WRITERS[name]
    ours, others = sample(tmp_path / "ours"), sample(tmp_path / "others")
    for run_dir in (ours, others):
        write(run_dir)
    folder, target = ours.root / place, others.root / place
    folder.rename(tmp_path / "moved")
    folder.symlink_to(target)
    before = contents(others.root)
    with pytest.raises(IrregularFileError, match=f"{folder} is a symbolic link"):
        write(ours)
    assert contents(others.root) == before


def test_file_that_is_a_link_is_replaced_and_not_followed(tmp_path: Path) -> None:
    run_dir, outside = RunDir(tmp_path / "run"), tmp_path / "outside"
    outside.write_text("kept")
    run_dir.root.mkdir()
    (run_dir.root / "root.json").symlink_to(outside)
    with pytest.raises(IrregularFileError):
        write_run_marker(run_dir.root, RootMarker.new())
    parent = parent_of(sample(tmp_path / "parent"))
    run_dir.parent_file.symlink_to(outside)
    run_dir.write_parent(parent)
    assert outside.read_text() == "kept"
    assert run_dir.parent() == parent


def test_every_write_to_a_run_directory_names_it() -> None:
    run_dir = Path("train_loop/run_dir")
    others = ("code/keep.py", "data/prepare/pointer.py", "faults/failure.py", "checkpoint/store/folder.py")
    found = []
    for file in (*run_dir.glob("*.py"), *(Path("train_loop", name) for name in others)):
        for call in ast.walk(ast.parse(file.read_text())):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in WRITING:
                found.append((str(file), call.lineno, "below" in [one.arg for one in call.keywords]))
    assert len(found) > 12
    assert [place for *place, names in found if not names] == []
