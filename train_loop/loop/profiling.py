"""Profiles of chosen steps, written to the run directory."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch.profiler import profile

from train_loop.loop.build import Run
from train_loop.run_dir import copy_files


@contextmanager
def profiled(run: Run) -> Iterator[None]:
    """Profile the step in the body, if training.profile_steps contains it."""
    step = run.state.step + 1
    if step not in run.spec.training.profile_steps:
        yield
        return
    on_gpu = run.mesh.device.type == "cuda"
    if on_gpu:
        torch.cuda.memory._record_memory_history(stacks="python")
    with profile(record_shapes=True, profile_memory=True) as found:
        yield
    file = partial(run.session.run_dir.attempt(run.session.attempt).profile, run.mesh.rank, step)
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
    run.session.journal.event("profiled", step=step, folder=str(folder))
