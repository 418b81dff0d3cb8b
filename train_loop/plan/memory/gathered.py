"""Memory of unsharded parameters and gradients at each moment of a step at which it may be largest."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from train_loop.plan.batch import plan_batch
from train_loop.plan.memory.forward import Forward, chunk_rows
from train_loop.plan.memory.term import DTYPE_BYTES, trained_bytes
from train_loop.plan.mesh import MeshPlan
from train_loop.plan.model.counts import UnitSizes
from train_loop.plan.model.shape import ModelShape
from train_loop.spec import JobSpec

Peak = tuple[int, str]
"""Bytes in addition to the sharded gradients and the results of the forward pass, and their formula."""


def gathered_bytes(spec: JobSpec, shape: ModelShape, mesh: MeshPlan, forward: Forward, *, ordered: bool) -> Peak:
    """Return the bytes of unsharded parameters and gradients at the peak, without the sharded ones, and their formula.

    FSDP2 copies units also on one rank. The root unit, which has embeddings and head unless they are units,
    stays gathered while each layer is, and with several ranks the one after it. Sharded gradients that do not exist yet
    in a step's first micro-batch are subtracted, as are freed results of the forward pass. An `ordered` exchange has
    its buffer among the partial sums.
    """
    size, formula = max(_Step(spec, shape, mesh, forward, ordered).peaks())
    # Sharded gradients that do not exist yet may be more.
    return max(size, 0), formula


@dataclass(frozen=True)
class _Step:
    """The moments of a step."""

    spec: JobSpec
    shape: ModelShape
    mesh: MeshPlan
    forward: Forward
    ordered: bool

    @property
    def compute(self) -> int:
        """Return the bytes of a gathered weight and of its gradient."""
        return DTYPE_BYTES[self.spec.strategy.param_dtype]

    @property
    def reduced(self) -> int:
        """Return the bytes of a gradient in its reduction."""
        return 0 if self.ordered else DTYPE_BYTES[self.spec.strategy.reduce_dtype]

    @property
    def frozen(self) -> bool:
        """Return whether some weights have no gradients."""
        return self.shape.trained < self.shape.parameters

    @property
    def first(self) -> bool:
        """Return whether a step is one micro-batch. In later ones, all sharded gradients exist."""
        return plan_batch(self.spec.training, dp=self.mesh.dp).accumulation == 1

    @cached_property
    def units(self) -> UnitSizes:
        """Return the sizes of the units."""
        return self.shape.units(self.spec.strategy)

    @cached_property
    def root(self) -> int:
        """Return the values of the root's gradients."""
        if self.shape.counts is None:
            return 0 if self.frozen else self.units.root
        return max(self.units.root - self.shape.counts.idle_of_root, 0)

    @cached_property
    def share(self) -> float:
        """Return the share of the values of all other units that get gradients."""
        values = self.shape.parameters - self.units.root
        return min(max((self.shape.updated() - self.root) / values, 0.0), 1.0) if values > 0 else 1.0

    @cached_property
    def head(self) -> int:
        """Return the bytes of the head's whole gradient in the root unit, beyond the logits.

        Chunks of logits have the gradient themselves, and a head that is a unit has it only while it computes.
        """
        spec, shape = self.spec, self.shape
        tokens = spec.sequences_per_device * spec.data.sequence_length // self.mesh.sp
        is_trained = self.root >= shape.outputs * shape.hidden
        without = self.units.has_head or not is_trained or self.ordered or self._is_measured
        if without or chunk_rows(spec, shape, tokens=tokens) is not None:
            return 0
        return self.forward.beyond(self.compute * shape.outputs * shape.hidden)

    @property
    def _is_measured(self) -> bool:
        return self.spec.code is not None or self.shape.is_measured

    def peaks(self) -> Iterator[Peak]:
        """Yield the bytes at each moment."""
        if self.mesh.fsdp > 1:
            yield self._gather()
        yield from self._layers()
        yield from self._of_ends()
        yield from self._end()
        if not self.ordered:
            yield self._of_layer()

    def _gather(self) -> Peak:
        """Return the bytes when the root unit is gathered: what ranks receive, and the weights into which it is copied.

        Results of the forward pass do not exist yet.
        """
        absent = trained_bytes(self.spec) * self.shape.updated(self.mesh.fsdp) if self.first else 0
        formula = f"2 x {self.compute} bytes x root unit - results of the forward pass, which do not exist yet"
        return 2 * self.compute * self.units.root - self.forward.used - absent, formula

    def _layers(self) -> Iterator[Peak]:
        """Yield the bytes inside the layers, and at the start of backward."""
        compute, mesh, units, shape, strategy = self.compute, self.mesh, self.units, self.shape, self.spec.strategy
        master, outside, reshard = trained_bytes(self.spec), units.root, strategy.reshard_after_forward
        by_layer = strategy.wrap_policy.min_num_params is None and not strategy.precision
        ahead = units.ahead if mesh.fsdp > 1 or self._is_measured else units.gathered
        inside = outside + (0 if self.ordered else ahead)
        kept = 0 if reshard is None or reshard is True else units.all if reshard is False else units.all // reshard
        # A measured call shows the root's whole gradients at the peak of activations, after earlier micro-batches.
        early, later = (shape.call.root_gradients, 0) if shape.call is not None else (0, self._later)
        both = "layers gathered at once" if by_layer else "units gathered at once"
        restored = 0 if shape.quantized is None else shape.quantized.largest
        both += " + a restored weight" if restored else ""
        yield (
            compute * (inside + restored) + self.head + early - later,
            f"{compute} bytes x (embeddings + {both} + head's gradient) beyond the logits",
        )
        absent = master * shape.updated() // mesh.fsdp if self.first else 0
        yield (
            compute * (outside + kept) + self.head + early - absent,
            f"{compute} bytes x (all that stays gathered after forward + head's gradient) - gradients",
        )
        if not by_layer:
            # A unit by size may be as large as the model: its whole gradient exists before its shards. Counts in the
            # compute dtype may be more than parameters.
            widest = max(compute, *(DTYPE_BYTES[one] for one in strategy.precision.values()), 0)
            least = units.gathered * compute // widest
            shard = round(master * (self.root + self.share * least) / mesh.fsdp) if self.first else 0
            formula = f"{compute} bytes x (embeddings + the largest unit and its gradient) - its shards"
            yield compute * (outside + 2 * units.gathered) + self.head - shard, formula

    @property
    def _later(self) -> int:
        """Return the bytes of the root's sharded gradients, which do not exist before those of layers."""
        return trained_bytes(self.spec) * self.root // self.mesh.fsdp if self.first else 0

    def _of_ends(self) -> Iterator[Peak]:
        """Yield the bytes at the peaks of a head and of embeddings that are units.

        The head's weights and whole gradient both exist when backward begins. The table is not gathered in backward.
        """
        compute, units, frozen = self.compute, self.units, self.frozen
        # Bytes of sharded gradients here; others are in host memory.
        master = 0 if self.spec.strategy.offload_policy is True else trained_bytes(self.spec)
        if units.head:
            absent = 0 if frozen or not self.first else master * self.shape.updated(self.mesh.fsdp)
            gradient = 0 if frozen else self.forward.beyond(compute * units.head)
            formula = f"{compute} bytes x (root unit + head + its gradient) beyond the logits - gradients to come"
            yield compute * (units.root + units.head) + gradient - absent, formula
        of_ends = {"head": (units.head, self.forward.after_head), "embeddings": (units.embeddings, self.forward.used)}
        for name, (values, free) in of_ends.items():
            if values and not frozen:
                size, formula = self._reduction(name, values, last=values, free=free)
                yield compute * units.root + size, f"{compute} bytes x the root unit + {formula}"

    def _of_layer(self) -> Peak:
        """Return the bytes when the gradients of a layer are reduced, while the next one is gathered."""
        units, compute = self.units, self.compute
        size, formula = self._reduction(
            "a layer", round(self.share * units.gathered), last=0, free=self.forward.after_layer
        )
        size += compute * (units.root + units.ahead - units.gathered) - self._later
        return size, f"{compute} bytes x (root unit + a layer) + {formula}"

    def _end(self) -> Iterator[Peak]:
        """Yield the bytes when backward ends: gradients of tied embeddings are added, and those of the root reduced."""
        shape, compute, free = self.shape, self.compute, self.forward.used
        yield self._reduction("embeddings", self.root, last=0, free=free)
        if shape.tied and shape.labels is None and self.root >= shape.vocab * shape.hidden:
            formula = f"{compute} bytes x (root unit + 3 gradients of tied embeddings) - activations that are free"
            yield compute * (self.units.root + 3 * shape.vocab * shape.hidden) - free, formula

    def _reduction(self, name: str, values: int, *, last: int, free: int) -> Peak:
        """Return the bytes when the gradients of a unit are reduced; `free` are those of the forward pass.

        FSDP2 copies them to the reduce dtype. It then frees them but for the `last` ones, and allocates their shards.
        gloo makes another copy.
        """
        compute, reduced, fsdp = self.compute, self.reduced, self.mesh.fsdp
        on_gpu = bool(self.spec.scaling.resources_per_worker.get("GPU"))
        shard, copies = values // fsdp, 1 if on_gpu or fsdp == 1 else 2
        rest = compute * last if fsdp > 1 else 0
        # Sharded gradients are counted. In a step of one micro-batch, those of this unit do not exist before.
        absent = trained_bytes(self.spec) if self.first and self.spec.strategy.offload_policy is not True else 0
        sizes = {
            f"({compute} + {reduced}) bytes x gradients of {name}": (compute + reduced) * values,
            f"{reduced} bytes x ({copies} + 1 / fsdp) x gradients of {name}{f' + {rest} bytes' if rest else ''}": rest
            + reduced * (copies * values + shard),
        }
        formula, size = max(sizes.items(), key=lambda one: one[1])
        return size - free - absent * shard, f"{formula} - activations that are free"
