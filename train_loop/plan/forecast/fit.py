"""The memory of a plan compared with that of a device. Pure."""

from dataclasses import dataclass
from typing import Literal

from train_loop.plan.fit import certain_needs, estimated_need
from train_loop.plan.forecast.devices import Device
from train_loop.plan.plan import Plan
from train_loop.spec import JobSpec

Verdict = Literal["fits", "tight", "does_not_fit"]
CONTEXT_BYTES = 3 * 2**29
"""Memory of a GPU that CUDA, its libraries and NCCL take: 1.5 GiB."""
_MARGIN = 1.1
"""Factor of the estimate with which a plan must fit: the allocator keeps freed blocks, and terms are estimates."""


@dataclass(frozen=True)
class DeviceFit:
    """The memory that a worker needs on its GPU, and how it compares with the device."""

    needed: int
    """Estimated bytes at the peak of a step, with those of CUDA itself."""
    memory: int
    """Bytes of the device."""
    verdict: Verdict
    """`tight` if the terms that are certain fit, and the estimate with its margin does not."""


@dataclass(frozen=True)
class RankMemory:
    """The memory in which a worker computes."""

    device: str
    """Name of its GPU, as CUDA reports it; `cpu` without one."""
    bytes: int
    on_gpu: bool


def fit_on(spec: JobSpec, plan: Plan, device: Device) -> DeviceFit:
    """Compare a plan with the memory of a device."""
    return fit_in(spec, plan, device.memory)


def fits_rank(spec: JobSpec, plan: Plan, memory: RankMemory) -> bool:
    """Return whether a plan with a margin fits the memory of a worker: that of its GPU, or its share of a host."""
    if memory.on_gpu:
        return fit_in(spec, plan, memory.bytes).verdict == "fits"
    return int(_MARGIN * estimated_need(spec, plan).host_bytes) <= memory.bytes


def fit_in(spec: JobSpec, plan: Plan, room: int) -> DeviceFit:
    """Compare a plan with the bytes of a GPU."""
    certain = max(need.device_bytes for need in certain_needs(spec, plan)) + CONTEXT_BYTES
    needed = plan.memory_bytes + CONTEXT_BYTES
    with_margin = int(_MARGIN * plan.memory_bytes) + CONTEXT_BYTES
    verdict: Verdict = "does_not_fit" if certain > room else "tight" if with_margin > room else "fits"
    return DeviceFit(needed, room, verdict)
