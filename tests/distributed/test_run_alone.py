"""The training loop without Ray and without the service's packages."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.builders.specs import TINY, raw_spec
from tests.support.forks.sitecustomize import ABSENT_VARIABLE
from tests.support.ranks import torchrun
from tests.support.ranks.warm_runs import WarmRun, run
from tests.support.servers.worker_forks import FORKS
from train_loop.run_dir import Outcome, RunDir, read_lines

ABSENT = ("ray", "fastapi", "uvicorn", "sqlalchemy", "alembic", "starlette", "service")
OUR_TRACEBACK = 'train_loop/run.py", line'
"""Part of a traceback of Trainshed; torchrun prints its own traceback."""


@pytest.fixture
def without_ray_and_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(FORKS), *filter(None, [os.getenv("PYTHONPATH")])]))
    monkeypatch.setenv(ABSENT_VARIABLE, ",".join(ABSENT))


def a_spec(data: Path, **training: int) -> dict[str, Any]:
    return raw_spec(
        data={"train": {"path": str(data)}, "columns": {"input_ids": "ids"}, "packing": False},
        training={"max_steps": 2, "global_batch_size": 4} | training,
        scaling={"num_workers": 2},
    )


@pytest.mark.usefixtures("without_ray_and_service")
def test_loop_runs_without_ray_and_the_service(tmp_path: Path) -> None:
    for name in ABSENT:
        found = subprocess.run([sys.executable, "-c", f"import {name}"], capture_output=True, text=True, check=False)
        assert f"No module named '{name}'" in found.stderr
    torchrun.write_tokens(tmp_path / "d.parquet", rows=8, length=32, vocab=TINY["vocab_size"])
    spec = a_spec(tmp_path / "d.parquet")
    torchrun.run(spec, tmp_path / "run", 2)
    assert [line["step"] for line in torchrun.lines(tmp_path / "run")] == [1, 2]


def test_user_error_is_reported_as_not_retryable(tmp_path: Path) -> None:
    torchrun.write_tokens(tmp_path / "d.parquet", rows=8, length=32, vocab=2 * TINY["vocab_size"])
    spec = a_spec(tmp_path / "d.parquet")
    assert WarmRun(spec, tmp_path / "run", 2).wait(timeout=240) == 1
    attempt = RunDir(tmp_path / "run").attempt(1)
    reasons = {str(line["reason"]) for line in read_lines(attempt.events) if line["event"] == "training_ended"}
    assert attempt.outcome() in [Outcome(result="failed", code="data_error", reason=reason) for reason in reasons]
    for reason in reasons:
        # The tokens are invalid rows, which the prepare step reports.
        assert f"{tmp_path}/d.parquet is not prepared in " in reason


def test_invalid_spec_is_rejected_with_its_problems(tmp_path: Path) -> None:
    torchrun.write_tokens(tmp_path / "d.parquet", rows=8, length=32, vocab=TINY["vocab_size"])
    spec = a_spec(tmp_path / "d.parquet")
    spec["training"] |= {"max_step": 6}
    assert WarmRun(spec, tmp_path / "run", 2).wait(timeout=240) == 1
    log_text, lines = (tmp_path / "run.log").read_text(), (tmp_path / "run.yaml").read_text().splitlines()
    line = lines.index("  max_step: 6") + 1
    problem = "training.max_step: no such field; did you mean max_steps?"
    assert f"{tmp_path}/run.yaml:{line}:3: {problem}\n" in log_text
    assert OUR_TRACEBACK not in log_text
    assert not (tmp_path / "run").exists()


def test_run_in_the_directory_of_another_job_leaves_it_unchanged(tmp_path: Path) -> None:
    torchrun.write_tokens(tmp_path / "d.parquet", rows=8, length=32, vocab=TINY["vocab_size"])
    torchrun.write_tokens(tmp_path / "bad.parquet", rows=8, length=32, vocab=2 * TINY["vocab_size"])
    run(a_spec(tmp_path / "d.parquet"), tmp_path / "run", 2)
    attempt = RunDir(tmp_path / "run").attempt(1)
    before = attempt.outcome(), list(read_lines(attempt.events))
    assert WarmRun(a_spec(tmp_path / "bad.parquet"), tmp_path / "run", 2).wait(timeout=240) == 1
    log_text = (tmp_path / "run.log").read_text()
    assert "holds another spec (/data/train/path); a run directory belongs to one job, choose a new one" in log_text
    assert OUR_TRACEBACK not in log_text
    assert (attempt.outcome(), list(read_lines(attempt.events))) == before


def test_wrong_number_of_ranks_is_not_retryable(tmp_path: Path) -> None:
    torchrun.write_tokens(tmp_path / "d.parquet", rows=8, length=32, vocab=TINY["vocab_size"])
    assert WarmRun(a_spec(tmp_path / "d.parquet"), tmp_path / "run", 1).wait(timeout=240) == 1
    assert RunDir(tmp_path / "run").attempt(1).outcome() == Outcome(
        result="failed", code="user_error", reason="num_workers=2, but 1 ranks started; start 2, or change the spec"
    )
