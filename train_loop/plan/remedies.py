"""The planned memory of a run that is out of memory, and remedies, cheapest first."""

from train_loop.plan.memory.term import MemoryTerm, Place
from train_loop.plan.model.shape import ModelShape
from train_loop.plan.plan import plan_job
from train_loop.plan.resources import format_bytes
from train_loop.spec import AnyJobSpec

_TERMS = 4
_REMEDIES = 4


def memory_terms(spec: AnyJobSpec, shape: ModelShape, place: Place) -> list[MemoryTerm]:
    """Return the plan's terms for a place, in bytes of one rank; without a GPU, all of them use host memory."""
    memory = plan_job(spec, shape).memory
    return [term for term in memory if term.bytes and (term.place == place or not _has_gpu(spec))]


def memory_advice(spec: AnyJobSpec, shape: ModelShape, place: Place) -> str:
    """Return the largest terms of the plan and the cheapest remedies, as the end of a message."""
    terms = memory_terms(spec, shape, place)
    largest = sorted(terms, key=lambda term: -term.bytes)[:_TERMS]
    sizes = ", ".join(f"{term.name} {format_bytes(term.bytes)}" for term in largest)
    remedies = "; ".join(memory_remedies(spec, place, shape)[:_REMEDIES])
    total = format_bytes(sum(term.bytes for term in terms))
    return f"the plan estimates {total} per rank: {sizes}; remedies, cheapest first: {remedies}"


def memory_remedies(spec: AnyJobSpec, place: Place, shape: ModelShape) -> list[str]:
    """Return changes that reduce memory at a place: spec changes without cost, slower ones, then cluster changes.

    `shape` tells which of them its model accepts. Without a GPU, the model computes in host memory too.
    """
    on_gpu = bool(spec.scaling.resources_per_worker.get("GPU"))
    found = [
        *(_beside(spec) if place == "host" else []),
        *(_computing(spec, shape) if place == "device" or not on_gpu else []),
    ]
    workers = "more workers in scaling.num_workers, for smaller shards"
    shards = spec.strategy.sharding_strategy != "NO_SHARD"
    last = ["hosts with more memory, or fewer workers on each"] if place == "host" else []
    return [*found, *([workers] if shards and place == "device" else []), *last]


def _computing(spec: AnyJobSpec, shape: ModelShape) -> list[str]:
    trains, model, training, strategy = spec.trains, spec.run.model, spec.run.training, spec.strategy
    by_size, has_experts = strategy.wrap_policy.min_num_params is not None, shape.active is not None
    size, whole_layers = training.micro_batch, strategy.tp_size == 1
    checkpointing = model.gradient_checkpointing
    recomputed = "selective, or full, which saves more" if can_select(spec, shape) else "full"
    choices = [
        (training.chunked_loss is False, "training.chunked_loss: null"),
        (strategy.sharding_strategy == "NO_SHARD", "strategy.sharding_strategy: FULL_SHARD"),
        (strategy.reshard_after_forward is False, "strategy.reshard_after_forward: null"),
        (strategy.gradient_sync == "last", "strategy.gradient_sync: every"),
        (by_size, "a smaller strategy.wrap_policy.min_num_params"),
        (size > 1, f"{spec.batch_field}: {size // 2}{' at the same global_batch_size' if trains else ''}"),
        (trains and checkpointing == "none", f"model.gradient_checkpointing: {recomputed}"),
        (trains and checkpointing not in ("none", "full", "offload"), "model.gradient_checkpointing: full"),
        (may_split_states(spec), "strategy.sequence_parallel: true"),
        (not strategy.apply_tiled_mlp and not by_size and shape.can_tile, "strategy.apply_tiled_mlp: true"),
        (strategy.shards > 1, "strategy.fsdp_size: 0"),
        (trains and has_experts, f"a larger strategy.ep_size than {strategy.ep_size}"),
        (
            trains and training.optimizer == "adamw" and whole_layers and strategy.ep_size == 1,
            "training.optimizer: adamw_8bit",
        ),
        (
            trains and checkpointing == "full" and _has_gpu(spec) and not spec.model.compile,
            "model.gradient_checkpointing: offload",
        ),
        (strategy.offload_policy is not True and _has_gpu(spec), "strategy.offload_policy: true"),
        (True, f"a larger strategy.ulysses_size than {strategy.ulysses_size}, or a smaller data.sequence_length"),
    ]
    return [change for helps, change in choices if helps]


def can_select(spec: AnyJobSpec, shape: ModelShape) -> bool:
    """Return whether `gradient_checkpointing: selective` may help: layers that it recomputes have no units inside."""
    strategy = spec.strategy
    inside = strategy.norm_dtype or strategy.precision or strategy.wrap_policy.min_num_params
    return spec.code is None and shape.active is None and not inside


def may_split_states(spec: AnyJobSpec) -> bool:
    """Return whether a job that does not use sequence parallelism may."""
    strategy = spec.strategy
    return strategy.tp_size > 1 and strategy.token_parts == 1 and not spec.run.data.sequence_length % strategy.peers


def _beside(spec: AnyJobSpec) -> list[str]:
    """Return spec changes that reduce the host memory outside the model's computation."""
    choices = [
        (spec.failure.spare_workers, "failure.spare_workers: false"),
        (spec.trains and spec.strategy.save_mode != "sync", "strategy.async_save_ckpt: false"),
        (spec.trains and spec.model.gradient_checkpointing == "offload", "model.gradient_checkpointing: full"),
        (spec.strategy.offload_policy and _has_gpu(spec), "strategy.offload_policy: false"),
    ]
    return [change for helps, change in choices if helps]


def _has_gpu(spec: AnyJobSpec) -> bool:
    return bool(spec.scaling.resources_per_worker.get("GPU"))
