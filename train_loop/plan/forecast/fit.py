"""The memory of a plan compared with that of a device. Pure."""

from dataclasses import dataclass
from typing import Literal

from train_loop.plan.fit import certain_needs
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


def fit_on(spec: JobSpec, plan: Plan, device: Device) -> DeviceFit:
    """Compare a plan with the memory of a device."""
    certain = max(need.device_bytes for need in certain_needs(spec, plan)) + CONTEXT_BYTES
    needed, room = plan.memory_bytes + CONTEXT_BYTES, device.memory
    with_margin = int(_MARGIN * plan.memory_bytes) + CONTEXT_BYTES
    verdict: Verdict = "does_not_fit" if certain > room else "tight" if with_margin > room else "fits"
    return DeviceFit(needed, room, verdict)
