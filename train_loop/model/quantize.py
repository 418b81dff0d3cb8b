"""Frozen linear layers whose weights are stored in four or eight bits: `model.quantize_base`, for QLoRA.

Dettmers et al., "QLoRA" (2023). The values of a row that share a scale are those of 64 consecutive inputs (nf4), or all
(int8). Each row is quantised by itself. A rank therefore reads and quantises its rows only, and the bits do not depend
on how ranks share them. Codes and scales are plain parameters, which FSDP2 gathers as they are.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from train_loop.errors import ModelError
from train_loop.model.families.anatomy import Anatomy, plain_linears
from train_loop.model.lora.names import by_plain_name
from train_loop.plan import RESTORED_AT_ONCE

Kind = Literal["nf4", "int8"]
BLOCK = 64
"""Inputs that share a scale with nf4."""

# The values of NF4: quantiles of the normal distribution, of which one is 0 (appendix E of the paper).
_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
_SCALES = torch.bfloat16
"""dtype of scales."""
_LARGEST = 127
"""Largest code of int8."""


class QuantizedLinear(nn.Module):
    """A linear layer whose weight [out, in] is frozen, and stored as codes and scales."""

    def __init__(self, linear: nn.Linear, kind: Kind) -> None:
        super().__init__()
        self.kind, self.in_features, self.out_features = kind, linear.in_features, linear.out_features
        device = linear.weight.device
        width = linear.in_features // 2 if kind == "nf4" else linear.in_features
        codes = torch.empty(
            linear.out_features, width, dtype=torch.uint8 if kind == "nf4" else torch.int8, device=device
        )
        self.codes = nn.Parameter(codes, requires_grad=False)
        """nf4: [out, in / 2], the first of two values in the upper half of a byte; int8: [out, in]."""
        blocks = linear.in_features // BLOCK if kind == "nf4" else 1
        scales = torch.empty(linear.out_features, blocks, dtype=_SCALES, device=device)
        self.scales = nn.Parameter(scales, requires_grad=False)
        """[out, in / 64] or [out, 1]: the value of the largest code."""
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., in] → [..., out], with the restored weight in the dtype of the input."""
        output: Tensor = _Product.apply(x, self.codes, self.scales, self.kind)  # type: ignore[no-untyped-call]
        return output if self.bias is None else output + self.bias

    @property
    def stored_bytes(self) -> int:
        """Bytes of codes and scales."""
        return sum(one.numel() * one.element_size() for one in (self.codes, self.scales))

    def extra_repr(self) -> str:
        """Return the sizes, for `print(model)`."""
        return f"in_features={self.in_features}, out_features={self.out_features}, {self.kind}"

    @contextmanager
    def writable(self) -> Iterator[Tensor]:
        """Yield the weight in fp32, uninitialised and sharded as its codes; at the end, its values are quantised.

        Codes are then those of the stored values, whatever the dtype of other weights.
        """
        codes, scales = _local(self.codes), _local(self.scales)
        own = torch.empty(len(codes), self.in_features, dtype=torch.float32, device=codes.device)
        yield _sharded_like(self.codes, own, (self.out_features, self.in_features))
        with torch.no_grad():
            for rows in _parts(own):
                codes[rows], scales[rows] = quantise(own[rows], self.kind)

    def restored(self, dtype: torch.dtype) -> Tensor:
        """Return the weight that the layer computes with, sharded as its codes."""
        own = restore(_local(self.codes), _local(self.scales), self.kind, dtype)
        return _sharded_like(self.codes, own, (self.out_features, self.in_features))


