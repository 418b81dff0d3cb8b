"""FLOPs per trained token or row, and model FLOPs utilisation (MFU)."""

from dataclasses import asdict, dataclass
from typing import Any

from train_loop.plan import device_of

FORMULA = "(6·N - 2·F + 12·L·d·s) · tokens/s per device ÷ peak"
"""Model FLOPs utilisation (Chowdhery et al., 2022): N parameters, L layers, d heads x head_dim, s sequence length.

F of the parameters are frozen: their gradients are not computed. N counts all parameters that a token uses: of a
mixture of experts, only the experts that a router chooses.

By convention, recomputed activations do not count, and attention counts as neither causal nor split by documents.
Packed rows therefore get a higher value the shorter their documents are.
"""
ROW_FORMULA = "FLOPs of a row · rows/s per device ÷ peak"
"""Model FLOPs utilisation of own code, whose FLOPs are counted in a call of its first rows."""


def peak_flops(device: str, dtype: str) -> float | None:
    """Return the dense FLOP/s of a CUDA device, by name, in a compute dtype (bf16, fp16, fp32); None if unknown."""
    known = device_of(device)
    return None if known is None else known.peak(dtype)


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
    frozen: int = 0
    """Parameters without gradients."""

    @property
    def per_token(self) -> int:
        """Return the FLOPs of one token, forward and backward."""
        products = 6 * self.parameters - 2 * self.frozen
        return products + 12 * self.layers * self.attention_width * self.sequence_length

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
