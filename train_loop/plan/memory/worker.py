"""The memory terms of a worker: of training, or of forward passes alone. With shared layers, those of its part."""

from dataclasses import replace

from train_loop.plan.memory.estimate import estimate_memory
from train_loop.plan.memory.term import DTYPE_BYTES, MemoryTerm
from train_loop.plan.mesh import MeshPlan
from train_loop.plan.model.shape import ModelShape
from train_loop.plan.tree import ReductionTree
from train_loop.spec import JobSpec

_OF_TRAINING = ("optimizer", "ema", "gradients", "partial_sums", "checkpoint_staging", "offloaded_activations")
"""Memory terms of training."""
_BYTES_OF_CHOICE = 4 + 4 + 8 * 4
"""Bytes for each logit from which a token is drawn: fp32 twice, and integers and noise of 64 bits."""
_OF_EXPERTS = {
    "gathered_parameters": "experts are those of a worker: / ep",
    "activations": "as if the experts of all workers got equal numbers of tokens",
}
"""Assumptions of memory terms if ranks share experts, by name."""


def training_terms(
    spec: JobSpec, shape: ModelShape, mesh: MeshPlan, tree: ReductionTree | None
) -> tuple[MemoryTerm, ...]:
    """Return the memory terms of a worker; with shared layers or experts, those of its part of them."""
    terms = estimate_memory(spec, shape.shared(tp=mesh.tp, ep=mesh.ep), mesh, tree)
    if mesh.ep > 1:
        terms = tuple(
            replace(term, formula=f"{term.formula}; {_OF_EXPERTS[term.name]}") if term.name in _OF_EXPERTS else term
            for term in terms
        )
    if mesh.tp == 1:
        return terms
    divided = "heads, F, vocab and parameters are those of a worker: / tp"
    return tuple(
        term if term.name == "attention_mask" else replace(term, formula=f"{term.formula}; {divided}") for term in terms
    )


def needs_units(spec: JobSpec, mesh: MeshPlan, *, is_mixture: bool) -> bool:
    """Return whether a model consists of FSDP units, which hold shards, or other dtypes than they compute in.

    Inference without either needs no units: each worker holds the whole model, and gathers and copies nothing.
    """
    strategy, dtype = spec.strategy, spec.strategy.param_dtype
    dtypes = [strategy.norm_dtype, strategy.output_dtype, *([spec.model.router_dtype] if is_mixture else [])]
    splits = mesh.fsdp * mesh.tp * mesh.ep > 1
    return spec.infer is None or splits or any(one not in (None, dtype) for one in dtypes)


def inference_terms(spec: JobSpec, shape: ModelShape, mesh: MeshPlan) -> tuple[MemoryTerm, ...]:
    """Return the memory terms of a worker that computes forward passes only: one layer keeps its activations."""
    counts = shape.counts and replace(shape.counts, trained=0, trained_matrices=0)
    one_layer = spec.model.model_copy(update={"gradient_checkpointing": "offload"})
    terms = training_terms(spec.model_copy(update={"model": one_layer}), replace(shape, counts=counts), mesh, None)
    terms = tuple(
        replace(term, bytes=0, formula="0, because nothing is trained") if term.name in _OF_TRAINING else term
        for term in terms
    )
    if not needs_units(spec, mesh, is_mixture=shape.active is not None):
        whole = "0, because each worker holds the whole model"
        terms = tuple(
            replace(term, bytes=0, formula=whole) if term.name == "gathered_parameters" else term for term in terms
        )
    if spec.chats != "prompt":
        return terms
    return (
        *(term if term.name != "logits" else _last_logits(spec, shape) for term in terms),
        _cache(spec, shape, mesh),
    )


def _cache(spec: JobSpec, shape: ModelShape, mesh: MeshPlan) -> MemoryTerm:
    """Return the keys and values of this worker's heads, for all tokens of the rows that are generated together."""
    size = DTYPE_BYTES[spec.strategy.param_dtype]
    heads = max(shape.shared(tp=mesh.tp).kv_heads // mesh.sp, 1)
    values = spec.sequences_per_device * spec.positions * shape.layers * heads * shape.head_dim
    return MemoryTerm(
        "kv_cache",
        2 * size * values,
        f"2 x {size} bytes x rows x (sequence_length + max_new_tokens) x L x kv heads / tp / sp x head_dim",
    )


def _last_logits(spec: JobSpec, shape: ModelShape) -> MemoryTerm:
    """Return the logits of each row's last token, with the scores and the noise by which a token is drawn."""
    each = DTYPE_BYTES[spec.strategy.param_dtype] + _BYTES_OF_CHOICE
    return MemoryTerm("logits", each * spec.sequences_per_device * shape.vocab, f"{each} bytes x rows x vocab")
