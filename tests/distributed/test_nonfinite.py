"""Steps with non-finite values: skipped without an effect, or an error that ends the run."""

import math
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from tests.support.builders.small_runs import BATCH, LENGTH, STEPS, events, lines, numbers, run
from tests.support.builders.specs import TINY
from tests.support.ranks.ranks import on_ranks
from tests.support.ranks.torchrun import load_checkpoint, write_tokens
from train_loop import train
from train_loop.errors import NonFiniteError
from train_loop.loop.build import Run, build_run

POISONED = 3


def poison(patch: pytest.MonkeyPatch, *, first: int, last: int) -> None:
    """Let the embeddings of rank 1 give NaN in some steps."""
    build = build_run

    def build_poisoned(*arguments: Any) -> Run:
        run = build(*arguments)

        def spoil(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
            return output * math.nan if run.mesh.rank == 1 and first <= run.state.step + 1 <= last else output

        assert run.objective.anatomy.embeddings is not None
        run.objective.anatomy.embeddings.register_forward_hook(spoil)
        return run

    patch.setattr(train, "build_run", build_poisoned)


def error_of_endless_skips(data: Path, folder: Path, **parts: Any) -> str:
    try:
        run(data, folder, **parts)
    except NonFiniteError as error:
        return str(error)
    return ""


def all_runs(folder: Path) -> dict[str, Any]:
    """Run every case of this file on the same ranks, because starting ranks takes most of the time."""
    data = folder / "d.parquet"
    run(folder / "without.parquet", folder / "without", max_steps=STEPS - 1)
    with pytest.MonkeyPatch.context() as patch:
        poison(patch, first=POISONED, last=POISONED)
        run(data, folder / "poisoned", max_consecutive_skips=2)
    with pytest.MonkeyPatch.context() as patch:
        poison(patch, first=3, last=99)
        failing = [
            error_of_endless_skips(data, folder / f"failing {dtype}", model={"dtype": dtype}, on_nonfinite="fail")
            for dtype in ("fp32", "fp16")
        ]
        first = error_of_endless_skips(data, folder / "endless", max_consecutive_skips=3, max_steps=4)
        resumed = error_of_endless_skips(data, folder / "endless", max_consecutive_skips=3)
    return {"fail": failing, "first": first, "resumed": resumed}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    write_tokens(folder / "d.parquet", rows=40, length=LENGTH, vocab=TINY["vocab_size"])
    rows = pq.read_table(folder / "d.parquet")
    kept = [row for row in range(40) if row // BATCH != POISONED - 1]
    pq.write_table(rows.take(kept), folder / "without.parquet")
    return folder


@pytest.fixture(scope="module", autouse=True)
def ranks(runs: Path) -> list[dict[str, Any]]:
    return on_ranks(2, all_runs, runs)


def test_skipped_step_has_no_effect_on_the_weights(runs: Path) -> None:
    found, expected = lines(runs / "poisoned"), lines(runs / "without")
    assert found[POISONED - 1]["loss"] is None
    kept = [line for line in found if line["step"] != POISONED]
    assert list(map(numbers, kept)) == list(map(numbers, expected))
    ours, theirs = load_checkpoint(runs / "poisoned", STEPS), load_checkpoint(runs / "without", STEPS - 1)
    assert ours["scheduler"] == theirs["scheduler"]
    for name, weight in theirs["model"].items():
        assert torch.equal(ours["model"][name], weight), name
        for moment, value in theirs["optimizer"]["state"][name].items():
            assert torch.equal(ours["optimizer"]["state"][name][moment], value), (name, moment)


def test_skipped_step_consumes_its_samples(runs: Path) -> None:
    for line in lines(runs / "poisoned"):
        assert line["samples"] == list(range(BATCH * (line["step"] - 1), BATCH * line["step"]))
        assert line["tokens"] == BATCH * LENGTH * line["step"]
    (skipped,) = events(runs / "poisoned", "step_skipped")
    assert (skipped["step"], skipped["loss"], skipped["in_a_row"]) == (POISONED, None, 1)


def test_first_nonfinite_step_can_fail_the_run(ranks: list[dict[str, Any]]) -> None:
    error = "step=3, loss=nan, grad_norm=nan is not finite; lower learning_rate, or choose on_nonfinite: skip"
    # The fp16 scaler cannot fix a non-finite loss.
    assert [rank["fail"] for rank in ranks] == [[error, error]] * 2


def test_consecutive_skips_fail_the_run_on_all_ranks_and_are_counted_across_a_restart(
    ranks: list[dict[str, Any]],
) -> None:
    assert {rank["first"] for rank in ranks} == {""}
    assert {rank["resumed"] for rank in ranks} == {
        "step=5, loss=nan, grad_norm=nan is not finite, and max_consecutive_skips=3 steps were skipped in a row; lower "
        "learning_rate, check the data of these steps, or start from finite weights"
    }
