"""Memory that the forward pass of a micro-batch keeps for backward, and that of the layer that backward recomputes."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from train_loop.plan.memory.term import DTYPE_BYTES, MemoryTerm, Place
from train_loop.plan.mesh import MeshPlan
from train_loop.plan.model.counts import KeptBytes
from train_loop.plan.model.shape import ModelShape
from train_loop.spec import BudgetSpec, Checkpointing, EverySpec, JobSpec

CHUNK_BYTES = 2**29
"""Maximum bytes of the logits of a chunk, including their gradient."""
MASK_BYTES = 2**30
"""Maximum bytes of a mask on a GPU; above it, `auto` prefers flex_attention, which makes no mask."""
_OTHER_LAYER = 2
"""A layer that keeps more than this many times what attention and an MLP keep has other parts, which are counted."""
WITH_GRADIENTS = 1.35
"""Bytes of a layer in backward, with gradients of its results, relative to its kept results: measured at toy size."""
_PARTS = ("layers", "inputs", "layer", "selected", "peak")
"""Parts of a model's activations, as fields of `KeptBytes`."""


class Forward(NamedTuple):
    """Bytes that the forward pass keeps, and those of the layer that backward recomputes."""

    terms: tuple[MemoryTerm, ...]
    layer: int = 0
    """`activations` counts only what is beyond the logits, which are free by then."""
    logits: int = 0
    free: int = 0
    """Bytes of the logits that are free when the head's gradient is computed: all but their own gradient."""
    after_layer: int = 0
    """Bytes that are free when the gradients of a layer are reduced."""
    after_head: int = 0
    """Bytes that are free, or do not exist yet, when the gradients of the head are reduced."""

    @property
    def used(self) -> int:
        """Return the bytes that are free when backward has computed all gradients."""
        return sum(term.bytes for term in self.terms if term.name in ("activations", "logits"))

    def beyond(self, head: int) -> int:
        """Return the bytes of the head's gradient that are beyond the logits, when it is computed and in the layers."""
        return max(head - self.free, max(head + self.layer, self.logits) - max(self.layer, self.logits))


def estimate_forward(spec: JobSpec, shape: ModelShape, mesh: MeshPlan, *, beside: Place) -> Forward:
    """Estimate the bytes that the forward pass keeps: as measured, or as those of a decoder.

    Own code without a measured call has no estimate.
    """
    if spec.code is not None or shape.is_measured:
        return _measured(spec, shape, mesh, beside=beside)
    compute = DTYPE_BYTES[spec.strategy.param_dtype]
    tokens = spec.sequences_per_device * spec.data.sequence_length // mesh.sp
    logits = _logits(spec, shape, tokens)
    masks = _masks_and_scores(spec, shape, mesh, compute=compute)
    # Backward of a layer has two gradients of its scores: after softmax, and before.
    scores = sum(term.bytes for term in masks if term.name == "attention_scores") * 2 * compute // (4 + 2 * compute)
    hidden = max(0, logits.bytes - scores)
    found = _activations(spec, shape, tokens=tokens, compute=compute, logits=hidden, beside=beside)
    terms = *_adapted_experts(spec, shape, compute), *_in_own_dtypes(found.terms, spec, shape), *masks, logits
    is_whole = shape.labels is None and chunk_rows(spec, shape, tokens=tokens) is None
    # Besides that gradient, in fp32: the logits and their softmax.
    free = 8 * tokens * shape.outputs if is_whole else 0
    after = {"after_layer": logits.bytes + found.after_layer, "after_head": logits.bytes + found.after_head}
    return found._replace(terms=terms, logits=logits.bytes, free=free, **after)


def _adapted_experts(spec: JobSpec, shape: ModelShape, compute: int) -> Iterator[MemoryTerm]:
    """Yield the bytes of experts' weights with their adapters, which are added before experts compute."""
    lora, counts = spec.model.lora, shape.counts
    if lora is None or not lora.target_parameters or counts is None:
        return
    kept = _kept_layers(spec.model.gradient_checkpointing, shape.layers)
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


