"""The event log of a rank: no line of a run is lost or out of order if storage fails in between."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.support.builders.small_runs import run
from tests.support.builders.specs import TINY
from tests.support.ranks.ranks import on_ranks
from tests.support.ranks.torchrun import write_tokens
from train_loop.errors import DataError
from train_loop.run_dir import JsonLines, RunDir, StorageUnavailable, read_lines
from train_loop.telemetry import event_log

append = JsonLines.append


class FailsOnce:
    """`JsonLines.append` on storage that fails as `workers_ready` is written, and works again after that."""

    failed = False

    def __call__(self, lines: JsonLines, **fields: Any) -> None:
        if fields.get("event") == "workers_ready" and not self.failed:
            self.failed = True
            raise StorageUnavailable(str(lines.path), "unmounted")
        append(lines, **fields)


def run_while_storage_fails_once(data: Path, folder: Path, *, mistake: bool = False) -> None:
    fails = FailsOnce()
    with pytest.MonkeyPatch.context() as monkeypatch:
        # Only a later line of the same log may write the queued one: the thread does not retry in time.
        monkeypatch.setattr(event_log, "_RETRY_SECONDS", 3600.0)
        monkeypatch.setattr(JsonLines, "append", lambda lines, **fields: fails(lines, **fields))
        if not mistake:
            run(data, folder, warmup_steps=0, max_steps=1)
            return
        with patch("train_loop.train.build_run", side_effect=DataError("no rows")), pytest.raises(DataError):
            run(data, folder, warmup_steps=0, max_steps=1)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write_tokens(tmp_path / "d.parquet", rows=8, length=32, vocab=TINY["vocab_size"])
    return tmp_path / "d.parquet"


def names(folder: Path) -> list[str]:
    return [line["event"] for line in read_lines(RunDir(folder).attempt(1).events)]


def test_line_queued_while_storage_failed_precedes_the_later_lines(data: Path, tmp_path: Path) -> None:
    on_ranks(1, run_while_storage_fails_once, data, tmp_path / "run")
    assert names(tmp_path / "run") == [
        "workers_ready",
        "storage_unavailable",
        "model_built",
        "training_started",
        "storage_available",
        "checkpoint_committed",
        "training_ended",
    ]


def run_with_a_mistake(data: Path, folder: Path) -> None:
    run_while_storage_fails_once(data, folder, mistake=True)


def test_line_queued_while_storage_failed_precedes_the_report_of_a_failure(data: Path, tmp_path: Path) -> None:
    on_ranks(1, run_with_a_mistake, data, tmp_path / "run")
    assert names(tmp_path / "run") == ["workers_ready", "storage_unavailable", "training_ended", "storage_available"]
