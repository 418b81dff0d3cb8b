"""A real rank on a host without memory: the report, one retry, and the end of the run."""

import gc
import resource
from pathlib import Path
from typing import Any

import pytest

from tests.support.builders.small_runs import events, run
from tests.support.builders.specs import TINY
from tests.support.ranks.ranks import on_ranks
from tests.support.ranks.torchrun import write_tokens
from train_loop.errors import MemoryRanOutError, TooLittleMemoryError
from train_loop.liveness.heartbeat import Phase

VOCABULARY, LENGTH, BATCH = 200_000, 32, 64
LOGITS = BATCH * LENGTH * VOCABULARY * 4
"""Bytes of a step's logits, which are one allocation."""


def limit_memory(_step: int, phase: Phase) -> None:
    """Leave the step half the address space of its logits: they do not fit, but threads and small tensors do.

    Set-up needs no limit: libraries reserve up to 1 GiB of address space that they may never use.
    """
    if phase is Phase.TRAIN:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + LOGITS // 2, resource.RLIM_INFINITY))


def two_runs(data: Path, folder: Path) -> list[str]:
    """Train two worker groups whose steps have too little memory; return the errors' classes."""
    model: dict[str, Any] = {"config": TINY | {"vocab_size": VOCABULARY}, "dtype": "fp32"}
    batch = {"global_batch_size": BATCH, "per_device_train_batch_size": BATCH}
    found = []
    for epoch in (1, 2):
        place = {"epoch": epoch, "mark": limit_memory}
        with pytest.raises((MemoryRanOutError, TooLittleMemoryError)) as raised:
            run(data, folder, place=place, model=model, chunked_loss=False, **batch)
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        found.append(type(raised.value).__name__)
        # The frames of the traceback hold the step's tensors.
        del raised
        gc.collect()
    return found


def test_out_of_memory_rank_is_retried_once_and_ends_the_run(tmp_path: Path) -> None:
    write_tokens(tmp_path / "tokens.parquet", rows=BATCH, length=LENGTH, vocab=VOCABULARY)
    (found,) = on_ranks(1, two_runs, tmp_path / "tokens.parquet", tmp_path / "run")
    assert found == ["MemoryRanOutError", "TooLittleMemoryError"]
    reports = events(tmp_path / "run", "out_of_memory")
    assert [(event["memory"], event["again"]) for event in reports] == [("host", False), ("host", True)]
    assert all(f"you tried to allocate {LOGITS} bytes" in event["error"] for event in reports), reports
    (end,) = events(tmp_path / "run", "training_ended")
    assert end["code"] == "out_of_memory"
    assert "ran out of host memory" in end["reason"]