def _measured(spec: JobSpec, shape: ModelShape, mesh: MeshPlan, *, beside: Place) -> Forward:
    """Return the bytes that forward and backward of a micro-batch keep, from those of a call, if they are known."""
    if (call := shape.call) is None or call.activations is None:
        return Forward(())
    kept = call.activations * spec.training.micro_batch // (call.rows * mesh.sp)
    tokens = spec.sequences_per_device * spec.data.sequence_length // mesh.sp
    how, layers = spec.model.gradient_checkpointing, max(shape.layers, 1)
    inputs = DTYPE_BYTES[spec.strategy.param_dtype] * tokens * shape.hidden * layers // spec.strategy.token_parts
    moved = inputs if how == "offload" else 0
    formula = f"{call.activations} bytes, counted without values for {call.rows} rows, x rows / {call.rows} / sp"
    terms = [MemoryTerm("activations", max(kept - moved, 0), formula)]
    if moved:
        terms.append(MemoryTerm("offloaded_activations", moved, "inputs of layers", beside))
    repeats = how in ("full", "offload")
    beyond = max(kept - inputs, 0) if repeats else 0
    return Forward(tuple(terms), after_layer=beyond if repeats else kept // layers, after_head=beyond)


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
    # The logits themselves stay, too. Then the gradient of a chunk's logits gives a part of the head's.
    row, gradient = row + 4 * shape.outputs, _head_gradient(spec, shape)
    compute = DTYPE_BYTES[spec.strategy.param_dtype]
    chunk, product = row * rows, compute * (rows + shape.hidden) * shape.vocab if gradient else 0
    formula = f"{row // shape.vocab} bytes x {rows} tokens of a chunk x vocab"
    if product > chunk:
        formula = f"{compute} bytes x ({rows} tokens of a chunk + H) x vocab"
    formula = f"{formula} + 4 bytes x vocab x H" if gradient else formula
    return MemoryTerm("logits", max(chunk, product) + gradient, formula)


def _head_gradient(spec: JobSpec, shape: ModelShape) -> int:
    """Return the bytes of the head's whole gradient in fp32, which chunks of logits keep; 0 if adapters freeze it."""
    is_frozen = spec.model.lora is not None and not spec.model.lora.modules_to_save
    return 0 if is_frozen else 4 * shape.vocab * shape.hidden


def _mask(spec: JobSpec) -> int:
    # Rows from which tokens are generated are padded on the left, unless ranks share each of them.
    if spec.chats == "prompt" and spec.sequences_per_device > 1 and spec.strategy.ulysses_size == 1:
        return spec.sequences_per_device * spec.data.sequence_length**2
    chosen, on_gpu = spec.model.attn_implementation, bool(spec.scaling.resources_per_worker.get("GPU"))
    masked = chosen == "sdpa" or (chosen == "auto" and not (on_gpu and mask_bytes(spec) > MASK_BYTES))
    return mask_bytes(spec) if masked else 0


def _masks_and_scores(spec: JobSpec, shape: ModelShape, mesh: MeshPlan, *, compute: int) -> tuple[MemoryTerm, ...]:
    """Estimate the mask, and the scores of attention that computes them whole: in fp32, and in the compute dtype.

    torch's `scaled_dot_product_attention` makes a copy of the mask in the compute dtype for each call, and keeps it.
    """
    layers = _kept_layers(spec.model.gradient_checkpointing, shape.layers)
    if not shape.whole_scores:
        formula = (
            f"(1 + {compute} x {layers} of L) bytes x sequences x sequence_length^2, if packed, masked_lm or generate"
        )
        return (MemoryTerm("attention_mask", (1 + compute * layers) * _mask(spec), formula),)
    squares = spec.sequences_per_device * spec.data.sequence_length**2
    scores = (4 + 2 * compute) * layers * squares * -(-shape.heads // mesh.sp)
    return (
        MemoryTerm("attention_mask", 4 * squares, "4 bytes x sequences x sequence_length^2"),
        MemoryTerm(
            "attention_scores",
            scores,
            f"(4 + 2 x {compute}) bytes x layers at once x heads / sp x sequences x sequence_length^2",
        ),
    )


def _activations(spec: JobSpec, shape: ModelShape, *, tokens: int, compute: int, logits: int, beside: Place) -> Forward:
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
) -> Forward:
    """Return the terms of activations: the parts of what layers keep, of which `words` has the formulas.

    Logits are free again when backward recomputes a layer.
    """
    how, layers = spec.model.gradient_checkpointing, shape.layers
    factors, current = _factors(how, layers)
    size = tokens * (sizes.outside + sum(factor * getattr(sizes, part) for part, factor in factors.items()))
    # The current layer contains its kept results.
    before = sizes.selected / max(layers, 1) if how == "selective" else 0
    own = sizes.peak or WITH_GRADIENTS * sizes.layer
    layer = current * tokens * (own - before)
    kept = size // max(layers, 1)
    size += max(0.0, layer - logits)
    after_head = round(max(0.0, layer - logits))
    after_layer = after_head if current else kept
    formula = [words[part] if factor == 1 else f"{factor:.3g} x {words[part]}" for part, factor in factors.items()]
    if current:
        factor = current if sizes.peak else current * WITH_GRADIENTS
        formula.append(
            f"{f'{factor:.3g} x ' * (factor != 1)}{words['peak' if sizes.peak else 'layer']}, beyond the logits"
        )
    found = MemoryTerm("activations", round(size), " + ".join(formula))
    if how != "offload":
        return Forward((found,), round(layer), after_layer=after_layer, after_head=after_head)
    moved = MemoryTerm("offloaded_activations", tokens * sizes.inputs, words["inputs"], beside)
    return Forward((found, moved), round(layer), after_layer=after_layer, after_head=after_head)


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


def _kept_layers(how: Checkpointing, layers: int) -> int:
    """Return the layers whose activations stay until backward, at least the one that computes; rounded up."""
    kept = (1 - recomputed_share(how, layers)) * layers
    # Only a budget keeps a part of a layer.
    return max(1, math.ceil(kept) if isinstance(how, BudgetSpec) else round(kept))


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
