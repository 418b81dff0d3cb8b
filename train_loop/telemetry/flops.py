"""FLOPs per trained token or row, and model FLOPs utilisation (MFU)."""

import re
from dataclasses import asdict, dataclass
from typing import Any

FORMULA = "(6·N + 12·L·d·s) · tokens/s per device ÷ peak"
"""Model FLOPs utilisation (Chowdhery et al., 2022): N parameters, L layers, d heads x head_dim, s sequence length.

N counts all parameters that a token uses: of a mixture of experts, only the experts that a router chooses.

By convention, recomputed activations do not count, and attention counts as neither causal nor split by documents.
Packed rows therefore get a higher value the shorter their documents are.
"""
ROW_FORMULA = "FLOPs of a row · rows/s per device ÷ peak"
"""Model FLOPs utilisation of own code, whose FLOPs are counted in a call of its first rows."""

_HALF = ("bf16", "fp16")
# From NVIDIA's data sheets: dense, not sparse; half precision on tensor cores, and fp32 without TF32, which torch
# disables by default. The first pattern that matches the device's name counts.
_PEAKS: tuple[tuple[str, tuple[str, ...], float, float], ...] = (
    # pattern, dtypes of its tensor cores, TFLOP/s in them, TFLOP/s in fp32
    (r"\bGB200\b", _HALF, 2500.0, 80.0),
    (r"\bB200\b", _HALF, 2250.0, 75.0),
    (r"\bH[12]00 NVL\b", _HALF, 835.5, 60.0),
    (r"\bH100 PCIe\b", _HALF, 756.5, 51.0),
    (r"\b(H100|H200|H800|GH200)\b", _HALF, 989.5, 67.0),
    (r"\bH20\b", _HALF, 148.0, 44.0),
    (r"\bA(100|800)\b", _HALF, 312.0, 19.5),
    (r"\bA30\b", _HALF, 165.0, 10.3),
    (r"\bA40\b", _HALF, 149.7, 37.4),
    (r"\bA10G\b", _HALF, 70.0, 35.0),
    (r"\bA10\b", _HALF, 125.0, 31.2),
    (r"\bL40S\b", _HALF, 362.05, 91.6),
    (r"\bL40\b", _HALF, 181.05, 90.5),
    (r"\bL4\b", _HALF, 121.0, 30.3),
    (r"\bV100-SXM2\b", ("fp16",), 125.0, 15.7),
    (r"\bV100-PCIE\b", ("fp16",), 112.0, 14.0),
    (r"\bT4\b", ("fp16",), 65.0, 8.1),
)


def peak_flops(device: str, dtype: str) -> float | None:
    """Return the dense FLOP/s of a CUDA device, by name, in a compute dtype (bf16, fp16, fp32); None if unknown."""
    if "MIG" in device:  # a slice of a GPU has the name of the whole GPU
        return None
    for pattern, tensor_dtypes, tensor, plain in _PEAKS:
        if re.search(pattern, device):
            peaks = dict.fromkeys(tensor_dtypes, tensor) | {"fp32": plain}
            return peaks[dtype] * 1e12 if dtype in peaks else None
    return None


@dataclass(frozen=True)
class Flops:
    """Numbers from which the MFU of a language model is computed."""

    parameters: int
    layers: int
    attention_width: int
    """Number of heads x head_dim."""
    sequence_length: int
    device: str
    dtype: str

    @property
    def per_token(self) -> int:
        """Return the FLOPs of one token, forward and backward."""
        return 6 * self.parameters + 12 * self.layers * self.attention_width * self.sequence_length

    @property
    def peak(self) -> float | None:
        """Return the peak FLOP/s of one device; None if unknown."""
        return peak_flops(self.device, self.dtype)

    def mfu(self, *, tokens: float, rows: float) -> float | None:
        """Return the fraction of its peak that a device reaches at `tokens` per second; None if the peak is unknown."""
        peak = self.peak
        return None if peak is None else self.per_token * tokens / peak

    def stated(self) -> dict[str, Any]:
        """Return the formula and its numbers, for the event `training_started`."""
        return {"formula": FORMULA, **asdict(self), "flops_per_token": self.per_token, "peak_flops": self.peak}


@dataclass(frozen=True)
class RowFlops:
    """Numbers from which the MFU of own code is computed."""

    per_row: int | None
    """FLOPs of a row, forward and backward; None if they are unknown."""
    device: str
    dtype: str

    @property
    def peak(self) -> float | None:
        """Return the peak FLOP/s of one device; None if unknown."""
        return peak_flops(self.device, self.dtype)

    def mfu(self, *, tokens: float, rows: float) -> float | None:
        """Return the fraction of its peak that a device reaches at `rows` per second; None if one is unknown."""
        peak = self.peak
        return None if peak is None or self.per_row is None else self.per_row * rows / peak

    def stated(self) -> dict[str, Any]:
        """Return the formula and its numbers, for the event `training_started`."""
        numbers = {"device": self.device, "dtype": self.dtype, "flops_per_row": self.per_row}
        return {"formula": ROW_FORMULA, **numbers, "peak_flops": self.peak}
