"""Memory estimate in bytes per worker, each term with its formula."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from train_loop.plan.batch import plan_batch
from train_loop.plan.mesh import MeshPlan
from train_loop.plan.shape import KeptBytes, ModelShape, UnitSizes
from train_loop.plan.tree import ReductionTree
from train_loop.spec import SCHEDULE_FREE, BudgetSpec, Checkpointing, EverySpec, JobSpec

Place = Literal["device", "host"]
DTYPE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
CHUNK_BYTES = 2**29
"""Maximum bytes of the logits of a chunk, including their gradient."""
STATE_PART_BYTES = 2**27
"""Maximum bytes of the parameters whose offloaded optimizer state is on the device at a time."""
MASK_BYTES = 2**30
"""Maximum bytes of a mask on a GPU; above it, `auto` prefers flex_attention, which makes no mask."""

FROZEN = "frozen_parameters"
"""Name of the memory term of frozen weights below adapters."""
_OTHER_LAYER = 2
"""A layer that keeps more than this many times what attention and an MLP keep has other parts, which are counted."""
WITH_GRADIENTS = 1.35
"""Bytes of a layer in backward, with gradients of its results, relative to its kept results: measured at toy size."""
_PARTS = ("layers", "inputs", "layer", "selected")
"""Parts of a model's activations, as fields of `KeptBytes`."""
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
        *_partial_sums(shape.units(spec.strategy.wrap_policy), mesh, tree, trained),
    )
    kept = sum(term.bytes for term in state if term.name != FROZEN) + averaged_bytes(spec, shape, mesh)
    staged = -(-kept // mesh.ddp)
    return (
        *state,
        *step,
        _staging(spec, staged, freed=sum(term.bytes for term in step if term.place == beside), beside=beside),
        *_forward(spec, shape, mesh, beside=beside),
    )


def trained_bytes(spec: JobSpec) -> int:
    """Return the bytes of a trained weight between steps: adapters are fp32, whatever the frozen weights are."""
    return 4 if spec.model.lora is not None else DTYPE_BYTES[spec.model.master_dtype]


def _parameters(spec: JobSpec, shape: ModelShape, mesh: MeshPlan, home: Place) -> Iterator[MemoryTerm]:
    """Yield the bytes of a rank's parameters; checkpoints do not contain the frozen ones below adapters."""
    (shard, trained), counts = shape.on_rank(mesh.fsdp), shape.counts
    size, own = DTYPE_BYTES[spec.model.master_dtype], trained_bytes(spec)
    if spec.model.lora is None:
        yield MemoryTerm("parameters", size * shard, f"{size} bytes x parameters / fsdp", home)
        return
    frozen, formula = size * (shard - trained), f"{size} bytes x frozen parameters / fsdp"
    if counts is not None and counts.quantized:
        each = counts.quantized_bytes / counts.quantized
        frozen += -(-counts.quantized_bytes // mesh.fsdp) - size * (counts.quantized // mesh.fsdp)
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


def _forward(spec: JobSpec, shape: ModelShape, mesh: MeshPlan, *, beside: Place) -> tuple[MemoryTerm, ...]:
    """Estimate the bytes that the forward pass keeps: as measured, or as those of a decoder.

    Own code without a measured call has no estimate.
    """
    if spec.code is not None or shape.is_measured:
        return _measured(spec, shape, mesh, beside=beside)
    compute = DTYPE_BYTES[spec.strategy.param_dtype]
    tokens = spec.sequences_per_device * spec.data.sequence_length // mesh.sp
    logits = _logits(spec, shape, tokens)
    masks = _masks_and_scores(spec, shape, mesh, compute=compute)
    # Scores belong to the layer that backward recomputes, too.
    hidden = max(0, logits.bytes - sum(term.bytes for term in masks if term.name == "attention_scores"))
    terms = _activations(spec, shape, tokens=tokens, compute=compute, logits=hidden, beside=beside)
    return (
        *_adapted_experts(spec, shape, compute),
        *_in_own_dtypes(terms, spec, shape),
        *masks,
        logits,
    )


def _adapted_experts(spec: JobSpec, shape: ModelShape, compute: int) -> Iterator[MemoryTerm]:
    """Yield the bytes of experts' weights with their adapters, which are added before experts compute."""
    lora, counts = spec.model.lora, shape.counts
    if lora is None or not lora.target_parameters or counts is None:
        return
    share = recomputed_share(spec.model.gradient_checkpointing, shape.layers)
    kept = max(1, math.ceil((1 - share) * shape.layers))
    formula = f"{compute} bytes x experts of a layer x ({kept} layers with their adapters + a gradient)"
    yield MemoryTerm("adapted_experts", compute * counts.experts * (kept + 1), formula)


def _in_own_dtypes(terms: tuple[MemoryTerm, ...], spec: JobSpec, shape: ModelShape) -> tuple[MemoryTerm, ...]:
    """Return the activations of layers of which some have a dtype of their own."""
    if shape.counts is None or (own := shape.counts.compute) is None:
        return terms
    wide = own.layer if spec.model.gradient_checkpointing in ("full", "offload") else own.layers
    factor = wide / DTYPE_BYTES[spec.strategy.param_dtype]
    return tuple(
        replace(term, bytes=int(factor * term.bytes), formula=f"{factor:.4g} for precision x {term.formula}")
        for term in terms
    )


def _measured(spec: JobSpec, shape: ModelShape, mesh: MeshPlan, *, beside: Place) -> tuple[MemoryTerm, ...]:
    """Return the bytes that forward and backward of a micro-batch keep, from those of a call, if they are known."""
    if (call := shape.call) is None or call.activations is None:
        return ()
    kept = call.activations * spec.training.micro_batch // (call.rows * mesh.sp)
    tokens = spec.sequences_per_device * spec.data.sequence_length // mesh.sp
    each = DTYPE_BYTES[spec.strategy.param_dtype] * tokens
    own = shape.hidden * shape.layers // spec.strategy.token_parts
    inputs = each * own if spec.model.gradient_checkpointing == "offload" else 0
    formula = f"{call.activations} bytes, counted without values for {call.rows} rows, x rows / {call.rows} / sp"
    moved = MemoryTerm("offloaded_activations", inputs, "inputs of layers", beside)
    return (MemoryTerm("activations", max(kept - inputs, 0), formula), *([moved] if inputs else []))


def _gathered(spec: JobSpec, shape: ModelShape, mesh: MeshPlan, tokens: int, *, ordered: bool) -> tuple[int, str]:
    """Return the bytes of unsharded parameters and gradients at the peak, beside all sharded ones, and their formula.

    FSDP2 copies units also on one rank. The root unit, which has embeddings and head unless they are units,
    stays gathered while each layer and the one after it are gathered. The peak is inside the layers, where the head has
    its whole gradient, and the root no sharded one; or at the start of backward, before sharded gradients exist; or
    when gradients of embeddings and head are reduced. An `ordered` exchange has its buffer among the partial sums.
    """
    compute = DTYPE_BYTES[spec.strategy.param_dtype]
    reduced = 0 if ordered else DTYPE_BYTES[spec.strategy.reduce_dtype]
    master, frozen = trained_bytes(spec), shape.trained < shape.parameters
    reshard, wrap = spec.strategy.reshard_after_forward, spec.strategy.wrap_policy
    units, measured = shape.units(wrap), spec.code is not None or shape.is_measured
    by_layer = wrap.min_num_params is None and not spec.strategy.precision
    outside, ahead = units.root, units.ahead if (mesh.fsdp > 1 or measured) and not ordered else 0
    inside = outside + ahead
    kept = 0 if reshard is None or reshard is True else units.all if reshard is False else units.all // reshard
    # Chunks of logits have the head's gradient themselves, and a head that is a unit has it only while it computes.
    without = units.has_head or frozen or ordered or measured or chunk_rows(spec, shape, tokens=tokens) is not None
    head = 0 if without else shape.outputs * shape.hidden
    # Counts in the compute dtype may be more than parameters.
    least = units.gathered * compute // max(compute, *(DTYPE_BYTES[one] for one in spec.strategy.precision.values()), 0)
    later, shard = (0 if frozen else master * size // mesh.fsdp for size in (outside, outside + least))
    # A measured call shows the root's whole gradients at the peak of activations, which follow earlier micro-batches.
    early, later = (shape.call.root_gradients, 0) if shape.call is not None else (0, later)
    both = "two layers" if by_layer else "units gathered at once"
    restored = 0 if shape.counts is None else shape.counts.restored
    both += " + a restored weight" if restored else ""
    peaks = (
        (
            compute * (inside + head + restored) + early - later,
            f"{compute} bytes x (embeddings + {both} + head's gradient)",
        ),
        (
            compute * (outside + kept + head) + early - master * shape.trained // mesh.fsdp,
            f"{compute} bytes x (all that stays gathered after forward + head's gradient) - gradients",
        ),
        (
            0 if frozen else compute * outside + reduced * (outside - outside // mesh.fsdp),
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
    if units.head:
        # In later micro-batches of a step, all other sharded gradients exist.
        first = plan_batch(spec.training, dp=mesh.dp).accumulation == 1
        absent = trained if first else units.head // mesh.fsdp
        size = compute * (units.root + (1 if frozen else 2) * units.head) - (0 if frozen else master * absent)
        yield size, f"{compute} bytes x (the head's weights and gradient + the root unit) - gradients to come"
    if units.embeddings and not frozen:
        size = compute * (units.root + units.embeddings) + (reduced * units.embeddings if mesh.fsdp > 1 else 0)
        yield (
            size - master * units.embeddings // mesh.fsdp,
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


def _logits(spec: JobSpec, shape: ModelShape, tokens: int) -> MemoryTerm:
    own = shape.counts.compute if shape.counts is not None else None
    # A head with a dtype of its own.
    more = 0 if own is None else own.head - DTYPE_BYTES[spec.strategy.param_dtype]
    row, rows = logits_row_bytes(spec, shape) + more * shape.outputs, chunk_rows(spec, shape, tokens=tokens)
    if shape.labels is not None:
        each, kind = (spec.sequences_per_device, "rows") if shape.pools else (tokens, "tokens")
        return MemoryTerm("logits", row * each, f"{row // max(shape.labels, 1)} bytes x {kind} x labels")
    if rows is None:
        return MemoryTerm("logits", row * tokens, f"{row // shape.vocab} bytes x tokens x vocab")
    gradient, formula = _head_gradient(spec, shape), f"{row // shape.vocab} bytes x {rows} tokens of a chunk x vocab"
    return MemoryTerm("logits", row * rows + gradient, f"{formula} + 4 bytes x vocab x H" if gradient else formula)


def _head_gradient(spec: JobSpec, shape: ModelShape) -> int:
    """Return the bytes of the head's whole gradient in fp32, which chunks of logits keep; 0 if adapters freeze it."""
    is_frozen = spec.model.lora is not None and not spec.model.lora.modules_to_save
    return 0 if is_frozen else 4 * shape.vocab * shape.hidden


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


def _mask(spec: JobSpec) -> int:
    chosen, on_gpu = spec.model.attn_implementation, bool(spec.scaling.resources_per_worker.get("GPU"))
    masked = chosen == "sdpa" or (chosen == "auto" and not (on_gpu and mask_bytes(spec) > MASK_BYTES))
    return mask_bytes(spec) if masked else 0


def _masks_and_scores(spec: JobSpec, shape: ModelShape, mesh: MeshPlan, *, compute: int) -> tuple[MemoryTerm, ...]:
    """Estimate the mask, and the scores of attention that computes them whole: in fp32, and in the compute dtype."""
    formula = "1 byte x sequences x sequence_length^2, if packed or masked_lm"
    if not shape.whole_scores:
        return (MemoryTerm("attention_mask", _mask(spec), formula),)
    squares = spec.sequences_per_device * spec.data.sequence_length**2
    share = recomputed_share(spec.model.gradient_checkpointing, shape.layers)
    layers = max(1, math.ceil((1 - share) * shape.layers))
    scores = (4 + 2 * compute) * layers * squares * -(-shape.heads // mesh.sp)
    return (
        MemoryTerm("attention_mask", 4 * squares, "4 bytes x sequences x sequence_length^2"),
        MemoryTerm(
            "attention_scores",
            scores,
            f"(4 + 2 x {compute}) bytes x layers at once x heads / sp x sequences x sequence_length^2",
        ),
    )


def _activations(
    spec: JobSpec, shape: ModelShape, *, tokens: int, compute: int, logits: int, beside: Place
) -> tuple[MemoryTerm, ...]:
    """Estimate the activations that layers keep for backward, and those of the layer that computes."""
    parts, states = spec.strategy.token_parts, shape.hidden // spec.strategy.token_parts
    query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    tiles = spec.strategy.tiled_num_shards if spec.strategy.apply_tiled_mlp else 1
    attention, whole, compiled = query if not shape.whole_scores else 0, tiles == 1, spec.model.compile
    # Bytes of norms for each of H: their inputs and outputs. Without a compiler, inputs are in fp32, and normed values
    # are kept, too. Bytes of q, k, v and the output of attention, and of MLP tensors, of which one tile exists at a
    # time: results of gate, up, and their product; without a compiler also the activation.
    of_norms = 4 * compute if compiled else 2 * (4 + 2 * compute)
    of_heads = 2 * compute + (4 + compute if shape.qk_norm and not compiled else 0)
    of_mlp = (3 if compiled else 4) * compute
    kept, wide = of_norms * shape.hidden // parts + of_heads * (query + key), of_mlp * shape.intermediate
    # A layer with experts has few of its config's sizes, and ranks that share layers may gather heads and MLPs.
    counted = shape.labels is not None or shape.active is not None or spec.strategy.tp_size > 1 or not compiled
    least = 0 if counted else _OTHER_LAYER * (kept + wide // tiles)
    if shape.kept is not None and shape.kept.layer > least:
        sizes = replace(shape.kept, selected=shape.kept.selected + compute * shape.layers * attention)
        words = {part: f"{getattr(sizes, part)} bytes x tokens, as counted in a call of its layers" for part in _PARTS}
    else:
        # Backward recomputes each tile, so that no layer keeps wide tensors, and `selective` keeps none of them.
        sizes = KeptBytes(
            inputs=compute * shape.layers * states,
            layer=kept + wide // tiles,
            layers=(kept + wide) * shape.layers if whole else kept * shape.layers + wide // tiles,
            outside=0,
            # Products of q, v, gate and down.
            selected=compute * shape.layers * (query + key + attention + (shape.intermediate + states if whole else 0)),
        )
        own = "H" if parts == 1 else f"H / {parts}"
        layer = f"{of_norms}{own} + {of_heads}(heads + kv_heads)head_dim"
        mlp = f"{of_mlp}F" if whole else f"{of_mlp}F / {tiles} tiles"
        words = {
            "layers": f"({layer} + {mlp}) x layers bytes x tokens"
            if whole
            else f"(({layer}) x layers + {mlp}) bytes x tokens",
            "inputs": f"{compute}{own} x layers bytes x tokens",
            "layer": f"({layer} + {mlp}) bytes x tokens of the current layer",
            "selected": f"{compute}((2heads + kv_heads)head_dim{f' + F + {own}' if whole else ''}) x layers bytes x "
            "tokens",
        }
    return _terms(spec, shape, sizes, words, tokens=tokens, logits=logits, beside=beside)


def _terms(
    spec: JobSpec,
    shape: ModelShape,
    sizes: KeptBytes,
    words: Mapping[str, str],
    *,
    tokens: int,
    logits: int,
    beside: Place,
) -> tuple[MemoryTerm, ...]:
    """Return the terms of activations: the parts of what layers keep, of which `words` has the formulas.

    Logits are free again when backward recomputes a layer.
    """
    how, layers = spec.model.gradient_checkpointing, shape.layers
    factors, current = _factors(how, layers)
    size = tokens * (sizes.outside + sum(factor * getattr(sizes, part) for part, factor in factors.items()))
    # The current layer contains its kept results.
    before = sizes.selected / max(layers, 1) if how == "selective" else 0
    size += max(0.0, current * tokens * (WITH_GRADIENTS * sizes.layer - before) - logits)
    formula = [words[part] if factor == 1 else f"{factor:.3g} x {words[part]}" for part, factor in factors.items()]
    if current:
        share = "" if current == 1 else f"{current:.3g} x "
        formula.append(f"{share}{words['layer']}, beyond the logits")
    found = MemoryTerm("activations", round(size), " + ".join(formula))
    if how != "offload":
        return (found,)
    return found, MemoryTerm("offloaded_activations", tokens * sizes.inputs, words["inputs"], beside)


def _factors(how: Checkpointing, layers: int) -> tuple[dict[str, float], float]:
    """Return the shares of parts of a model's activations that are kept, and of a layer that backward recomputes."""
    if how in ("none", "offload"):
        return ({"layers": 1.0}, 0.0) if how == "none" else ({}, 1.0)
    if how in ("full", "selective"):
        return {"inputs": 1.0} | ({"selected": 1.0} if how == "selective" else {}), 1.0
    share = recomputed_share(how, layers)
    # Backward begins with the last layer. If it is recomputed, all other layers still have their activations.
    last = layers % how.every == 1 or how.every == 1 if isinstance(how, EverySpec) else share
    return {"layers": 1 - share, "inputs": share}, float(last)


def recomputed_share(how: Checkpointing, layers: int) -> float:
    """Return the share of the layers that backward recomputes, with `selective` in part; at most, with a budget."""
    if isinstance(how, EverySpec):
        return -(-layers // how.every) / max(layers, 1)
    return 1 - how.budget if isinstance(how, BudgetSpec) else float(how != "none")


def logits_row_bytes(spec: JobSpec, shape: ModelShape) -> int:
    """Return the bytes of one token's logits: in compute dtype, in fp32, and their fp32 gradient."""
    return (DTYPE_BYTES[spec.strategy.param_dtype] + 8) * shape.outputs


def chunk_rows(spec: JobSpec, shape: ModelShape, *, tokens: int) -> int | None:
    """Return the tokens in a chunk of logits; None if whole logits need less memory, or if the spec disables chunks.

    `tokens` and `shape` are those of a rank. Chunks keep the head's gradient in fp32 until backward.
    """
    if not shape.vocab or shape.labels is not None:
        return None
    row = logits_row_bytes(spec, shape)
    rows = max(1, min(tokens, CHUNK_BYTES // row))
    saves = rows * row + _head_gradient(spec, shape) < tokens * row
    wanted = spec.training.chunked_loss
    if saves if wanted is None else wanted:
        return rows
    # The model would give ranks that share layers all logits, and the chunked form gives each its own.
    return None if spec.strategy.tp_size == 1 else tokens


def mask_bytes(spec: JobSpec) -> int:
    """Return the bytes of the mask [sequences, 1, T, T] that sdpa needs for packed rows and encoders; 0 for others."""
    masked = spec.data.packing or spec.model.masked is not None
    return spec.sequences_per_device * spec.data.sequence_length**2 if masked else 0
