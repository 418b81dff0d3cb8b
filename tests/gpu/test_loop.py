"""Whole runs on one GPU: against the CPU, killed and resumed, and resumed on the CPU."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.test_gradients import QWEN3
from tests.support.builders.specs import raw_spec
from tests.support.ranks import torchrun
from tests.support.waiting import wait_for
from train_loop.run_dir import RunDir, read_lines

STEPS, EVERY = 100, 20


def run_spec(folder: Path, dtype: str, **training: Any) -> dict[str, Any]:
    data = folder / "tokens.parquet"
    if not data.exists():
        torchrun.write_tokens(data, rows=4 * STEPS, length=64, vocab=QWEN3["vocab_size"])
    return raw_spec(
        # Dropout, so that the generators must be restored too.
        model={"config": QWEN3 | {"attention_dropout": 0.1 if dtype == "bf16" else 0.0}, "dtype": dtype},
        data={"train": {"path": str(data)}, "columns": {"input_ids": "ids"}, "packing": False, "sequence_length": 64},
        training={"max_steps": STEPS, "global_batch_size": 4, "weight_decay": 0.1, "ema_decay": 0.9} | training,
        checkpoint={"every_steps": EVERY, "keep_last": 10},
    )


def numbers(run_dir: Path) -> dict[int, list[Any]]:
    return {line["step"]: [line[name] for name in ("loss", "grad_norm", "lr")] for line in torchrun.lines(run_dir)}


def killed(spec: dict[str, Any], run_dir: Path) -> None:
    """Run until the first checkpoint and some steps more, then kill all processes with SIGKILL."""
    process = torchrun.start(spec, run_dir, 1)
    wait_for(
        lambda: process.poll() is not None or newest(run_dir) is not None, f"a checkpoint of {run_dir}", seconds=120
    )
    torchrun.kill(process)
    found = newest(run_dir)
    assert found is not None, run_dir.with_suffix(".log").read_text()[-2000:]
    assert found < STEPS, "the run ended before it was killed"


def newest(run_dir: Path) -> int | None:
    """Return the newest committed step."""
    lines = read_lines(RunDir(run_dir).attempt(1).events)
    return max((line["step"] for line in lines if line["event"] == "checkpoint_committed"), default=None)


def test_run_killed_and_resumed_has_the_bits_of_the_uninterrupted_run(tmp_path: Path) -> None:
    spec = run_spec(tmp_path, "bf16")
    torchrun.run(spec, tmp_path / "whole", 1)
    killed(spec, tmp_path / "resumed")
    torchrun.run(spec, tmp_path / "resumed", 1)
    starts = [e for e in read_lines(RunDir(tmp_path / "resumed").attempt(1).events) if e["event"] == "training_started"]
    assert starts[-1]["resumed_from"] >= EVERY
    assert numbers(tmp_path / "resumed") == numbers(tmp_path / "whole")
    expected, found = (torchrun.load_tensors(tmp_path / name, STEPS) for name in ("whole", "resumed"))
    assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == []


def test_losses_equal_those_of_the_cpu_and_a_gpu_run_resumes_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = run_spec(tmp_path, "fp32")
    killed(spec, tmp_path / "gpu")
    shutil.copytree(tmp_path / "gpu", tmp_path / "moved")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    torchrun.run(spec, tmp_path / "moved", 1)
    torchrun.run(spec, tmp_path / "cpu", 1)
    expected, started, moved = (numbers(tmp_path / name) for name in ("cpu", "gpu", "moved"))
    first = [step for step in started if step <= EVERY]
    assert [started[step][0] for step in first] == pytest.approx([expected[step][0] for step in first], rel=1e-3)
    assert sorted(moved) == sorted(expected)
    assert moved[STEPS][0] == pytest.approx(expected[STEPS][0], rel=0.02)
