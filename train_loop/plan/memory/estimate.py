"""Memory estimate in bytes per worker, each term with its formula."""

from collections.abc import Iterator

from train_loop.plan.batch import plan_batch
from train_loop.plan.memory.forward import estimate_forward
from train_loop.plan.memory.gathered import gathered_bytes
from train_loop.plan.memory.term import DTYPE_BYTES, FROZEN, MemoryTerm, Place, trained_bytes
from train_loop.plan.mesh import MeshPlan
from train_loop.plan.model.counts import UnitSizes
from train_loop.plan.model.shape import ModelShape
from train_loop.plan.tree import ReductionTree
from train_loop.spec import SCHEDULE_FREE, JobSpec

STATE_PART_BYTES = 2**27
"""Maximum bytes of the parameters whose offloaded optimizer state is on the device at a time."""
_SMALL = 2**20
"""Bytes of buffers below which the plan has no term for them."""


def estimate_memory(
    spec: JobSpec, shape: ModelShape, mesh: MeshPlan, tree: ReductionTree | None = None
) -> tuple[MemoryTerm, ...]:
    """Estimate the bytes per worker at the peak of a step, by term. This is not a limit.

    `shape` is that of a rank's share of each layer. Master weights, gradients and optimizer state are sharded over
    fsdp. Parameters that are frozen or unused have no gradients and no optimizer state. Activations are those of one
    micro-batch on 1/sp of the sequence.
    """
    beside: Place = "host" if spec.scaling.resources_per_worker.get("GPU") else "device"
    home: Place = beside if spec.strategy.offload_policy is True else "device"
    states: Place = beside if spec.strategy.offload_policy else "device"
    (_, trained), updated = shape.on_rank(mesh.fsdp), shape.updated(mesh.fsdp)
    master = trained_bytes(spec)
    forward = estimate_forward(spec, shape, mesh, beside=beside)
    state = (
        *_parameters(spec, shape, mesh, home),
        *_buffers(shape),
        MemoryTerm("optimizer", *_optimizer(spec, shape, mesh, master), place=states),
        MemoryTerm(
            "ema",
            4 * trained if spec.training.ema_decay else 0,
            "4 bytes x trained parameters / fsdp, if ema_decay is set",
            home,
        ),
    )
    step = (
        MemoryTerm("gathered_parameters", *gathered_bytes(spec, shape, mesh, forward, ordered=tree is not None)),
        MemoryTerm("gradients", master * updated, f"{master} bytes x {_whose(shape)} / fsdp", home),
        *_whole_gradients(spec, shape, mesh),
        *_partial_sums(shape.units(spec.strategy), mesh, tree, updated),
    )
    kept = sum(term.bytes for term in state if term.name != FROZEN) + averaged_bytes(spec, shape, mesh)
    staged = -(-kept // mesh.ddp)
    return (
        *state,
        *step,
        _staging(spec, staged, freed=sum(term.bytes for term in step if term.place == beside), beside=beside),
        *forward.terms,
    )


def _parameters(spec: JobSpec, shape: ModelShape, mesh: MeshPlan, home: Place) -> Iterator[MemoryTerm]:
    """Yield the bytes of a rank's parameters; checkpoints do not contain the frozen ones below adapters."""
    (shard, trained), quantized = shape.on_rank(mesh.fsdp), shape.quantized
    size, own = DTYPE_BYTES[spec.model.master_dtype], trained_bytes(spec)
    if spec.model.lora is None:
        yield MemoryTerm("parameters", size * shard, f"{size} bytes x parameters / fsdp", home)
        return
    frozen, formula = size * (shard - trained), f"{size} bytes x frozen parameters / fsdp"
    if quantized is not None:
        each = quantized.bytes / quantized.values
        frozen += -(-quantized.bytes // mesh.fsdp) - size * (quantized.values // mesh.fsdp)
        formula = f"({each:.4g} bytes x quantised weights + {size} bytes x other frozen parameters) / fsdp"
    yield MemoryTerm(FROZEN, frozen, formula, home)
    yield MemoryTerm("parameters", own * trained, f"{own} bytes x trained parameters / fsdp", home)


def _buffers(shape: ModelShape) -> tuple[MemoryTerm, ...]:
    """Return the term of buffers, unless they are as small as in most models. A measured call contains them."""
    size = 0 if shape.counts is None or shape.is_measured else shape.counts.buffers
    return (MemoryTerm("buffers", size, "bytes of the model's buffers"),) if size >= _SMALL else ()


def averaged_bytes(spec: JobSpec, shape: ModelShape, mesh: MeshPlan) -> int:
    """Return the bytes of the averaged weights that a checkpoint has besides the trained ones; 0 without such averages.

    They exist only while a checkpoint is saved or the model is evaluated, when gradients do not.
    """
    if spec.training.optimizer != SCHEDULE_FREE:
        return 0
    return trained_bytes(spec) * shape.on_rank(mesh.fsdp)[1]


def _whole_gradients(spec: JobSpec, shape: ModelShape, mesh: MeshPlan) -> tuple[MemoryTerm, ...]:
    """Estimate the gradients that a rank keeps unsharded until the last micro-batch of a step."""
    if spec.strategy.gradient_sync == "every" or plan_batch(spec.training, dp=mesh.dp).accumulation == 1:
        return ()
    size = DTYPE_BYTES[spec.strategy.reduce_dtype]
    return (MemoryTerm("whole_gradients", size * shape.updated(), f"{size} bytes x {_whose(shape)}"),)


def _partial_sums(units: UnitSizes, mesh: MeshPlan, tree: ReductionTree | None, shard: int) -> tuple[MemoryTerm, ...]:
    """Estimate the bytes that an `any_size` run keeps of a step's gradients, and the buffer of its exchange."""
    if tree is None:
        return ()
    kept = tree.partial_sums(mesh)
    exchanged = 4 * max(units.largest, units.root) if mesh.world > 1 else 0
    formula = f"{kept} partial sums x 4 bytes x parameters / fsdp + 4 bytes x the largest unit"
    return (MemoryTerm("partial_sums", 4 * kept * shard + exchanged, formula),)


def _staging(spec: JobSpec, state: int, *, freed: int, beside: Place) -> MemoryTerm:
    """Estimate checkpoint staging; replicas of a shard divide it among them.

    `freed` are the bytes that a step needs and a save at the end of training does not.
    """
    copied = spec.strategy.save_mode != "sync" or beside == "host"
    averages = " + averaged weights" if spec.training.optimizer == SCHEDULE_FREE else ""
    formula = f"(parameters + optimizer + ema{averages}) / ddp, copied while a checkpoint is written"
    if copied and not saves_between_steps(spec):
        state, formula = max(state - freed, 0), f"{formula} after the last step, beyond what a step needs"
    return MemoryTerm("checkpoint_staging", state if copied else 0, formula, beside)


def saves_between_steps(spec: JobSpec) -> bool:
    """Return whether training may continue while a checkpoint is written. Pauses save when training has ended."""
    every, last = spec.checkpoint.every_steps, spec.training.max_steps
    return spec.checkpoint.every_seconds is not None or (every is not None and (last is None or every < last))


def _whose(shape: ModelShape) -> str:
    return "trained parameters" if shape.updated() == shape.trained else "trained parameters that rows use"


def _optimizer(spec: JobSpec, shape: ModelShape, mesh: MeshPlan, master: int) -> tuple[int, str]:
    total, whose = shape.updated(), _whose(shape)
    # If unused parameters are no matrices, muon needs less.
    matrices = max(shape.trained_matrices - (shape.trained - total), 0)
    momentum = 0 if spec.training.momentum == 0 else 1
    size, formula = {
        "adamw": (2 * master * total, f"2 Adam moments x {master} bytes x {whose} / fsdp"),
        "adam": (2 * master * total, f"2 Adam moments x {master} bytes x {whose} / fsdp"),
        "lion": (master * total, f"1 momentum x {master} bytes x {whose} / fsdp"),
        SCHEDULE_FREE: (2 * master * total, f"(z + 1 moment) x {master} bytes x {whose} / fsdp"),
        # torchao keeps the moments of tensors below 4096 values, and of odd sizes, in the master dtype.
        "adamw_8bit": (
            2 * total + total // 32,
            f"2 Adam moments x (1 byte + 4 bytes / 256) x {whose} / fsdp",
        ),
        "sgd": (momentum * master * total, f"{momentum} momentum x {master} bytes x {whose} / fsdp"),
        "muon": (
            master * (2 * total - matrices),
            f"{master} bytes x (1 momentum of matrices + 2 Adam moments of the rest) / fsdp",
        ),
        "adafactor": (
            8 * total // max(shape.hidden, 1),
            "4 bytes x means of rows and columns, about 2 parameters / hidden",
        ),
    }[spec.training.optimizer]
    if spec.training.optimizer == "adafactor":
        # The means of columns are on every rank.
        return size, formula
    return -(-size * shape.updated(mesh.fsdp) // max(total, 1)), formula
