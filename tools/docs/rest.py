"""The reference of REST calls, from the committed `openapi.json`."""

import json
import re
from collections.abc import Iterator
from typing import Any

from tools.docs.markdown import code, sentence, table
from tools.docs.openapi import FILE

Schema = dict[str, Any]
_METHODS = ("get", "post", "put", "patch", "delete")
# Another page describes the job spec.
_PARTS = ("ScheduleOptions", "WorkerRange")


def page() -> str:
    """Return the Markdown of the page."""
    document = json.loads(FILE.read_text())
    tags = {tag["name"]: tag.get("description", "") for tag in document.get("tags", [])}
    calls = list(operations(document))
    used = dict.fromkeys([*tags, *(tag for _, _, call in calls for tag in call.get("tags", ["other"]))])
    parts = [
        "# REST API\n\n[The REST API](../guides/rest-api.md) describes conventions. The same description for programs: "
        "[`openapi.json`](openapi.json), and `GET /openapi.json` of a service.\n"
    ]
    for tag in used:
        parts.append(f"## {tag.capitalize()}\n\n{tags.get(tag, '')}\n")
        parts += [_call(*one) for one in calls if tag in one[2].get("tags", ["other"])]
    parts.append("## Schemas\n")
    parts += [_schema(name, schema) for name, schema in _documented(document)]
    return "\n".join(parts)


def operations(document: Schema) -> Iterator[tuple[str, str, Schema]]:
    """Yield method, path and description of each call."""
    for path, item in document["paths"].items():
        for method in _METHODS:
            if method in item:
                yield method.upper(), path, {"parameters": [], **item[method]}


def _call(method: str, path: str, call: Schema) -> str:
    text = call.get("description") or call.get("summary", "")
    parts = [f"### {method} {path}\n\n{sentence(text)}\n"]
    if call["parameters"]:
        rows = [
            (code(one["name"]), one["in"], _type(one.get("schema", {})), sentence(_parameter(one)))
            for one in call["parameters"]
        ]
        parts.append(table(("parameter", "in", "type", "meaning"), rows))
    if "requestBody" in call:
        parts.append(_body(call["requestBody"]["content"]))
    answers = [
        (code(status), sentence(answer.get("description", "")), _content(answer.get("content", {})))
        for status, answer in call.get("responses", {}).items()
    ]
    parts.append(table(("response", "meaning", "body"), answers))
    return "\n".join(parts)


def _body(content: Schema) -> str:
    """Return the fields of a body, or the name of its schema."""
    (inline, *_) = (one.get("schema", {}) for one in content.values())
    fields = _fields(inline, "required") if inline.get("properties") else ""
    return f"Body: {_content(content)}\n\n{fields}"


def _fields(schema: Schema, presence: str) -> str:
    required = schema.get("required", ())
    rows = [
        (code(name), _type(one), "yes" if name in required else "no", sentence(one.get("description", "")))
        for name, one in schema.get("properties", {}).items()
    ]
    return table(("field", "type", presence, "meaning"), rows) if rows else ""


def _parameter(one: Schema) -> str:
    required = "required" if one.get("required") and one["in"] != "path" else ""
    return "; ".join(filter(None, (one.get("description") or one.get("schema", {}).get("description", ""), required)))


def _content(content: Schema) -> str:
    kinds = dict.fromkeys(f"{_type(one.get('schema', {}))} ({code(kind)})" for kind, one in content.items())
    return ", ".join(kinds)


def _documented(document: Schema) -> list[tuple[str, Schema]]:
    return [(name, schema) for name, schema in sorted(document["components"]["schemas"].items()) if _has_section(name)]


def _has_section(name: str) -> bool:
    """Return whether a schema is described on this page, and not on the page of the job spec."""
    return not name.endswith("Spec") and name not in _PARTS


def _schema(name: str, schema: Schema) -> str:
    parts = [f"### {name}\n", f"{sentence(schema.get('description', ''))}\n"]
    if "enum" in schema:
        parts.append(f"{_type(schema)}\n")
    return "\n".join([*parts, _fields(schema, "always present")])


def _type(schema: Schema) -> str:
    """Return a type, with links to the schemas that it names."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{_anchor(name)})" if _has_section(name) else f"[{name}](spec.md)"
    for key in ("anyOf", "oneOf", "allOf"):
        if key in schema:
            return " or ".join(dict.fromkeys(map(_type, schema[key])))
    if "enum" in schema or "const" in schema:
        return " or ".join(code(json.dumps(value)) for value in schema.get("enum", [schema.get("const")]))
    match schema.get("type"):
        case "array":
            return f"list of {_type(schema.get('items', {}))}"
        case "object":
            values = schema.get("additionalProperties")
            return f"object of {_type(values)}" if isinstance(values, dict) else "object"
        case None:
            return "any"
        case kind:
            return str(kind) + _limits(schema)


def _limits(schema: Schema) -> str:
    names = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    found = [f"{sign} {schema[name]}" for name, sign in names.items() if name in schema]
    if "maxLength" in schema:
        found.append(f"at most {schema['maxLength']} characters")
    return f" ({', '.join(found)})" if found else ""


def _anchor(name: str) -> str:
    return re.sub(r"[^a-z0-9_-]", "", name.lower())
