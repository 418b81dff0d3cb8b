"""Starting what is measured: each program in processes of its own, one thread a rank."""

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
    """A program that was to be measured did not end well; the message is the last of what it said."""


def run_module(
    module: str,
    *arguments: object,
    log: Path,
    ranks: int | None = None,
    seconds: float = 600,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Run a Python module to its end, under torchrun where `ranks` are given. Raises ProgramError."""
    process = start_module(module, *arguments, log=log, ranks=ranks, variables=variables)
    try:
        code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        end(process)
        raise ProgramError(f"{module} did not end within {seconds:g} s: {last_words(log)}") from None
    if code:
        raise ProgramError(f"{module} ended with {code}: {last_words(log)}")


def ask_module(
    module: str,
    *arguments: object,
    here: Path,
    ranks: int | None = None,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> Any:
    """Run a Python module to its end, under torchrun where `ranks` are given; the JSON in its first argument.

    Raises ProgramError.
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
    """Start a Python module, its output in `log`; torchrun starts its ranks again up to so many times."""
    launcher = [] if ranks is None else ["torch.distributed.run", "--nproc-per-node", str(ranks)]
    launcher += ["--max-restarts", str(restarts)] if ranks is not None and restarts else []
    launcher += [] if ranks is None else ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "-m"]
    command = [sys.executable, "-m", *launcher, module, *map(str, arguments)]
    with log.open("ab") as output:
        return subprocess.Popen(command, stdout=output, stderr=output, env=environment() | dict(variables))


def environment() -> dict[str, str]:
    """This process's environment without what would point a program at somebody's service or cluster."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TRAINSHED_", "RAY_"))}
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def end(process: "subprocess.Popen[bytes]") -> None:
    """SIGKILL a program and all that it has started, at once."""
    with suppress(psutil.NoSuchProcess):
        # Not its process group: torchrun gives every rank one of its own.
        family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
        for member in family:
            with suppress(psutil.NoSuchProcess):
                member.kill()
        psutil.wait_procs(family, timeout=30)
    process.wait()


def last_words(log: Path) -> str:
    """The last line of a log that names an error or a signal, or else the last line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [
        line
        for line in lines
        if re.search(r"Error|terminate called|SIG(?!TERM)", line) and "ChildFailedError" not in line
    ]
    return (errors or lines or ["it said nothing"])[-1][:300]


def run_loop(spec: dict[str, Any], run_dir: Path, *, ranks: int, seconds: float = 600) -> list[dict[str, Any]]:
    """Run our loop under torchrun; its metrics lines. Raises ProgramError."""
    arguments, log = loop_arguments(spec, run_dir)
    run_module("train_loop.run", *arguments, log=log, ranks=ranks, seconds=seconds)
    return metrics(run_dir)


def loop_arguments(spec: dict[str, Any], run_dir: Path) -> tuple[list[object], Path]:
    """What `train_loop.run` is called with, the spec written beside the run directory, and where its output goes."""
    file = run_dir.with_suffix(".yaml")
    file.write_text(yaml.safe_dump(spec))
    return [file, "--run-dir", run_dir], run_dir.with_suffix(".log")


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The metrics lines of a run's first attempt."""
    return list(read_lines(RunDir(run_dir).attempt(1).metrics))
