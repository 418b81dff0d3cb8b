"""The work of a step for one worker: FLOPs, bytes of GPU memory, and exchanged bytes. Pure.

Each amount is a range, from the fastest to the slowest kernels with the same result.
"""

from typing import NamedTuple

from train_loop.plan.memory.forward import MASK_BYTES, mask_bytes, recomputed_share
from train_loop.plan.memory.term import DTYPE_BYTES, FROZEN, trained_bytes
from train_loop.plan.mesh import Axis
from train_loop.plan.model.counts import RESTORED_AT_ONCE
from train_loop.plan.model.shape import ModelShape
from train_loop.plan.plan import Plan
from train_loop.spec import JobSpec

_FLASH_PASSES = 3.5
"""Forward and backward passes of attention, in forward passes: backward computes the scores again."""
_FUSED, _SEPARATE = (10, 3, 3), (38, 10, 5)
"""Values of a token that a layer's norms, positions and activation read or write in a forward pass: of H, of heads and
kv heads, and of F. Fused by a compiler or by hand; and one operation after the other, as transformers computes them."""
_LOGIT_BYTES = (8, 30)
"""Bytes that the loss reads and writes for each logit in both passes."""
_UPDATE_BYTES = (32, 60)
"""Bytes of an fp32 parameter's update: clipping, and a fused AdamW; its copies to and from other dtypes."""
_COPY_BYTES = (4, 20)
"""Bytes for each parameter of a micro-batch: copies into and out of the buffers of gathers and reductions."""
_ROUNDING_BYTES = (5, 33)
"""Bytes that rounding to float8 reads and writes for a value in bf16, with its scale: two passes of a fused kernel; one
operation after the other, with values in fp32 between them."""
_RESTORING_BYTES = {"nf4": 31, "int8": 11}
"""Bytes that one operation after the other reads and writes for each value of a quantised weight that it restores in
bf16. In caches, only codes are read and values written."""
_RESTORING_KERNELS = {"nf4": 10, "int8": 4}
"""Kernels that restore a part of a quantised weight."""
_ADAPTED = (1.5, 3.5)
"""Values that adapters read and write in a forward pass for each input and output of their layers: inputs once, outputs
twice if results are added at once, and six times in separate operations."""
_LAYER_KERNELS, _ADAPTED_KERNELS = 40, 28
"""Kernels of a layer's pass, and those of adapters of its seven linear layers."""


class Range(NamedTuple):
    """The least and the most that an amount may be."""

    least: float
    most: float

    def times(self, factor: float) -> "Range":
        """Return the range of a multiple."""
        return Range(self.least * factor, self.most * factor)

    def plus(self, other: "Range") -> "Range":
        """Return the range of a sum."""
        return Range(self.least + other.least, self.most + other.most)

    def over(self, rate: float, parts: tuple[float, float]) -> "Range":
        """Return the seconds of an amount at a rate of which the lowest and the highest part are reached."""
        return Range(self.least / (rate * parts[1]), self.most / (rate * parts[0]))


def total(*ranges: Range) -> Range:
    """Return the range of a sum."""
    return Range(sum(one.least for one in ranges), sum(one.most for one in ranges))


class AttentionWork(NamedTuple):
    """FLOPs of attention in a micro-batch, if rows have short documents and if they have one, and the slower kernel."""

    least: float
    most: float
    masked: bool
    """True if it may be a kernel with a mask, which computes all scores; others skip those that the mask hides."""


class Exchange(NamedTuple):
    """Bytes that a worker sends in a micro-batch along an axis of the mesh."""

    axis: Axis
    size: float
    hidden: bool
    """True if computation may overlap with it."""


def tokens_of(spec: JobSpec, plan: Plan) -> int:
    """Return the tokens of a micro-batch that a worker computes."""
    return spec.sequences_per_device * spec.data.sequence_length // plan.mesh.sp


class Repeated(NamedTuple):
    """The share of a forward pass that backward repeats, by kind of work."""

    products: float
    attention: float
    rest: float


def repeated(spec: JobSpec, shape: ModelShape) -> Repeated:
    """Return the share of the layers' forward pass that backward repeats; at most, with a memory budget."""
    how = spec.model.gradient_checkpointing
    share = recomputed_share(how, shape.layers)
    if how != "selective":
        return Repeated(share, share, share)
    # Products of k, o and up.
    again = shape.hidden * ((shape.heads + shape.kv_heads) * shape.head_dim + shape.intermediate)
    return Repeated(min(1.0, again / max(shape.layer_parameters, 1)), 0.0, 1.0)