class _Product(torch.autograd.Function):
    """x · Wᵀ. Backward restores the weight again, so that only its codes are kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, scales: Tensor, kind: Kind) -> Tensor:
        ctx.save_for_backward(codes, scales)
        ctx.kind = kind
        return F.linear(x, restore(codes, scales, kind, x.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        codes, scales = ctx.saved_tensors
        return gradient @ restore(codes, scales, ctx.kind, gradient.dtype), None, None, None


def frozen_linears(anatomy: Anatomy, layers: Iterable[nn.Module], kind: Kind) -> list[nn.Linear]:
    """Return the frozen linear modules in the layers of a model with adapters.

    Raises ModelError for a mixture of experts, if there are none, and if rows of nf4 are not whole blocks.
    """
    name, setting = type(anatomy.model).__name__, f"quantize_base={kind}"
    if anatomy.experts is not None:
        raise ModelError(
            f"{setting} is not supported for {name}: its experts hold most of the weights, and are not linear layers; "
            "remove quantize_base"
        )
    found = [one for one in plain_linears(anatomy, layers) if not one.weight.requires_grad]
    if not found:
        raise ModelError(
            f"{setting} has no effect on {name}, which has no frozen torch.nn.Linear in its layers; remove it"
        )
    odd = next((one for one in found if kind == "nf4" and one.in_features % BLOCK), None)
    if odd is not None:
        names = {module: path for path, module in anatomy.model.named_modules()}
        raise ModelError(
            f"{setting} needs numbers of inputs that are multiples of {BLOCK}, and {names[odd]} of {name} has "
            f"{odd.in_features}; choose quantize_base: int8, or remove it"
        )
    return found


def quantize_layers(anatomy: Anatomy, layers: Iterable[nn.Module], kind: Kind) -> None:
    """Replace the frozen linear modules in the layers of a model with adapters, in place. Raises ModelError."""
    model, chosen = anatomy.model, set(frozen_linears(anatomy, layers, kind))
    for name, module in [*model.named_modules()]:
        if module in chosen:
            holder, _, leaf = name.rpartition(".")
            assert isinstance(module, nn.Linear), "only these are chosen"
            setattr(model.get_submodule(holder), leaf, QuantizedLinear(module, kind))


def quantized_layers(model: nn.Module) -> dict[str, QuantizedLinear]:
    """Return the quantised layers of a model by the names that their weights have without adapters."""
    of = {id(module.codes): module for module in model.modules() if isinstance(module, QuantizedLinear)}
    named = by_plain_name(model, ((name, p) for name, p in model.named_parameters() if id(p) in of))
    return {f"{name.removesuffix('codes')}weight": of[id(codes)] for name, codes in named.items()}


def quantise(rows: Tensor, kind: Kind) -> tuple[Tensor, Tensor]:
    """Return codes and scales of rows [n, in], the nearest ones: see `QuantizedLinear`."""
    size = BLOCK if kind == "nf4" else rows.shape[1]
    blocks = rows.float().view(len(rows), -1 if len(rows) else rows.shape[1] // size, size)
    largest = blocks.abs().amax(2)
    scales = largest.to(_SCALES)
    # Of a block of zeros, every scale is right.
    whole = torch.where(scales == 0, 1, scales.float()).unsqueeze(2)
    if kind == "int8":
        return (blocks / whole * _LARGEST).round().clamp(-_LARGEST, _LARGEST).flatten(1).to(torch.int8), scales
    table = torch.tensor(_NF4, device=rows.device)
    nearest = torch.bucketize(blocks / whole, (table[1:] + table[:-1]) / 2, out_int32=True).flatten(1).to(torch.uint8)
    return nearest[:, ::2] << 4 | nearest[:, 1::2], scales


def restore(codes: Tensor, scales: Tensor, kind: Kind, dtype: torch.dtype) -> Tensor:
    """Return the values [n, in] of codes and scales, computed in fp32 and rounded once."""
    width = codes.shape[1] * (2 if kind == "nf4" else 1)
    values = torch.empty(len(codes), width, dtype=dtype, device=codes.device)
    for rows in _parts(values):
        values[rows] = _restored(codes[rows], scales[rows], kind)
    return values


def _restored(codes: Tensor, scales: Tensor, kind: Kind) -> Tensor:
    if kind == "int8":
        return codes * (scales.float() / _LARGEST)
    table = torch.tensor(_NF4, device=codes.device)
    both = torch.stack((codes >> 4, codes & 15), 2).flatten().int()
    blocks = table.index_select(0, both).view(len(codes), -1, BLOCK)
    return (blocks * scales.float().unsqueeze(2)).flatten(1)


def _parts(rows: Tensor) -> Iterator[slice]:
    """Yield slices of rows [n, in] with few enough values to compute at once."""
    count = max(RESTORED_AT_ONCE // max(rows.shape[1], 1), 1)
    for first in range(0, len(rows), count):
        yield slice(first, first + count)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def _sharded_like(codes: Tensor, own: Tensor, shape: tuple[int, int]) -> Tensor:
    """Return this rank's rows of a matrix as a part of it."""
    if not isinstance(codes, DTensor):
        return own
    return DTensor.from_local(
        own, codes.device_mesh, codes.placements, run_check=False, shape=torch.Size(shape), stride=(shape[1], 1)
    )


def count_values(model: nn.Module, *, frozen: bool = False) -> int:
    """Return the number of weights of a model, or of its frozen ones; a quantised weight counts with its values."""
    plain = sum(p.numel() for p in model.parameters() if not (frozen and p.requires_grad))
    layers = (one for one in model.modules() if isinstance(one, QuantizedLinear))
    stored = sum(one.in_features * one.out_features - one.codes.numel() - one.scales.numel() for one in layers)
    return plain + stored
