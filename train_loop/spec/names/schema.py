"""The JSON schema with the spellings that a spec may use, for editors and validators."""

from typing import Any

from train_loop.spec.names.spellings import SHARDING, SPELLINGS

_ADDED = {
    "ModelSpec": {
        "disable_gradient_checkpointing": {
            "type": ["boolean", "null"],
            "description": "ROLL's name: true becomes gradient_checkpointing: none, and false full",
        }
    },
    "TrainingSpec": {
        "warmup_ratio": {
            "type": ["number", "null"],
            "minimum": 0,
            "exclusiveMaximum": 1,
            "description": "fraction of the run from learning rate 0 to learning_rate; it becomes warmup_steps",
        }
    },
}
"""Properties of fields that become others, by part."""


def accept_spellings(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a spec in which other spellings are valid, too."""
    parts = schema["$defs"]
    for name, properties in _ADDED.items():
        parts[name]["properties"] |= properties
    (checkpointing,) = (
        one for one in parts["ModelSpec"]["properties"]["gradient_checkpointing"]["oneOf"] if "enum" in one
    )
    checkpointing["enum"] = [*checkpointing["enum"], True, False]
    sharding = parts["StrategySpec"]["properties"]["sharding_strategy"]
    sharding["enum"] = [*SHARDING, *(name.lstrip("_").lower() for name in SHARDING), *range(1, len(SHARDING) + 1)]
    # An enumeration of several types has no type.
    for one in (checkpointing, sharding):
        one.pop("type", None)
    found: dict[str, Any] = _with_spellings(schema)
    return found


def _with_spellings(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_with_spellings(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: _with_spellings(one) for name, one in schema.items()}
    choices = found.get("enum") or ([found["const"]] if "const" in found else [])
    if more := [name for name, value in SPELLINGS.items() if value in choices]:
        found.pop("const", None)
        found["enum"] = [*choices, *more]
    return found
