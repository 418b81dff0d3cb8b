"""Runs that wait before a step, so that a test can disturb them there on a machine of any speed."""

import time
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

_FILE = "hold"
"""File in a run directory with the last step that the run may train now."""


def hold(run_dir: Path, step: int | None) -> None:
    """Let a run train no step after this one until the next call; None lets it train to its end."""
    file = run_dir / _FILE
    if step is None:
        file.unlink()
        return
    # As a whole: ranks read it before each step.
    new = file.with_suffix(".new")
    new.write_text(str(step))
    new.rename(file)


def obey_holds() -> None:
    """Make this process, a rank, wait where its run is held; it reports that it computes."""
    train = import_module("train_loop.train")
    train_step, computes = train.TrainingLoop.train_step, train.Phase.TRAIN

    def wait_and_train(loop: Any, *arguments: Any) -> Any:
        session, step = loop.run.session, loop.run.state.step
        session.mark(step + 1, computes)
        while _is_held(Path(str(session.run_dir.root)), step):
            time.sleep(0.02)
        return train_step(loop, *arguments)

    train.TrainingLoop.train_step = wait_and_train


def _is_held(run_dir: Path, step: int) -> bool:
    with suppress(FileNotFoundError):
        return step >= int((run_dir / _FILE).read_text())
    return False
