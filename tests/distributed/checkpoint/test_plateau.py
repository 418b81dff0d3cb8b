"""A run with reduce_lr_on_plateau that is paused and resumed, compared with an uninterrupted one."""

from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.support.builders.small_runs import events, lines
from tests.support.builders.specs import TINY, spec
from tests.support.ranks.ranks import on_ranks
from tests.support.ranks.torchrun import load_checkpoint, write_tokens
from train_loop.data.stream.local import local_stream
from train_loop.loop.session import Session
from train_loop.run import run
from train_loop.run_dir import Parent, RunDir

STEPS, AT = 12, 6
# An evaluation counts as lower only below a tenth of the lowest loss, so none but the first does.
OPTIONS = {"patience": 0, "factor": 0.5, "threshold": 0.9, "cooldown": 1}


def train(folder: Path) -> None:
    """Train a run at once, the same run paused twice in the evaluation that lowers its learning rate, and clones."""
    job = spec(
        model={"config": TINY, "dtype": "fp32"},
        data={"train": {"path": str(folder / "train.parquet")}, "eval": {"path": str(folder / "eval.parquet")}}
        | {"columns": {"input_ids": "ids"}, "packing": False},
        training={"max_steps": STEPS, "global_batch_size": 4, "learning_rate": 1e-3, "eval_steps": 2}
        | {"lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": OPTIONS},
        checkpoint={"every_steps": AT},
    )
    # The rank looks for requests before each step, and before each of the four batches of an evaluation.
    for name, pauses in {"whole": [], "parts": [9, 2]}.items():
        run_dir = RunDir(folder / name)
        run_dir.write_spec(job)
        for pause in [*pauses, 1 << 30]:
            asked = count()

            def stop(asked: Any = asked, pause: int = pause) -> bool:
                return int(next(asked)) >= pause

            run(job, replace(Session(0, 1, 0, 1, run_dir, local_stream), stop_requested=stop), folder / "no cache")
    for name, same in {"clone": True, "other rate": False}.items():
        run_dir = RunDir(folder / name)
        run_dir.write_spec(job)
        manifest = RunDir(folder / "whole").manifests()[AT]
        run_dir.write_parent(
            Parent(
                job="whole",
                run_dir=str(folder / "whole"),
                manifest=manifest,
                same_order=True,
                same_optimizer=True,
                same_plateau=same,
            )
        )
        run(job, Session(0, 1, 0, 1, run_dir, local_stream), folder / "no cache")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    write_tokens(folder / "train.parquet", rows=64, length=(9, 32), vocab=TINY["vocab_size"])
    write_tokens(folder / "eval.parquet", rows=4, length=(9, 32), vocab=TINY["vocab_size"])
    on_ranks(1, train, folder)
    return folder


def test_learning_rate_falls_after_evaluations_outside_of_the_cooldown(folder: Path) -> None:
    assert [line["lr"] for line in lines(folder / "whole")] == [1e-3] * 4 + [5e-4] * 4 + [2.5e-4] * 4


def test_run_that_was_paused_in_evaluations_equals_the_uninterrupted_one(folder: Path) -> None:
    assert [event["resumed_from"] for event in events(folder / "parts", "training_started")] == [0, 4, 4]
    names = ("step", "loss", "grad_norm", "lr", "tokens", "eval_loss")
    whole, parts = ([[line.get(name) for name in names] for line in lines(folder / run)] for run in ("whole", "parts"))
    assert parts == whole
    states = [load_checkpoint(folder / run, STEPS)["scheduler"] for run in ("whole", "parts")]
    assert states[0] == states[1]
    assert states[0]["0"]["cooldown_counter"] == 1


def test_clone_continues_with_the_rate_and_the_lowest_loss_of_its_parent(folder: Path) -> None:
    names = ("step", "loss", "grad_norm", "lr", "tokens", "eval_loss")
    whole, clone = ([[line.get(name) for name in names] for line in lines(folder / run)] for run in ("whole", "clone"))
    assert clone == whole[AT:]
    states = [load_checkpoint(folder / run, STEPS)["scheduler"] for run in ("whole", "clone")]
    assert states[0] == states[1]


def test_clone_with_another_learning_rate_or_other_evaluations_starts_the_schedule_again(folder: Path) -> None:
    assert [line["lr"] for line in lines(folder / "other rate")] == [1e-3] * 4 + [5e-4] * 2
