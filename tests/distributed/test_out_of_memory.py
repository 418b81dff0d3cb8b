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

VOCABULARY, LENGTH, BATCH = 200_000, 32, 64


def two_runs(data: Path, folder: Path) -> list[str]:
    """Train two worker groups whose process may take no more memory than it has; return the errors' classes."""
    model: dict[str, Any] = {"config": TINY | {"vocab_size": VOCABULARY}, "dtype": "fp32"}
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    batch = {"global_batch_size": BATCH, "per_device_train_batch_size": BATCH}
    # The logits of a step alone take 1.6 GB at once, so that small allocations still succeed.
    resource.setrlimit(resource.RLIMIT_AS, (used + 1200 * 2**20, resource.RLIM_INFINITY))
    found = []
    for epoch in (1, 2):
        with pytest.raises((MemoryRanOutError, TooLittleMemoryError)) as raised:
            run(data, folder, place={"epoch": epoch}, model=model, chunked_loss=False, **batch)
        found.append(type(raised.value).__name__)
        # The frames of the traceback hold the step's tensors.
        del raised
        gc.collect()
    return found


def test_out_of_memory_rank_is_retried_once_and_ends_the_run(tmp_path: Path) -> None:
    write_tokens(tmp_path / "tokens.parquet", rows=BATCH, length=LENGTH, vocab=VOCABULARY)
    (found,) = on_ranks(1, two_runs, tmp_path / "tokens.parquet", tmp_path / "run")
    assert found == ["MemoryRanOutError", "TooLittleMemoryError"]
    assert [(event["memory"], event["again"]) for event in events(tmp_path / "run", "out_of_memory")] == [
        ("host", False),
        ("host", True),
    ]
    (end,) = events(tmp_path / "run", "training_ended")
    assert end["code"] == "out_of_memory"
    assert "ran out of host memory" in end["reason"]
