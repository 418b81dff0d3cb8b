"""The options of FSDP1 and FSDP2 as Accelerate and transformers spell them, without their prefix `fsdp_`."""

from typing import Any

from train_loop.spec.importers.draft import Draft, Drop, Rule, Take, unneeded
from train_loop.spec.importers.report import Outcome
from train_loop.spec.importers.values import flag, names, number
from train_loop.spec.names import NODE

_NUMBERED = {"1": "FULL_SHARD", "2": "SHARD_GRAD_OP", "3": "NO_SHARD", "4": "HYBRID_SHARD", "5": "HYBRID_SHARD_ZERO2"}
_RESHARDS = {"FULL_SHARD": True, "HYBRID_SHARD": True, "SHARD_GRAD_OP": False, "HYBRID_SHARD_ZERO2": False}
_PREFETCH = "FSDP2 always gathers the next layer ahead; raise strategy.{}_prefetch to gather more"


RULES: dict[str, Rule] = {
    "version": unneeded("every job trains with FSDP2"),
    "offload_params": Take("strategy.offload_policy", flag),
    "cpu_offload": Take("strategy.offload_policy", flag),
    "transformer_layer_cls_to_wrap": Take("strategy.wrap_policy.transformer_layer_cls_to_wrap", names),
    "activation_checkpointing": Take(
        "model.gradient_checkpointing", lambda value: "full" if flag(value) else "none", "memory only"
    ),
    "state_dict_type": unneeded("checkpoints are sharded; export writes a Hugging Face folder, and full one file"),
    "use_orig_params": unneeded("FSDP2 shards each parameter separately"),
    "cpu_ram_efficient_loading": unneeded("each rank reads its part of the weights; model.load: rank0 reads all once"),
    "sync_module_states": unneeded("each rank reads the same weights by name"),
    "limit_all_gathers": unneeded("FSDP2 needs no such limit: it frees memory without waiting for the CPU"),
    "backward_prefetch": unneeded(_PREFETCH.format("backward")),
    "backward_prefetch_policy": unneeded(_PREFETCH.format("backward")),
    "forward_prefetch": unneeded(_PREFETCH.format("forward")),
    "ignored_modules": Drop("name their parameters in strategy.ignored_params"),
    "mixed_precision_policy": unneeded("dtypes come from mixed_precision"),
    "xla": Drop("XLA is not supported"),
    "xla_fsdp_v2": Drop("XLA is not supported"),
    "xla_fsdp_grad_ckpt": Drop("XLA is not supported"),
    "xla_fsdp_settings.*": unneeded("XLA is not supported"),
}


def read_fsdp(draft: Draft, field: str, *, per_host: int | None = None) -> None:
    """Translate the options below a field; `per_host` is the number of processes of a host, None if unknown."""
    options: Any = draft.get(field, {})
    given = {name.removeprefix("fsdp_"): name for name in options} if isinstance(options, dict) else {}
    _sharding(draft, field, given, per_host)
    _wrapping(draft, field, given)
    draft.apply({given.get(name.removesuffix(".*"), name) + (".*" if name.endswith(".*") else ""): rule
                 for name, rule in RULES.items()}, below=field)  # fmt: skip


def _sharding(draft: Draft, field: str, given: dict[str, str], per_host: int | None) -> None:
    for name in ("sharding_strategy", "reshard_after_forward"):
        if name not in given:
            continue
        path = f"{field}.{given[name]}"
        value = draft.get(path)
        # FSDP1 of transformers has the strategy's name here; FSDP2 has a boolean or a number of ranks.
        chosen = None if name == "reshard_after_forward" and not isinstance(value, str) else sharding_name(value)
        if chosen is not None:
            write_sharding(draft, path, chosen, per_host)
        elif value is not None:
            draft.take(path, "strategy.reshard_after_forward", _reshard)


def _reshard(value: Any) -> Any:
    return flag(value) if isinstance(value, bool) or str(value).lower() in ("true", "false") else number(value)


def sharding_name(value: Any) -> str | None:
    """Return FSDP1's name of a sharding strategy; None for other values."""
    name = str(value).upper().removeprefix("SHARDINGSTRATEGY.").lstrip("_")
    name = name if isinstance(value, bool) else _NUMBERED.get(name, name)
    return name if name in (*_RESHARDS, "NO_SHARD") else None


def write_sharding(draft: Draft, path: str, name: str, per_host: int | None) -> None:
    """Write the fields that FSDP1's sharding strategy stands for."""
    if name == "NO_SHARD":
        draft.write(path, "strategy.sharding_strategy", "NO_SHARD")
        return
    draft.write(
        path, "strategy.reshard_after_forward", _RESHARDS[name], reason=f"what {name} means in FSDP2; numbers stay"
    )
    if name.startswith("HYBRID"):
        reason = "shards inside a host, copies between hosts"
        draft.write(path, "strategy.fsdp_size", NODE if per_host is None else per_host, reason=reason)


def _wrapping(draft: Draft, field: str, given: dict[str, str]) -> None:
    policy = str(draft.get(f"{field}.{given.get('auto_wrap_policy', 'auto_wrap_policy')}", "TRANSFORMER_BASED_WRAP"))
    if "min_num_params" in given:
        path = f"{field}.{given['min_num_params']}"
        least = number(draft.get(path))
        if policy.upper() == "SIZE_BASED_WRAP" and least:
            draft.take(path, "strategy.wrap_policy.min_num_params", number)
        else:
            draft.note(path, Outcome.NOT_NEEDED, reason="without effect unless auto_wrap_policy is SIZE_BASED_WRAP")
    if policy.upper() == "SIZE_BASED_WRAP" and "transformer_layer_cls_to_wrap" in given:
        draft.leave(f"{field}.{given['transformer_layer_cls_to_wrap']}", "units are chosen by size")
    if "auto_wrap_policy" not in given:
        return
    path = f"{field}.{given['auto_wrap_policy']}"
    if policy.upper() == "NO_WRAP":
        draft.drop(path, Drop("each layer is a unit: numbers stay, and less memory is needed"))
    else:
        draft.note(
            path,
            Outcome.NOT_NEEDED,
            reason="units are the model's layers, or the classes or the size that the spec names",
        )
