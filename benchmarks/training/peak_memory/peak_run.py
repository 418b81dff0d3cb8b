"""Trainshed's loop with the peak memory of its second step.

Run as `torchrun -m benchmarks.training.peak_memory.peak_run OUT SPEC --run-dir DIR`.

The window runs from the end of the first step, when weights, gradients and optimizer state exist, to the second step's
last gradient. On the CPU the result is the kernel's peak (VmHWM, reset at the start) minus the resident memory at the
start (VmRSS). On a GPU it is the allocator's peak minus its allocated memory. `held_bytes` are those of all tensors at
the start.
"""

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from train_loop import run
from train_loop.system.exit import leave


class Peak:
    """Peak memory between the first and the second optimizer step."""

    def __init__(self) -> None:
        self.before: int | None = None
        self.held = 0
        self.bytes: int | None = None

    def step_ended(self, *_: Any) -> None:
        """Start the window at the end of the first step."""
        if self.before is None:
            self.held = held_bytes()
            self.before = begin_peak()

    def gradients_ready(self, *_: Any) -> None:
        """End the window before the second step's gradients are applied."""
        if self.before is not None and self.bytes is None:
            self.bytes = peak() - self.before


def main() -> None:
    """Run the loop, then write the peak of rank 0."""
    out, watch = Path(sys.argv.pop(1)), Peak()
    register_optimizer_step_post_hook(watch.step_ended)
    register_optimizer_step_pre_hook(watch.gradients_ready)
    run.main()
    if os.environ["RANK"] == "0":
        out.write_text(json.dumps({"peak_bytes": watch.bytes, "held_bytes": watch.held}))


def held_bytes() -> int:
    """Return the bytes of the storages of all tensors in this process."""
    # The loop hides what exists at its start from the garbage collector.
    gc.unfreeze()
    plain = [one for one in gc.get_objects() if type(one) in (torch.Tensor, nn.Parameter) and not one.is_meta]
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in plain}
    return sum(storages.values())


def begin_peak() -> int:
    """Reset the peak; return the bytes in use."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    Path("/proc/self/clear_refs").write_text("5")
    return status_bytes("VmRSS")


def peak() -> int:
    """Return the peak bytes since `begin_peak`."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else status_bytes("VmHWM")


def status_bytes(field: str) -> int:
    """Return a memory field of this process from /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) * 1024


if __name__ == "__main__":
    main()
    leave()
