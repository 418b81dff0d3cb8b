"""`python -m tests.support.servers.worker_forks`: forks Ray's workers and drivers, which need no imports then.

Each of these imports for four CPU seconds. `forks/sitecustomize.py` hands it over before its first import. A process
of a test host is forked into the namespaces of that host.
"""

import os
import runpy
import signal
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.forks.fork_server import fork_server, serve_forks
from tests.support.forks.sitecustomize import FORKS_VARIABLE, hide_packages
from tests.support.ranks.hold import obey_holds

FORKS = Path(__file__).parents[1] / "forks"
MODULES = (
    "jsonschema",
    "pandas",
    "psutil",
    "pyarrow.dataset",
    "pyarrow.parquet",
    "requests",
    "torch.distributed.fsdp",
    "train_loop.checkpoint.restore",
    "train_loop.data.prepare.cache",
    "train_loop.infer",
    "train_loop.sinks.forward",
    "train_loop.train",
    "transformers.models.qwen3.modeling_qwen3",
)
"""What workers and drivers import except Ray, which reads a process's own variables when it is imported."""
_STEP_VARIABLE, _READING_VARIABLE = "TEST_STEP_SECONDS", "TEST_RANKS_READ"
SLOW, LOADING, TRAINING, EVALUATING, SAVING = "slow", "loading", "training", "evaluating", "saving"
"""Label of a job with a slow phase, and its values. An evaluation leaves a file of this name in the run directory."""


def worker_forks(*, link: Path | None = None, step_seconds: float = 0.0, ranks_read: bool = False) -> dict[str, str]:
    """Return the variables with which a Ray has its workers forked by this process's server.

    `link` becomes another path of the socket, for test hosts, which see only some folders. Each training step takes
    `step_seconds` more, as that of a larger model would, but without the processor. With `ranks_read`, ranks read
    their own rows to the end, as in a run too short to start Ray Data, which takes eight CPU seconds.
    """
    path = fork_server("tests.support.servers.worker_forks")
    if link is not None:
        os.link(path, link)
    found = os.pathsep.join(filter(None, [str(FORKS), os.environ.get("PYTHONPATH")]))
    reading = {_READING_VARIABLE: "1"} if ranks_read else {}
    return {FORKS_VARIABLE: str(link or path), _STEP_VARIABLE: str(step_seconds), "PYTHONPATH": found} | reading


def _slow_down_phases(step_seconds: float) -> None:
    """Make all steps longer, and a phase slow in jobs with the label SLOW."""
    train, evaluate = import_module("train_loop.train"), import_module("train_loop.loop.evaluate")
    saver = import_module("train_loop.checkpoint.save").Saver
    build_run, train_step, batches, write = train.build_run, train.train_step, evaluate._batches, saver._write
    phase, run_dir = "", Path()

    def sleep_if(slow: str, seconds: float) -> None:
        time.sleep(seconds if phase == slow else 0.0)

    def build(spec: Any, session: Any, *arguments: Any) -> Any:
        nonlocal phase, run_dir
        phase, run_dir = spec.labels.get(SLOW, ""), session.run_dir.root
        sleep_if(LOADING, 60.0)
        return build_run(spec, session, *arguments)

    def slow_step(*arguments: Any, **named: Any) -> Any:
        time.sleep(step_seconds)
        sleep_if(TRAINING, 0.05)
        return train_step(*arguments, **named)

    def slow_batches(*arguments: Any) -> Any:
        for batch in batches(*arguments):
            if phase == EVALUATING:
                (run_dir / EVALUATING).touch()
            sleep_if(EVALUATING, 0.5)
            yield batch

    def slow_write(*arguments: Any) -> Any:
        sleep_if(SAVING, 1.0)
        return write(*arguments)

    train.build_run, train.train_step = build, slow_step  # type: ignore[attr-defined]
    evaluate._batches, saver._write = slow_batches, slow_write  # type: ignore[attr-defined]


def _let_ranks_read() -> None:
    """Never start Ray Data for the rows of ranks."""
    import_module("train_loop.data.stream.takeover").ray_stream.__kwdefaults__["after"] = float(2**20)


def main() -> None:
    """Serve, and run the requested program in each forked process."""
    request = serve_forks(MODULES)
    if request is None:
        return
    assert "ray" not in sys.modules
    hide_packages()
    # The forks would all have the same state.
    np.random.seed()
    obey_holds()
    _slow_down_phases(float(os.environ[_STEP_VARIABLE]))
    for number in request["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])
    if sys.argv[0] == "-m":
        sys.argv.pop(0)
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        if _READING_VARIABLE in os.environ:
            _let_ranks_read()
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
