"""Launch of measured programs in separate processes, with one thread per rank."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil
import yaml

from train_loop.run_dir import RunDir, read_lines


class ProgramError(RuntimeError):
    """The failure of a measured program; the message contains the last line of its log."""


def run_module(
    module: str,
    *arguments: object,
    log: Path,
    ranks: int | None = None,
    seconds: float = 600,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Run a Python module until it exits, under torchrun if `ranks` is given. Raises ProgramError."""
    process = start_module(module, *arguments, log=log, ranks=ranks, variables=variables)
    try:
        code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        end(process)
        raise ProgramError(f"{module} did not finish within {seconds:g} s: {last_words(log)}") from None
    if code:
        raise ProgramError(f"{module} exited with code {code}: {last_words(log)}")


def run_for_json(
    module: str,
    *arguments: object,
    here: Path,
    ranks: int | None = None,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> Any:
    """Run a Python module until it exits, under torchrun if `ranks` is given. Return the JSON that it writes.

    The path of the JSON file is the module's first argument. Raises ProgramError.
    """
    out = here / "found.json"
    run_module(module, out, *arguments, log=here / "log", ranks=ranks, variables=variables)
    return json.loads(out.read_bytes())


def start_module(
    module: str,
    *arguments: object,
    log: Path,
    ranks: int | None = None,
    restarts: int = 0,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> "subprocess.Popen[bytes]":
    """Start a Python module with its output in `log`; torchrun restarts its ranks up to `restarts` times."""
    launcher = [] if ranks is None else ["torch.distributed.run", "--nproc-per-node", str(ranks)]
    launcher += ["--max-restarts", str(restarts)] if ranks is not None and restarts else []
    launcher += [] if ranks is None else ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "-m"]
    command = [sys.executable, "-m", *launcher, module, *map(str, arguments)]
    with log.open("ab") as output:
        return subprocess.Popen(command, stdout=output, stderr=output, env=environment() | dict(variables))


def environment() -> dict[str, str]:
    """Return this process's environment without the variables of an existing service or cluster."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TRAINSHED_", "RAY_"))}
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def end(process: "subprocess.Popen[bytes]") -> None:
    """Kill a program and all its child processes with SIGKILL."""
    with suppress(psutil.NoSuchProcess):
        # Not its process group: torchrun gives every rank a separate one.
        family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
        for member in family:
            with suppress(psutil.NoSuchProcess):
                member.kill()
        psutil.wait_procs(family, timeout=30)
    process.wait()


def last_words(log: Path) -> str:
    """Return the last line of a log with an error or a signal, or else the last line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [
        line
        for line in lines
        if re.search(r"Error|terminate called|SIG(?!TERM)", line) and "ChildFailedError" not in line
    ]
    return (errors or lines or ["no output"])[-1][:300]


def run_loop(spec: dict[str, Any], run_dir: Path, *, ranks: int, seconds: float = 600) -> list[dict[str, Any]]:
    """Run Trainshed's loop under torchrun and return its metrics lines. Raises ProgramError."""
    arguments, log = loop_arguments(spec, run_dir)
    run_module("train_loop.run", *arguments, log=log, ranks=ranks, seconds=seconds)
    return metrics(run_dir)


def loop_arguments(spec: dict[str, Any], run_dir: Path) -> tuple[list[object], Path]:
    """Write the spec next to the run directory. Return the arguments of `train_loop.run` and its log file."""
    file = run_dir.with_suffix(".yaml")
    file.write_text(yaml.safe_dump(spec))
    return [file, "--run-dir", run_dir], run_dir.with_suffix(".log")


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Return the metrics lines of a run's first attempt."""
    return list(read_lines(RunDir(run_dir).attempt(1).metrics))


def expect_starts(run_dir: str, count: int) -> None:
    """Raise ProgramError unless the ranks of a job have started as often as the benchmark has caused."""
    attempts = RunDir.at(run_dir).attempts()
    events = [line for attempt in attempts for line in read_lines(attempt.events)]
    started = sum(event["event"] == "training_started" for event in events)
    if started != count:
        losses = [event.get("error") for event in events if event["event"] == "workers_lost"]
        raise ProgramError(f"the ranks have started {started} times; expected {count}; losses: {losses}")
