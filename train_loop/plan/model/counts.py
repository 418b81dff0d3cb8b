"""Numbers of a model that has been built on the meta device: its parameters, FSDP units, and what a call keeps."""

from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True)
class UnitSizes:
    """Numbers of parameters of a model's FSDP units.

    A parameter with its own dtype counts as the number of values in the compute dtype that need its bytes.
    """

    root: int
    """Parameters outside the other units, and tied embeddings: they stay gathered."""
    all: int
    """Parameters of all other units."""
    largest: int
    """Parameters of the largest unit, without those of units inside of it."""
    gathered: int
    """Most parameters that one unit and the units around it gather; without those of the two fields at the end."""
    ahead: int
    """The same with the unit that is gathered ahead."""
    has_head: bool = False
    """True if the head is a unit."""
    embeddings: int = 0
    """Parameters of the input embeddings that are a unit outside of layers, and are not gathered in backward."""
    head: int = 0
    """Parameters of the head that is a unit outside of layers, and stays gathered until its backward."""


@dataclass(frozen=True)
class ComputeBytes:
    """Bytes of a value that a model computes, if some of its modules have a dtype of their own."""

    layer: int
    """Most bytes in any layer."""
    layers: float
    """Mean of the layers."""
    head: int
    """Bytes of a logit."""


RESTORED_AT_ONCE = 2**22
"""Values of a quantised weight that are restored at once, so that tensors of the steps stay small."""


@dataclass(frozen=True)
class QuantizedWeights:
    """Frozen weights that are stored as codes and scales, `model.quantize_base`."""

    values: int
    bytes: int
    """Bytes of all codes and scales."""
    largest: int
    """Values of the largest weight, which is restored while it computes."""


@dataclass(frozen=True)
class ParameterCounts:
    """Exact numbers of parameters, from the model on the meta device."""

    total: int
    trained: int
    """Parameters without the frozen ones."""
    trained_matrices: int
    """Trained matrices outside embeddings and head, which muon updates."""
    layer: int
    """Parameters of the largest decoder layer."""
    outside: int
    """Parameters outside the decoder layers."""
    module: int
    """Parameters of the largest module without its children: each rank draws them whole for random weights."""
    units: UnitSizes | None = None
    """The units, if they are not the layers alone."""
    compute: ComputeBytes | None = None
    """Bytes of what modules compute with `precision`; None without it."""
    wholes: int = 0
    """Parameters that each rank holds whole, `ignored_params`."""
    trained_wholes: int = 0
    unused: int = 0
    """Trained parameters that get no gradient, such as a table of entities for rows of text."""
    idle_of_root: int = 0
    """Parameters in FSDP's root unit that get no gradient: frozen or unused."""
    buffers: int = 0
    """Bytes of the buffers, which every rank holds whole."""
    idle: int = 0
    """Parameters of experts that a token does not use."""
    experts: int = 0
    """Parameters of a layer's experts."""
    groups: tuple[dict[str, str | float | int], ...] = ()
    """Parameter groups of the optimizer with their settings and sizes."""
    rows: tuple[tuple[int, int, int], ...] = ()
    """Sizes of the first dimension, of which each rank has a part, with the values and trained values that have it.

    They are without `wholes`; () if they are not known.
    """
    of_rank: "ParameterCounts | None" = None
    """The numbers of what a rank has, if ranks share layers and their plan is known."""

    def shared(self, tp: int, ep: int) -> "ParameterCounts":
        """Return the numbers of a rank's part of each layer; it draws whole modules."""
        parts = _parts(self, tp)
        parts["layer"] = -(-(self.layer - self.experts) // tp) - (-self.experts // max(tp, ep))
        part, units = self.of_rank or replace(self, rows=(), **parts), self.units
        if units is None:
            return replace(part, module=self.module)
        held = _parts(units, tp)
        if ep > 1 and self.layer:
            # Units with layers have a part of the experts.
            layers = ("all", "largest", "gathered", "ahead")
            held |= {name: getattr(units, name) * parts["layer"] // self.layer for name in layers}
        return replace(part, module=self.module, units=replace(units, **held))


@dataclass(frozen=True)
class KeptBytes:
    """Bytes per token that a model keeps for its backward pass, counted in a call without memory."""

    inputs: int
    """Inputs of all layers, which stay also if layers are computed again."""
    layer: int
    """All that the layer keeps which keeps most; with tiles, of its MLPs one tile."""
    layers: int
    """All that the layers keep together, with inputs; with tiles, of their MLPs one tile."""
    outside: int
    """All that the model keeps outside of its layers and logits."""
    selected: int = 0
    """Matrix products of all layers whose results `selective` keeps."""
    peak: int = 0
    """Most that a layer has in its backward pass, with gradients of its results; 0 if it is not known."""


@dataclass(frozen=True)
class CallSizes:
    """Sizes of a call with a micro-batch, counted without values: of own code, encoders and models with labels."""

    rows: int
    activations: int | None = None
    """Bytes at the peak of forward and backward, without parameters and their gradients; None if unknown."""
    root_gradients: int = 0
    """Bytes of whole gradients that FSDP's root unit has at that time."""
    flops: int | None = None
    """FLOPs of forward and backward of own code, recomputation not included; None if unknown."""
    problem: str | None = None
    """Why they are unknown."""

    @property
    def flops_per_row(self) -> int | None:
        """Return the FLOPs of a row; None if unknown."""
        return None if self.flops is None else self.flops // self.rows


def _parts(sizes: "ParameterCounts | UnitSizes", ranks: int) -> dict[str, Any]:
    return {name: -(-size // ranks) for name, size in asdict(sizes).items() if type(size) is int}
