"""Runs of `python -m train_loop.run` on ranks forked from a process that has already imported it.

Ranks that torchrun starts import for ten seconds. Tests of torchrun itself use `tests.support.ranks.torchrun`.
"""

import os
import signal
import sys
from multiprocessing import get_context, set_forkserver_preload
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml

from tests.support.ranks.hold import HOLDS_VARIABLE, obey_holds
from tests.support.waiting import wait_for
from train_loop import run as program
from train_loop.system.exit import leave


class WarmRun:
    """The ranks of a run, with a launcher's functions: a store for the rendezvous, and termination after a failure."""

    def __init__(self, spec: dict[str, Any], run_dir: Path, world: int) -> None:
        file, log = run_dir.with_suffix(".yaml"), run_dir.with_suffix(".log")
        file.write_text(yaml.safe_dump(spec))
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        environment = os.environ | {
            "WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "OMP_NUM_THREADS": "1",
            HOLDS_VARIABLE: str(run_dir.parent),
        }
        set_forkserver_preload(["tests.support.ranks.preload"])
        context = get_context("forkserver")
        self._ranks = [
            context.Process(
                target=_train, args=(rank, environment, log, ["run", str(file), "--run-dir", str(run_dir)]), daemon=True
            )
            for rank in range(world)
        ]
        for rank in self._ranks:
            rank.start()

    def poll(self) -> int | None:
        """Return 0 if all ranks succeeded, 1 if one failed, None while they run. End the others if one has failed."""
        codes = [rank.exitcode for rank in self._ranks]
        if any(codes):
            for rank in self._ranks:
                rank.terminate()
        return None if None in codes else int(any(codes))

    def wait(self, timeout: float) -> int:
        """Wait until all ranks have ended; return what `poll` returns then. Raises TimeoutError."""
        wait_for(lambda: self.poll() is not None, "the end of a run", seconds=timeout)
        return int(self.poll() or 0)

    def interrupt(self) -> None:
        """Send SIGINT to all ranks, as a terminal does for Ctrl-C."""
        for rank in self._ranks:
            assert rank.pid
            os.kill(rank.pid, signal.SIGINT)

    def kill(self) -> None:
        """SIGKILL all ranks at once."""
        for rank in self._ranks:
            rank.kill()
        for rank in self._ranks:
            rank.join()


def run(spec: dict[str, Any], run_dir: Path, world: int) -> None:
    """Run the loop to its end."""
    assert WarmRun(spec, run_dir, world).wait(timeout=240) == 0, run_dir.with_suffix(".log").read_text()[-4000:]


def _train(rank: int, environment: dict[str, str], log: Path, arguments: list[str]) -> None:
    # The process that it was forked from has the environment of an earlier time.
    os.environ.clear()
    os.environ.update(environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, sys.stdout.fileno())
    os.dup2(descriptor, sys.stderr.fileno())
    torch.set_num_threads(1)
    obey_holds()
    sys.argv = arguments
    program.main()
    leave()