def matrix_flops(spec: JobSpec, plan: Plan) -> float:
    """Return the FLOPs of matrix products in a micro-batch: 2 per parameter, token and pass, without lookups.

    Gradients of frozen parameters are not computed. The head is not computed again.
    """
    shape = _of_worker(plan)
    layers, head = shape.parameters - shape.embedding_parameters, shape.outputs * shape.hidden
    passes = 2 + shape.trained / shape.parameters
    return 2.0 * tokens_of(spec, plan) * (layers * (passes + repeated(spec, shape).products) + head * passes)


def float8_values(spec: JobSpec, shape: ModelShape) -> int:
    """Return the weights of a worker's linear layers that compute in float8."""
    if spec.strategy.float8 is None:
        return 0
    if shape.float8 is not None:
        return shape.float8.values
    return shape.layers * sum(inputs * outputs for inputs, outputs in shape.linear_layers.values())


def float8_flops(spec: JobSpec, plan: Plan) -> float:
    """Return those of the FLOPs of matrix products that are computed in float8."""
    shape = _of_worker(plan)
    passes = 2 + shape.trained / shape.parameters + repeated(spec, shape).products
    return 2.0 * tokens_of(spec, plan) * float8_values(spec, shape) * passes


def attention_flops(spec: JobSpec, plan: Plan) -> AttentionWork:
    """Return the FLOPs of attention in a micro-batch, by the kernels that the spec may get."""
    shape = _of_worker(plan)
    square = 4.0 * spec.data.sequence_length * shape.heads * shape.head_dim * shape.layers * tokens_of(spec, plan)
    passes = _FLASH_PASSES + repeated(spec, shape).attention
    causal, full, kind = square / 2 * passes, square * passes, spec.model.attn_implementation
    if not spec.data.packing:
        return AttentionWork(causal, causal, masked=False)
    if kind == "sdpa":
        # A row of a single document needs no mask. With several, sdpa has no kernel that skips scores.
        return AttentionWork(causal, full, masked=True)
    masked = kind == "auto" and mask_bytes(spec) <= MASK_BYTES
    return AttentionWork(0.0, full if masked else causal, masked=masked)


def memory_bytes(spec: JobSpec, plan: Plan) -> Range:
    """Return the bytes that operations other than products read and write in a micro-batch."""
    shape, tokens = _of_worker(plan), tokens_of(spec, plan)
    value, passes = DTYPE_BYTES[spec.strategy.param_dtype], 3 + repeated(spec, shape).rest
    wide = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    sizes = (shape.hidden, wide, shape.intermediate)
    fused, separate = (sum(a * b for a, b in zip(one, sizes, strict=True)) for one in (_FUSED, _SEPARATE))
    most = (fused + separate) / 2 if spec.model.compile else separate
    layers = Range(fused, most).times(float(value * passes * shape.layers * tokens))
    logits = Range(*_LOGIT_BYTES).times(float(shape.outputs * (1 if shape.pools else tokens)))
    copied = _gathered_bytes(spec, shape) / value
    parts = (layers, logits, Range(*_COPY_BYTES).times(copied), _rounding(spec, plan), restoring_bytes(spec, plan))
    adapted = 0.0 if spec.model.lora is None else (shape.adapters or 0) / spec.model.lora.r
    return total(*parts, Range(*_ADAPTED).times(value * passes * tokens * adapted))


def _rounding(spec: JobSpec, plan: Plan) -> Range:
    """Return the bytes that rounding to float8 reads and writes: of each product's two operands."""
    shape = _of_worker(plan)
    if not (weights := float8_values(spec, shape)):
        return Range(0.0, 0.0)
    inputs, outputs = map(sum, zip(*shape.linear_layers.values(), strict=True))
    values = tokens_of(spec, plan) * shape.layers * (inputs * (2 + repeated(spec, shape).products) + 2 * outputs)
    fused, separate = _ROUNDING_BYTES
    return Range(fused, (fused + separate) / 2 if spec.model.compile else separate).times(float(values + 2 * weights))


def restoring_bytes(spec: JobSpec, plan: Plan) -> Range:
    """Return the bytes that quantised weights read and write while they are restored: in each pass of a micro-batch."""
    shape, kind = _of_worker(plan), spec.model.quantize_base
    if kind is None or shape.quantized is None:
        return Range(0.0, 0.0)
    least = shape.quantized.bytes / shape.quantized.values + DTYPE_BYTES[spec.strategy.param_dtype]
    return Range(least, _RESTORING_BYTES[kind]).times(_restored(spec, shape))


