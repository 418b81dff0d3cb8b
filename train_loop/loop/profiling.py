"""Profiles of chosen steps, written to the run directory."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch.profiler import profile

from train_loop.loop.session import Session
from train_loop.run_dir import copy_files


@contextmanager
def profiled(step: int, session: Session, *, steps: Collection[int], device: torch.device) -> Iterator[None]:
    """Profile the body, which trains `step`, if `steps` contains it."""
    if step not in steps:
        yield
        return
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.memory._record_memory_history(stacks="python")
    with profile(record_shapes=True, profile_memory=True) as found:
        yield
    file = partial(session.run_dir.attempt(session.attempt).profile, session.rank, step)
    folder = file("trace.json").parent
    with TemporaryDirectory() as work:
        found.export_chrome_trace(f"{work}/{file('trace.json').name}")
        if on_gpu:
            # A snapshot for https://docs.pytorch.org/memory_viz.
            torch.cuda.memory._dump_snapshot(f"{work}/{file('memory.pickle').name}")  # type: ignore[no-untyped-call]
            torch.cuda.memory._record_memory_history(enabled=None)
        else:
            table = found.key_averages().table(sort_by="self_cpu_memory_usage")
            Path(work, file("memory.txt").name).write_text(table)
        copy_files(Path(work), folder)
    session.journal.event("profiled", step=step, folder=str(folder))
