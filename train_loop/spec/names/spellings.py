"""Spellings of values: those of other tools become our own. Fields that contradict each other are rejected. Pure."""

import difflib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from train_loop.spec.text.scalars import read_number

Part = Mapping[str, Any]
Rewrite = Callable[[Part], dict[str, Any] | None]
"""Return the fields that a field becomes, None if its value is not another spelling. Raises ValueError."""

NODE = "node"
"""The fsdp_size of as many workers as a node holds."""
AUTO = "auto"
"""The per_device_train_batch_size that the workers choose by their memory."""
LONGEST = 64
"""Maximum characters of a name or value that is compared with others."""


def _spelled(table: Mapping[str, str], prefixes: Sequence[str] = ("",)) -> dict[str, str]:
    return {f"{prefix}{name}": value for value, names in table.items() for prefix in prefixes for name in names.split()}


DTYPES = _spelled({"bf16": "bfloat16", "fp16": "float16 half", "fp32": "float32 float"}, ("", "torch."))
"""Spellings of dtypes."""
SPELLINGS = DTYPES | {"warmup_stable_decay": "wsd"}
"""Other spellings of values, whichever field has them."""

_NEAR = DTYPES | _spelled(
    {
        "adamw": "adamw_torch adamw_torch_fused adamw_hf adamw_apex_fused",
        "lion": "lion_32bit lion_8bit paged_lion_32bit paged_lion_8bit lion_pytorch",
        "schedule_free_adamw": "adamw_schedulefree adamw_schedule_free adamwschedulefree schedulefree schedule_free",
        "adamw_8bit": "adamw_bnb_8bit paged_adamw_8bit adamw_torch_8bit",
        "constant_with_warmup": "warmup",
        "sdpa": "eager",
        "jsonl": "json ndjson",
        "text": "txt",
        "truncate": "truncate_right",
    }
)
"""Values of other tools, with the value of the same or the nearest meaning."""

SHARDING: dict[str, dict[str, Any]] = {
    "FULL_SHARD": {},
    "SHARD_GRAD_OP": {"reshard_after_forward": False},
    "NO_SHARD": {},
    "HYBRID_SHARD": {"fsdp_size": NODE},
    "_HYBRID_SHARD_ZERO2": {"reshard_after_forward": False, "fsdp_size": NODE},
}
"""FSDP1's strategies, in the order of torch's and Accelerate's numbers from 1, with the other fields that they set."""


def normalised(name: str) -> str:
    """Return a name of a field or value as the tables have it."""
    return name.strip().lstrip("-").replace("-", "_").lower()


def nearest_value(given: Any, expected: Sequence[str]) -> str | None:
    """Return the expected value that a misspelt value, or one of another tool, may have meant; None if none is near."""
    if not isinstance(given, str):
        return None
    name = normalised(given[:LONGEST])
    if _NEAR.get(name) in expected:
        return _NEAR[name]
    lower = {normalised(one): one for one in expected}
    near = difflib.get_close_matches(name.removeprefix("torch."), lower, n=1, cutoff=0.75)
    return lower[near[0]] if near else None


def _sharding(strategy: Part) -> dict[str, Any] | None:
    written = strategy["sharding_strategy"]
    name = _strategy_of(written)
    if name is None:
        if not isinstance(written, str):
            return None
        near, names = nearest_value(written, list(SHARDING)), list(SHARDING)
        meant = f"; did you mean {near}?" if near else ""
        shown = json.dumps(written[:LONGEST])
        raise ValueError(f"invalid sharding_strategy {shown}; expected {', '.join(names[:-1])} or {names[-1]}{meant}")
    fields, reshard, size = SHARDING[name], strategy.get("reshard_after_forward"), strategy.get("fsdp_size")
    if "reshard_after_forward" in fields and reshard not in (None, False):
        raise ValueError(
            f"sharding_strategy={name} keeps parameters gathered after the forward pass, but reshard_after_forward="
            f"{json.dumps(reshard)} frees them; remove one"
        )
    if name == "HYBRID_SHARD" and reshard is False:
        raise ValueError(
            "sharding_strategy=HYBRID_SHARD frees parameters after the forward pass, but reshard_after_forward=false "
            "keeps them; remove one, or choose _HYBRID_SHARD_ZERO2"
        )
    if "fsdp_size" in fields and size in (0, 1):
        raise ValueError(
            f"sharding_strategy={name} shards inside groups and replicates between them, but fsdp_size={size} makes "
            "one group of all workers; remove one"
        )
    given = {field: strategy[field] for field in fields if strategy.get(field) is not None}
    return {"sharding_strategy": name if name == "NO_SHARD" else "FULL_SHARD", **fields, **given}


