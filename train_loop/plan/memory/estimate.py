"""Memory estimate in bytes per worker, each term with its formula."""

from collections.abc import Iterator

from train_loop.plan.batch import plan_batch
from train_loop.plan.memory.forward import chunk_rows, forward_terms
from train_loop.plan.memory.term import DTYPE_BYTES, FROZEN, MemoryTerm, Place
from train_loop.plan.mesh import MeshPlan
from train_loop.plan.model.counts import UnitSizes
from train_loop.plan.model.shape import ModelShape
from train_loop.plan.tree import ReductionTree
from train_loop.spec import SCHEDULE_FREE, JobSpec

STATE_PART_BYTES = 2**27
"""Maximum bytes of the parameters whose offloaded optimizer state is on the device at a time."""


def estimate_memory(
    spec: JobSpec, shape: ModelShape, mesh: MeshPlan, tree: ReductionTree | None = None
) -> tuple[MemoryTerm, ...]:
    """Estimate the bytes per worker at the peak of a step, by term. This is not a limit.

    `shape` is that of a rank's share of each layer. Master weights, gradients and optimizer state are sharded over
    fsdp. Frozen parameters have no gradients and no optimizer state. Activations are those of one micro-batch on
    1/sp of the sequence.
    """
    beside: Place = "host" if spec.scaling.resources_per_worker.get("GPU") else "device"
    home: Place = beside if spec.strategy.offload_policy is True else "device"
    states: Place = beside if spec.strategy.offload_policy else "device"
    _, trained = shape.on_rank(mesh.fsdp)
    master = trained_bytes(spec)
    tokens = spec.sequences_per_device * spec.data.sequence_length // mesh.sp
    state = (
        *_parameters(spec, shape, mesh, home),
        MemoryTerm("optimizer", *_optimizer(spec, shape, mesh, master), place=states),
        MemoryTerm(
            "ema",
            4 * trained if spec.training.ema_decay else 0,
            "4 bytes x trained parameters / fsdp, if ema_decay is set",
            home,
        ),
    )
    step = (
        MemoryTerm("gathered_parameters", *_gathered(spec, shape, mesh, tokens, ordered=tree is not None)),
        MemoryTerm("gradients", master * trained, f"{master} bytes x trained parameters / fsdp", home),
        *_whole_gradients(spec, shape, mesh),
        *_partial_sums(shape.units(spec.strategy), mesh, tree, trained),
    )
    kept = sum(term.bytes for term in state if term.name != FROZEN) + averaged_bytes(spec, shape, mesh)
    staged = -(-kept // mesh.ddp)
    return (
        *state,
        *step,
        _staging(spec, staged, freed=sum(term.bytes for term in step if term.place == beside), beside=beside),
        *forward_terms(spec, shape, mesh, beside=beside),
    )


def trained_bytes(spec: JobSpec) -> int:
    """Return the bytes of a trained weight between steps: adapters are fp32, whatever the frozen weights are."""
    return 4 if spec.model.lora is not None else DTYPE_BYTES[spec.model.master_dtype]


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


def averaged_bytes(spec: JobSpec, shape: ModelShape, mesh: MeshPlan) -> int:
    """Return the bytes of the averaged weights that a checkpoint has besides the trained ones; 0 without such averages.

    They exist only while a checkpoint is saved or the model is evaluated, when gradients do not.
    """
    if spec.training.optimizer != SCHEDULE_FREE:
        return 0
    return trained_bytes(spec) * shape.on_rank(mesh.fsdp)[1]


def _gathered(spec: JobSpec, shape: ModelShape, mesh: MeshPlan, tokens: int, *, ordered: bool) -> tuple[int, str]:
    """Return the bytes of unsharded parameters and gradients at the peak, beside all sharded ones, and their formula.

    FSDP2 copies units also on one rank. The root unit, which has embeddings and head unless they are units,
    stays gathered while each layer is, and with several ranks the one after it. The peak is inside the layers, where
    the head has its whole gradient; or at the start of backward; or when gradients of embeddings and head are reduced.
    Sharded gradients that do not exist yet in a step's first micro-batch are subtracted. An `ordered` exchange has its
    buffer among the partial sums.
    """
    compute = DTYPE_BYTES[spec.strategy.param_dtype]
    reduced = 0 if ordered else DTYPE_BYTES[spec.strategy.reduce_dtype]
    master, frozen = trained_bytes(spec), shape.trained < shape.parameters
    reshard, wrap = spec.strategy.reshard_after_forward, spec.strategy.wrap_policy
    units, measured = shape.units(spec.strategy), spec.code is not None or shape.is_measured
    by_layer = wrap.min_num_params is None and not spec.strategy.precision
    # In later micro-batches of a step, all sharded gradients exist.
    first = plan_batch(spec.training, dp=mesh.dp).accumulation == 1
    outside, ahead = units.root, units.ahead if mesh.fsdp > 1 or measured else units.gathered
    inside = outside + (0 if ordered else ahead)
    kept = 0 if reshard is None or reshard is True else units.all if reshard is False else units.all // reshard
    # Chunks of logits have the head's gradient themselves, and a head that is a unit has it only while it computes.
    without = units.has_head or frozen or ordered or measured or chunk_rows(spec, shape, tokens=tokens) is not None
    head = 0 if without else shape.outputs * shape.hidden
    # Counts in the compute dtype may be more than parameters.
    least = units.gathered * compute // max(compute, *(DTYPE_BYTES[one] for one in spec.strategy.precision.values()), 0)
    later, shard = (master * size // mesh.fsdp if first and not frozen else 0 for size in (outside, outside + least))
    # A measured call shows the root's whole gradients at the peak of activations, which follow earlier micro-batches.
    early, later = (shape.call.root_gradients, 0) if shape.call is not None else (0, later)
    both = "layers gathered at once" if by_layer else "units gathered at once"
    restored = 0 if shape.quantized is None else shape.quantized.largest
    both += " + a restored weight" if restored else ""
    peaks = (
        (
            compute * (inside + head + restored) + early - later,
            f"{compute} bytes x (embeddings + {both} + head's gradient)",
        ),
        (
            compute * (outside + kept + head) + early - (master * shape.trained // mesh.fsdp if first else 0),
            f"{compute} bytes x (all that stays gathered after forward + head's gradient) - gradients",
        ),
        (
            0 if frozen else compute * outside + reduced * (outside - (outside // mesh.fsdp if first else 0)),
            f"({compute} + {reduced}) bytes x embeddings, whose gradients are reduced last",
        ),
        *_of_ends(spec, shape, mesh, units, reduced=reduced),
    )
    # A unit by size may be as large as the model: its whole gradient exists before its shards.
    large = compute * (outside + head + 2 * units.gathered) - shard
    formula = f"{compute} bytes x (embeddings + the largest unit and its gradient) - its shards"
    return max(peaks) if by_layer else max(*peaks, (large, formula))


def _of_ends(
    spec: JobSpec, shape: ModelShape, mesh: MeshPlan, units: UnitSizes, *, reduced: int
) -> Iterator[tuple[int, str]]:
    """Yield the bytes, in addition to all sharded gradients, at the peaks of a head and of embeddings that are units.

    The head's weights and whole gradient both exist when backward begins. The table is not gathered in backward.
    """
    compute, offloads = DTYPE_BYTES[spec.strategy.param_dtype], spec.strategy.offload_policy is True
    # Bytes of sharded gradients here; others are in host memory.
    master = 0 if offloads else trained_bytes(spec)
    frozen, (_, trained) = shape.trained < shape.parameters, shape.on_rank(mesh.fsdp)
    first = plan_batch(spec.training, dp=mesh.dp).accumulation == 1
    if units.head:
        absent = trained if first else 0
        size = compute * (units.root + (1 if frozen else 2) * units.head) - (0 if frozen else master * absent)
        yield size, f"{compute} bytes x (the head's weights and gradient + the root unit) - gradients to come"
    if units.embeddings and not frozen:
        size = compute * (units.root + units.embeddings) + (reduced * units.embeddings if mesh.fsdp > 1 else 0)
        yield (
            size - (master * units.embeddings // mesh.fsdp if first else 0),
            f"({compute} + {reduced}) bytes x the gradient of embeddings, which are reduced last",
        )


def _whole_gradients(spec: JobSpec, shape: ModelShape, mesh: MeshPlan) -> tuple[MemoryTerm, ...]:
    """Estimate the gradients that a rank keeps unsharded until the last micro-batch of a step."""
    if spec.strategy.gradient_sync == "every" or plan_batch(spec.training, dp=mesh.dp).accumulation == 1:
        return ()
    size = DTYPE_BYTES[spec.strategy.reduce_dtype]
    return (MemoryTerm("whole_gradients", size * shape.trained, f"{size} bytes x trained parameters"),)


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


def _optimizer(spec: JobSpec, shape: ModelShape, mesh: MeshPlan, master: int) -> tuple[int, str]:
    total, matrices = shape.trained, shape.trained_matrices
    momentum = 0 if spec.training.momentum == 0 else 1
    size, formula = {
        "adamw": (2 * master * total, f"2 Adam moments x {master} bytes x trained parameters / fsdp"),
        "adam": (2 * master * total, f"2 Adam moments x {master} bytes x trained parameters / fsdp"),
        "lion": (master * total, f"1 momentum x {master} bytes x trained parameters / fsdp"),
        SCHEDULE_FREE: (2 * master * total, f"(z + 1 moment) x {master} bytes x trained parameters / fsdp"),
        # torchao keeps the moments of tensors below 4096 values, and of odd sizes, in the master dtype.
        "adamw_8bit": (
            2 * total + total // 32,
            "2 Adam moments x (1 byte + 4 bytes / 256) x trained parameters / fsdp",
        ),
        "sgd": (momentum * master * total, f"{momentum} momentum x {master} bytes x trained parameters / fsdp"),
        "muon": (
            master * (2 * total - matrices),
            f"{master} bytes x (1 momentum of matrices + 2 Adam moments of the rest) / fsdp",
        ),
        "adafactor": (
            8 * total // max(shape.hidden, 1),
            "4 bytes x means of rows and columns, about 2 parameters / hidden",
        ),
    }[spec.training.optimizer]
    # The means of columns are on every rank.
    ranks = 1 if spec.training.optimizer == "adafactor" else mesh.fsdp
    wholes = 0 if shape.counts is None else size * shape.counts.trained_wholes // max(total, 1)
    return -(-size // ranks) + wholes - wholes // ranks, formula
