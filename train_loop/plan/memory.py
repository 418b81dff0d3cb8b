"""Parameters → bytes per worker, each term with the formula it comes from."""

from dataclasses import dataclass

from train_loop.plan.head import DTYPE_BYTES, chunk_rows, logits_row_bytes
from train_loop.plan.mesh import MeshPlan
from train_loop.plan.shape import ModelShape
from train_loop.spec import JobSpec


@dataclass(frozen=True)
class MemoryTerm:
    """One reason for memory in use on a worker."""

    name: str
    bytes: int
    formula: str


def estimate_memory(spec: JobSpec, shape: ModelShape, mesh: MeshPlan) -> tuple[MemoryTerm, ...]:
    """Bytes per worker at the peak of a step, by term; an estimate, not a limit.

    Master weights, gradients and optimizer state are sharded over fsdp, and counted for frozen parameters too, whose
    names are not known here; FSDP2 gathers one layer ahead of the one at work; activations are counted at one
    micro-batch on 1/sp of the sequence.
    """
    shard = -(-shape.parameters // mesh.fsdp)
    master = DTYPE_BYTES[spec.model.master_dtype]
    compute = DTYPE_BYTES[spec.strategy.param_dtype]
    gathered = max(2 * shape.layer_parameters, shape.embedding_parameters) if mesh.fsdp > 1 else 0
    tokens = spec.training.per_device_train_batch_size * spec.data.sequence_length // mesh.sp
    return (
        MemoryTerm("parameters", master * shard, f"{master} bytes x parameters / fsdp"),
        MemoryTerm(
            "gathered_parameters",
            compute * gathered,
            f"{compute} bytes x the larger of two layers and the embeddings, gathered for use",
        ),
        MemoryTerm("gradients", master * shard, f"{master} bytes x parameters / fsdp"),
        _optimizer(spec, shape, mesh, master),
        MemoryTerm("ema", 4 * shard if spec.training.ema_decay else 0, "4 bytes x parameters / fsdp, where asked for"),
        _activations(spec, shape, tokens, compute),
        MemoryTerm(
            "attention_mask", _mask_bytes(spec), "1 byte x sequences x sequence_length^2, where documents share one"
        ),
        _logits(spec, shape, tokens),
    )


def _logits(spec: JobSpec, shape: ModelShape, tokens: int) -> MemoryTerm:
    row = logits_row_bytes(spec, shape)
    rows = chunk_rows(spec, shape, tokens=tokens)
    if rows is None:
        return MemoryTerm("logits", row * tokens, f"{row // shape.vocab} bytes x tokens x vocab")
    return MemoryTerm(
        "logits",
        row * rows + 4 * shape.vocab * shape.hidden,
        f"{row // shape.vocab} bytes x {rows} tokens of a chunk x vocab + 4 bytes x vocab x H",
    )


def _optimizer(spec: JobSpec, shape: ModelShape, mesh: MeshPlan, master: int) -> MemoryTerm:
    total, in_layers = shape.parameters, shape.layers * shape.layer_parameters
    size, formula = {
        "adamw": (2 * master * total, f"2 Adam moments x {master} bytes x parameters / fsdp"),
        "adamw_8bit": (2 * total, "2 Adam moments x 1 byte x parameters / fsdp"),
        "sgd": (master * total, f"1 momentum x {master} bytes x parameters / fsdp"),
        "muon": (
            master * (2 * total - in_layers),
            f"{master} bytes x (1 momentum of layers + 2 Adam moments of the rest) / fsdp",
        ),
        "adafactor": (8 * total // shape.hidden, "4 bytes x means of rows and columns, about 2 parameters / hidden"),
    }[spec.training.optimizer]
    # Means of columns are on every rank.
    ranks = 1 if spec.training.optimizer == "adafactor" else mesh.fsdp
    return MemoryTerm("optimizer", -(-size // ranks), formula)


def _mask_bytes(spec: JobSpec) -> int:
    return spec.training.per_device_train_batch_size * spec.data.sequence_length**2 if spec.data.packing else 0


def _activations(spec: JobSpec, shape: ModelShape, tokens: int, compute: int) -> MemoryTerm:
    # What one decoder layer keeps for its backward: norms' inputs, q, k, v, attention output, three MLP tensors.
    layer = 4 * shape.hidden + 2 * (shape.heads + shape.kv_heads) * shape.head_dim + 3 * shape.intermediate
    if spec.model.gradient_checkpointing == "none":
        return MemoryTerm(
            "activations",
            compute * tokens * layer * shape.layers,
            f"{compute} bytes x tokens x (4H + 2(heads + kv_heads)head_dim + 3F) x layers",
        )
    return MemoryTerm(
        "activations",
        compute * tokens * (shape.hidden * shape.layers + layer),
        f"{compute} bytes x tokens x (H x layers + one layer recomputed)",
    )
