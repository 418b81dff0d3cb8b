"""Readers of run directories open regular files below them, and nothing that a link, a FIFO or a folder replaces.

`READERS` lists each reader with the functions that open its file. A function that opens files and is in no list fails
`test_function_that_opens_files_is_listed`.
"""

import ast
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.builders.run_dirs import parent_of, sample
from tests.support.run_dir_readers import MANIFEST, READERS
from train_loop.run_dir import IrregularFileError, RunDir

ROOT = Path(__file__).parents[4]


def replace(place: Path, run_dir: RunDir, kind: str) -> Path:
    """Replace a file of a run directory and return the path that an error names."""
    outside = run_dir.root.parent / "outside"
    if kind == "link in the path":
        place = run_dir.root / place.relative_to(run_dir.root).parts[0]
        kind = "symbolic link"
    if kind == "symbolic link":
        place.rename(outside)
        place.symlink_to(outside)
        return place
    place.unlink()
    if kind == "FIFO":
        os.mkfifo(place)
    else:
        place.mkdir()
    return place


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sample(tmp_path_factory.mktemp("readers") / "run").root


@pytest.mark.parametrize("name", READERS)
def test_reader_refuses_all_but_regular_files_by_name(tmp_path: Path, original: Path, name: str) -> None:
    reader = READERS[name]
    for number, kind in enumerate(reader.kinds):
        run_dir = RunDir(tmp_path / str(number) / "run")
        shutil.copytree(original, run_dir.root)
        parent = parent_of(run_dir)
        run_dir.write_parent(parent)
        found = replace(reader.path(run_dir), run_dir, kind)
        expected = kind if kind in ("FIFO", "folder") else "symbolic link"
        try:
            answer = str(reader.call(run_dir))
        except IrregularFileError as error:
            answer = str(error)
        assert f"{found} is a {expected}; only regular files and folders of a run directory are used" in answer


OPENERS = {
    *(
        "open",
        "open_file",
        "opener",
        "_opener",
        "open_regular",
        "append_regular",
        "open_checkpoint_file",
        "fdopen",
        "ZipFile",
    ),
    *("read_bytes", "read_text", "read_whole", "ParquetFile", "read_table", "mmap", "memmap", "fromfile", "safe_open"),
    *("size_of", "size_of_regular", "list_folder", "list_regular", "listdir", "scandir", "iterdir", "glob", "rglob"),
    *("copyfile", "copytree", "FileIO", "ZipFile"),
}
"""Names of functions that open or list files."""
SAFE = {"open_checkpoint_file", "opener", "_opener"}
"""Functions that know the run directory."""
OTHERS = {
    # Files of the host, of the service and of the user.
    "train_loop/system": "the host's files",
    "train_loop/liveness/heartbeat.py": "memory and the host's files",
    "train_loop/liveness/planned_end.py": "/proc",
    "train_loop/doctor": "probe files",
    "train_loop/conformance": "its own temporary folder",
    "train_loop/preflight": "inputs",
    "train_loop/prepare": "an argument of the command",
    "train_loop/run.py:main": "an argument of the command",
    "train_loop/weights": "inputs, in a process with few rights",
    "train_loop/code/package.py": "packages",
    "train_loop/code/cleanup.py": "packages",
    "train_loop/code/load.py": "packages",
    "train_loop/model": "inputs",
    "train_loop/parallel": "no files",
    "train_loop/spec": "text that callers have read",
    "train_loop/data/files.py": "inputs",
    "train_loop/data/patterns.py": "inputs",
    "train_loop/data/own_columns.py": "inputs",
    "train_loop/data/own_files.py": "inputs and the cache",
    "train_loop/data/shards.py": "the cache",
    "train_loop/data/read_results.py:_batches": "a file that is open",
    "train_loop/data/stream": "inputs",
    "train_loop/data/text": "inputs",
    **{
        f"train_loop/data/prepare/{name}.py": "inputs and the cache"
        for name in ("build_lock", "cache", "largest_read", "rows", "sources")
    },
    "service/adapters/key_files.py": "the service's home",
    "service/adapters/secret_box.py": "the service's home",
    "service/adapters/ray/head.py": "the service's home",
    "service/adapters/sql": "the database",
    "service/adapters/storage/probe.py": "probe files of storage roots",
    "service/adapters/storage/roots.py": "storage roots",
    "service/adapters/storage/run_dirs.py:_begin": "markers of storage roots",
    "service/api/routes/docs.py": "its own assets",
    "service/app.py": "markers of storage roots",
    "service/backup.py": "the service's home",
    "service/config": "the service's home and the host's files",
    # Parts of run directories.
    "train_loop/run_dir/files/regular.py": "the functions that open regular files",
    "train_loop/run_dir/remote.py": "the functions that choose between files and objects",
    "train_loop/run_dir/files/durable.py": "writes",
    "train_loop/run_dir/markers.py:_create_file": "writes",
    "train_loop/run_dir/node_report.py": "folders that nodes reach",
    "train_loop/run_dir/segments.py": "objects",
    "train_loop/checkpoint/store/objects.py": "objects",
    "train_loop/checkpoint/files/staging.py": "memory",
    "train_loop/checkpoint/files/writer.py": "writes",
    "train_loop/checkpoint/export/safetensors.py": "writes",
    "train_loop/checkpoint/export/huggingface.py:_workplace": "folders that it removes",
    "train_loop/checkpoint/export/text_files.py:_of_processors": "inputs, by read_input",
    "train_loop/checkpoint/export/text_files.py:name_class": "the file that it wrote",
    "train_loop/loop/infer/of_job.py:stop_tokens_of_job": "its own temporary folder",
    "train_loop/sinks/tensorboard.py": "the file that it writes",
}
"""Modules, folders and functions that open other files, and which."""
LOGGED = {
    "train_loop/checkpoint/store/folder.py:_folders": "checkpoints, as checkpoint_folders",
    "train_loop/ray_train/callbacks.py:_stacks": "stacks, whose errors are logged",
    "train_loop/faults/watchdog.py:_close": "stacks, whose errors are logged",
    "train_loop/run.py:_claim": "the marker, as exists",
    f"{MANIFEST}:metadata_file": "the manifest on object storage",
    "train_loop/telemetry/logs.py:open_log": "the log",
}
"""Functions that open files of run directories as another reader does."""


def name_of(node: ast.expr) -> str:
    return str(getattr(node, "id", None) or getattr(node, "attr", None))


def opened(file: Path) -> Iterator[tuple[str, bool]]:
    """Yield each function of a module that opens files, and whether the call names the run directory."""
    module = str(file.relative_to(ROOT))

    def visit(node: ast.AST, function: str) -> Iterator[tuple[str, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Call):
                name = name_of(child.func)
                name = name_of(child.args[0]) if name == "partial" else name
                if name in OPENERS:
                    yield f"{module}:{function}", name in SAFE or any(one.arg == "below" for one in child.keywords)
            inner = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            yield from visit(child, child.name if inner else function)  # type: ignore[attr-defined]

    return visit(ast.parse(file.read_text()), "")


def is_other(function: str) -> bool:
    return any(function == place or function.startswith((f"{place}/", f"{place}:")) for place in OTHERS)


def test_function_that_opens_files_is_listed() -> None:
    found = [
        one for folder in ("train_loop", "service") for file in (ROOT / folder).rglob("*.py") for one in opened(file)
    ]
    readers = {function for reader in READERS.values() for function in reader.opens} | LOGGED.keys()
    assert {function for function, _ in found if not is_other(function)} == readers
    safe = {function for function, names_run_dir in found if names_run_dir}
    assert readers <= safe