def _strategy_of(written: Any) -> str | None:
    """Return FSDP1's name of a strategy that is written as a name or a number; None for others."""
    number = read_number(written) if isinstance(written, str) else written
    if isinstance(number, int) and not isinstance(number, bool):
        return list(SHARDING)[number - 1] if 1 <= number <= len(SHARDING) else None
    if not isinstance(written, str):
        return None
    name = written.rpartition("ShardingStrategy.")[2]
    # Transformers writes them in lower case, and Accelerate the last one without an underscore.
    names = {known.lstrip("_").lower(): known for known in SHARDING}
    return names.get(name.lstrip("_").lower()) if name in (name.lower(), name.upper()) else None


def _warmup(training: Part) -> dict[str, Any]:
    ratio, steps = training["warmup_ratio"], training.get("warmup_steps")
    if ratio is None:
        return {}
    number = read_number(ratio) if isinstance(ratio, str) else ratio
    if isinstance(number, bool) or not isinstance(number, int | float) or not 0 <= number < 1:
        raise ValueError(
            f"warmup_ratio={json.dumps(ratio)[:LONGEST]} is not a fraction of the run; choose one from 0 to below 1, "
            "or set warmup_steps"
        )
    if steps is not None:
        raise ValueError(f"warmup_ratio={ratio} and warmup_steps={steps} each set the warm-up; remove one")
    return {"warmup_steps": number}


_CHECKPOINTING = {True: "full", False: "none"}


def _checkpointing(model: Part) -> dict[str, Any] | None:
    written = model["gradient_checkpointing"]
    return {"gradient_checkpointing": _CHECKPOINTING[written]} if isinstance(written, bool) else None


def _no_checkpointing(model: Part) -> dict[str, Any]:
    disabled, given = model["disable_gradient_checkpointing"], model.get("gradient_checkpointing")
    if disabled is None:
        return {}
    if not isinstance(disabled, bool):
        shown = json.dumps(disabled)[:LONGEST]
        raise ValueError(f"invalid disable_gradient_checkpointing {shown}; expected true or false")
    if given is not None and (given == "none") is not disabled:
        raise ValueError(
            f"disable_gradient_checkpointing={json.dumps(disabled)} contradicts gradient_checkpointing={given}; "
            "remove one"
        )
    return {"gradient_checkpointing": given or _CHECKPOINTING[not disabled]}


def _backward_prefetch(strategy: Part) -> dict[str, Any] | None:
    written = strategy["backward_prefetch"]
    if not isinstance(written, str):
        return None
    name = written.rpartition(".")[2].upper()
    if name in ("BACKWARD_POST", "NO_PREFETCH"):
        raise ValueError(f"FSDP2 has no backward_prefetch={name}: it always gathers ahead, as BACKWARD_PRE; remove it")
    return {"backward_prefetch": 1} if name == "BACKWARD_PRE" else None


REWRITTEN: dict[tuple[str, str], Rewrite] = {
    ("model", "gradient_checkpointing"): _checkpointing,
    ("model", "disable_gradient_checkpointing"): _no_checkpointing,
    ("training", "warmup_ratio"): _warmup,
    ("strategy", "sharding_strategy"): _sharding,
    ("strategy", "backward_prefetch"): _backward_prefetch,
}
"""The fields that have other spellings or become other fields, by part and name."""
