"""A term of the memory estimate, and the sizes that all terms share."""

from dataclasses import dataclass
from typing import Literal

from train_loop.spec import JobSpec

Place = Literal["device", "host"]
DTYPE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
FROZEN = "frozen_parameters"
"""Name of the memory term of frozen weights below adapters."""
_ESTIMATED = ("adapted_experts", "activations", "offloaded_activations", "attention_mask", "attention_scores", "logits")


@dataclass(frozen=True)
class MemoryTerm:
    """One part of the memory in use on a worker."""

    name: str
    bytes: int
    formula: str
    place: Place = "device"
    """`device` for the memory in which the model computes; `host` for host memory of a worker with a GPU."""

    @property
    def estimated(self) -> bool:
        """Return whether the bytes depend on the model's code and on kernels, rather than on sizes alone."""
        return self.name in _ESTIMATED


def trained_bytes(spec: JobSpec) -> int:
    """Return the bytes of a trained weight between steps: adapters are fp32, whatever the frozen weights are."""
    return 4 if spec.model.lora is not None else DTYPE_BYTES[spec.model.master_dtype]
