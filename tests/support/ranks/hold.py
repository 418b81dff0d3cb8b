"""Runs that wait before a step, or lack memory in it, so that a test can disturb them on a machine of any speed."""

import os
import time
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

HOLDS_VARIABLE = "TEST_HOLDS"
"""Variable with a folder that has a file for each run that is held: the last step that it may train now."""


def hold(folder: Path, run: str, step: int | None) -> None:
    """Let a run train no step after this one until the next call; None lets it train to its end.

    `folder` is that of the ranks' HOLDS_VARIABLE, and `run` the name of the run directory, which need not exist yet.
    """
    file = folder / f"{run}.hold"
    if step is None:
        file.unlink()
        return
    # As a whole: ranks read it before each step.
    new = file.with_suffix(".new")
    new.write_text(str(step))
    new.rename(file)


def limit_micro_batches(folder: Path, run: str, size: int | None) -> None:
    """Let the last rank of a run lack memory in each step with larger micro-batches, until the next call."""
    file = folder / f"{run}.limit"
    if size is None:
        file.unlink()
        return
    file.write_text(str(size))


def obey_holds() -> None:
    """Make this process, a rank, wait where its run is held; it reports that it computes. It obeys limits, too."""
    if HOLDS_VARIABLE not in os.environ:
        return
    folder = Path(os.environ[HOLDS_VARIABLE])
    train = import_module("train_loop.train")
    train_step, computes = train.TrainingLoop.train_step, train.Phase.TRAIN

    def wait_and_train(loop: Any, *arguments: Any) -> Any:
        session, step = loop.run.session, loop.run.state.step
        session.mark(step + 1, computes)
        while _is_held(folder / f"{session.run_dir.root.name}.hold", step):
            time.sleep(0.02)
        _run_out(folder / f"{session.run_dir.root.name}.limit", loop)
        return train_step(loop, *arguments)

    train.TrainingLoop.train_step = wait_and_train
    infer = import_module("train_loop.infer")
    compute = infer.InferenceLoop.compute

    def wait_and_compute(loop: Any, *arguments: Any) -> Any:
        loop.session.mark(loop.done, computes)
        while _is_held(folder / f"{loop.session.run_dir.root.name}.hold", loop.done):
            time.sleep(0.02)
        return compute(loop, *arguments)

    infer.InferenceLoop.compute = wait_and_compute


def _run_out(file: Path, loop: Any) -> None:
    with suppress(FileNotFoundError):
        limit, size = int(file.read_text()), loop.run.spec.training.micro_batch
        if size > limit and loop.run.session.rank == loop.run.session.world - 1:
            raise import_module("torch").OutOfMemoryError(f"no room for {size} sequences at once")


def _is_held(file: Path, step: int) -> bool:
    with suppress(FileNotFoundError):
        return step >= int(file.read_text())
    return False