def started_layers(spec: JobSpec, plan: Plan) -> float:
    """Return the passes through a layer in a micro-batch whose kernels a core starts; those of others are converted."""
    shape, lora, kind = plan.shape, spec.model.lora, spec.model.quantize_base
    passes = shape.layers * (3 + repeated(spec, shape).rest)
    adapted = 0.0 if lora is None else passes * _ADAPTED_KERNELS / _LAYER_KERNELS
    if kind is None:
        return passes + adapted
    parts = _restored(spec, shape) / RESTORED_AT_ONCE
    return passes + adapted + parts * _RESTORING_KERNELS[kind] / _LAYER_KERNELS


def _restored(spec: JobSpec, shape: ModelShape) -> float:
    """Return the values of quantised weights that a micro-batch restores."""
    return 0.0 if shape.quantized is None else shape.quantized.values * (2 + repeated(spec, shape).rest)


def _gathered_bytes(spec: JobSpec, shape: ModelShape) -> float:
    """Return the bytes of all parameters as they are gathered."""
    value, quantized = DTYPE_BYTES[spec.strategy.param_dtype], shape.quantized
    whole = value * shape.parameters
    if quantized is not None:
        return whole - value * quantized.values + quantized.bytes
    # Only scales of whole tensors are known before the gather.
    return whole - (value - 1) * float8_values(spec, shape) * (spec.strategy.float8 == "tensorwise")


def update_bytes(spec: JobSpec, plan: Plan) -> Range:
    """Return the bytes of memory that an optimizer step reads and writes."""
    shard = _of_worker(plan).trained / plan.mesh.fsdp
    return Range(*_UPDATE_BYTES).times(shard * trained_bytes(spec) / 4)


def host_bytes(spec: JobSpec, plan: Plan) -> Range:
    """Return the bytes that a micro-batch moves between a worker's GPU and the memory of its host."""
    shape, found = _of_worker(plan), 0.0
    value = DTYPE_BYTES[spec.strategy.param_dtype]
    if spec.strategy.offload_policy is True:
        held = sum(term.bytes for term in plan.memory if term.name in ("parameters", FROZEN))
        found += _gathers(spec) * held + trained_bytes(spec) * shape.trained / plan.mesh.fsdp
    if spec.model.gradient_checkpointing == "offload":
        found += 2.0 * value * tokens_of(spec, plan) * shape.hidden * shape.layers
    return Range(found, found)


def state_bytes(spec: JobSpec, plan: Plan) -> float:
    """Return the bytes of optimizer states that an update copies from the host to the GPU and back; 0 if they stay."""
    if spec.strategy.offload_policy != "optimizer":
        return 0.0
    return 2.0 * sum(term.bytes for term in plan.memory if term.name == "optimizer")


def exchanges(spec: JobSpec, plan: Plan) -> tuple[Exchange, ...]:
    """Return the exchanges of a worker in a micro-batch: parameters, gradients, sequence parts, and parts of layers."""
    shape, mesh, tokens = _of_worker(plan), plan.mesh, tokens_of(spec, plan)
    value, reduced = DTYPE_BYTES[spec.strategy.param_dtype], DTYPE_BYTES[spec.strategy.reduce_dtype]
    # Micro-batches share the one exchange of their gradients.
    gradients = reduced * shape.trained / (plan.batch.accumulation if spec.strategy.gradient_sync == "last" else 1)
    passes = 2 + repeated(spec, shape).rest
    sizes = {
        "fsdp": _gathers(spec) * _gathered_bytes(spec, shape) + gradients,
        # An all-reduce sends each value twice.
        "ddp": 2.0 * gradients / mesh.fsdp,
        "sp": 2.0 * value * passes * tokens * (shape.heads + shape.kv_heads) * shape.head_dim * shape.layers,
        "tp": 4.0 * value * passes * tokens * shape.hidden * shape.layers,
    }
    axes = {axis.name: axis for axis in (*mesh.parameters, *mesh.samples)}
    return tuple(
        Exchange(axis, sizes[name] * (axis.size - 1) / axis.size, hidden=name in ("fsdp", "ddp"))
        for name, axis in axes.items()
        if name in sizes and axis.size > 1
    )


def _gathers(spec: JobSpec) -> int:
    """Return how often a micro-batch gathers each parameter: also for backward, unless forward leaves it gathered."""
    return 1 if spec.strategy.reshard_after_forward is False else 2


def _of_worker(plan: Plan) -> ModelShape:
    return plan.shape.shared(tp=plan.mesh.tp, ep=plan.mesh.ep)
