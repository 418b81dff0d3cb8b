"""Deeply nested text from outside: json raises RecursionError for it, which is not a ValueError."""

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from service.adapters.helper_processes.preflight import _parse as parse_preflight
from service.config.environment import BadSettings, read_settings
from service.domain.runs.json_lines import parse as parse_run_line
from service.errors import PreflightFailed
from train_loop.data.text.messages import _read_arguments, read_tools
from train_loop.data.text.tokenizer_files import _read_object
from train_loop.errors import DataError, ModelError
from train_loop.liveness.heartbeat import _mac, decode
from train_loop.model.folder import _read_config
from train_loop.model.load import _read_index
from train_loop.run_dir import Manifest
from train_loop.run_dir.lines import read_lines
from train_loop.spec import SpecError, load, parse_text

ROOT = Path(__file__).parents[2]
DEEP = "[" * 100_000
TRUSTED = {
    # The service's own files, documents and child processes.
    "service/adapters/storage/roots.py:_recall",
    "service/api/openapi.py:_hoisted",
    "train_loop/checkpoint/export/text_files.py:name_class",
    "train_loop/checkpoint/files/writer.py:write",
    "train_loop/checkpoint/files/writer.py:serve",
    "train_loop/liveness/heartbeat.py:main",
    "train_loop/loop/infer/of_job.py:stop_tokens_of_job",
    "train_loop/model/families/causal/cache.py:_is_exact",
    "train_loop/model/families/causal/separation.py:_has_more_positions",
    "train_loop/model/families/causal/separation.py:_measure_copy",
    "train_loop/model/families/masked.py:_measured",
    "train_loop/preflight/process/fork_server.py:_found",
    "train_loop/ray_train/dashboards.py:main",
    "train_loop/ray_train/raylet.py:worker_group_environment",
    "train_loop/run_dir/formats.py:sealed",
    "trainshed/cli/commands/check_model.py:_checked",
    # Columns of the database that the service writes after it has checked their content.
    "service/adapters/sql/access.py:_key",
    "service/adapters/sql/access.py:_to_entry",
    "service/adapters/sql/outbox.py:events_for_change",
    "service/adapters/sql/outbox.py:events_for_new_jobs",
    "service/adapters/sql/outbox.py:to_webhook",
}
"""Functions that parse only text which Trainshed itself has written."""


def _unguarded(node: ast.AST, function: str = "", *, guarded: bool = False) -> Iterator[str]:
    """Yield the functions that parse JSON without a handler of RecursionError."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        function, guarded = node.name, False
    if isinstance(node, ast.Call) and ast.unparse(node.func) in ("json.loads", "json.load") and not guarded:
        yield function
    handles = isinstance(node, ast.Try) and any("RecursionError" in ast.unparse(one) for one in node.handlers)
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _unguarded(child, function, guarded=guarded or (handles and name == "body"))


def test_every_parser_of_foreign_json_handles_nesting() -> None:
    files = [
        file
        for package in ("service", "train_loop", "trainshed")
        for file in (ROOT / package).rglob("*.py")
        if "migrations" not in file.parts
    ]
    found = {
        f"{file.relative_to(ROOT)}:{name}"
        for file in files
        if "json.load" in (text := file.read_text())
        for name in _unguarded(ast.parse(text))
    }
    assert found - TRUSTED == set()
    assert TRUSTED - found == set(), "they parse no JSON any more"


@pytest.mark.parametrize(
    ("read", "expected"),
    [
        pytest.param(parse_text, SpecError, id="spec"),
        pytest.param(load, SpecError, id="stored spec"),
        pytest.param(Manifest.parse, ValueError, id="manifest"),
        pytest.param(read_tools, DataError, id="tools of a row"),
        pytest.param(lambda text: _read_arguments(text, 1), DataError, id="arguments of a tool"),
        pytest.param(lambda text: parse_preflight(text.encode()), PreflightFailed, id="answer of preflight"),
        pytest.param(parse_run_line, None, id="line of a run, in the service"),
        pytest.param(lambda text: decode(_mac(text.encode(), "t") + text.encode(), "t"), None, id="heartbeat"),
    ],
)
def test_nested_text_is_rejected(read: Callable[[str], Any], expected: type[Exception] | None) -> None:
    for text in ("[" * 900, DEEP, '{"a":' * 100_000):
        if expected is None:
            assert read(text) is None
        else:
            with pytest.raises(expected):
                read(text)


@pytest.mark.parametrize(
    ("name", "read", "expected"),
    [
        ("config.json", lambda file: _read_config(file.parent), ModelError),
        ("model.safetensors.index.json", lambda file: _read_index(file.parent), ModelError),
        ("tokenizer_config.json", lambda file: _read_object(file, file.read_bytes()), DataError),
    ],
)
def test_nested_file_is_rejected(
    tmp_path: Path, name: str, read: Callable[[Path], Any], expected: type[Exception]
) -> None:
    (tmp_path / name).write_text(DEEP)
    with pytest.raises(expected):
        read(tmp_path / name)


def test_nested_line_of_a_run_is_skipped(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    file.write_text(f'{DEEP}\n{{"seq": 1}}\n')
    assert list(read_lines(file)) == [{"seq": 1}]


@pytest.mark.parametrize("name", ["TRAINSHED_STORAGE_ROOTS", "TRAINSHED_QUOTAS"])
def test_nested_setting_is_reported(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, '{"a":' * 20_000)
    with pytest.raises(BadSettings, match=name):
        read_settings()
