"""Traces and memory of chosen steps, into the run directory."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch.profiler import profile

from train_loop.assemble import Run


@contextmanager
def profiled(run: Run) -> Iterator[None]:
    """Profile the step that is done inside, where training.profile_steps names it."""
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
    file("trace.json").parent.mkdir(parents=True, exist_ok=True)
    found.export_chrome_trace(str(file("trace.json")))
    if on_gpu:
        # What https://docs.pytorch.org/memory_viz shows.
        torch.cuda.memory._dump_snapshot(str(file("memory.pickle")))  # type: ignore[no-untyped-call]
        torch.cuda.memory._record_memory_history(enabled=None)
    else:
        file("memory.txt").write_text(found.key_averages().table(sort_by="self_cpu_memory_usage"))
    run.journal.event("profiled", step=step, folder=str(file("trace.json").parent))
