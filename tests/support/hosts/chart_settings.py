"""The part of the chart's schema that follows from the settings of the service."""

from typing import Any

from service.config.settings import Settings

Schema = dict[str, Any]
_TEXT = {
    "boolean": "^(true|false)$",
    "integer": "^[0-9]+$",
    "number": r"^[0-9]+(\.[0-9]+)?$",
}
"""Numbers and booleans as text, as in an environment variable."""
_NEGATIVE = "^-?[0-9]+$"
_LIMITS = {"minimum", "maximum", "exclusiveMinimum"}
_RATE = "^(none|[0-9]{1,5}/(second|minute|hour))$"


def settings_schema() -> dict[str, Schema]:
    """Return the schema of each setting as a value of the chart, which writes lists and maps as text."""
    found = Settings.model_json_schema()["properties"]
    made = {name: _value(found[name]) for name in sorted(found)}
    # A number for all projects.
    made["max_priority"]["type"] = ["object", "integer", "string"]
    made["streams_per_key"]["pattern"] = "^(none|[0-9]+)$"
    return made


def _value(one: Schema) -> Schema:
    (one, *_) = one.get("anyOf", [one])
    kind = one.get("type")
    if "$ref" in one:
        return {"type": "string", "pattern": _RATE}
    if "enum" in one:
        return {"enum": one["enum"]}
    if kind in _TEXT:
        limits = {name: value for name, value in one.items() if name in _LIMITS}
        negative = kind == "integer" and limits.get("minimum", limits.get("exclusiveMinimum", -1)) < 0
        return {"type": [kind, "string"], **limits, "pattern": _NEGATIVE if negative else _TEXT[kind]}
    if kind == "array":
        return {"type": ["array", "string"], "items": {"type": "string"}}
    return {"type": ["object", "string"] if kind == "object" else "string"}
