"""Additions to FastAPI's OpenAPI document: manually parsed bodies, problems, headers, links."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute
from pydantic import BaseModel

from service.api.schemas import ProblemDetails

Part = dict[str, Any]
"""A part of an OpenAPI document."""
Answers = dict[int | str, Part]
"""The responses of a route, by status."""
TAGS = {
    "health": "Liveness and readiness of the service; no key needed.",
    "schemas": "JSON schema of the job spec; no key needed.",
    "jobs": "Submit, plan, list, pause, resume, clone, cancel and delete jobs.",
    "runs": "Events, metrics and logs of a run, in pages or as a stream.",
    "checkpoints": "Committed checkpoints of a job: verify, compare, pin and export them.",
    "nodes": "Hosts of the cluster: state, free capacity, jobs and last failure.",
    "usage": "Cluster usage of projects.",
    "access": "API keys, their roles, and the audit log.",
    "webhooks": "Webhooks for state changes of jobs, and their deliveries.",
    "operations": "Service operation: checks and metrics.",
}
_REFERENCE = "#/components/schemas/"
_SPEC = {"schema": {"oneOf": [{"$ref": f"{_REFERENCE}{name}"} for name in ("JobSpec", "InferJobSpec")]}}
SPEC_BODY: Part = {"requestBody": {"required": True, "content": {"application/json": _SPEC, "application/yaml": _SPEC}}}
"""A request body that is a job spec."""


def _header(description: str, *, required: bool = False) -> Part:
    return {"description": description, "required": required, "schema": {"type": "string"}}


LOCATION: Part = {"headers": {"Location": _header("path of the job", required=True)}}
"""The Location header of a response that returns a new job."""
_REQUEST_ID = {"X-Request-Id": _header("id of this request in the service's log", required=True)}
_PROBLEM = {"application/problem+json": {"schema": {"$ref": f"{_REFERENCE}ProblemDetails"}}}
_RETRY = {"Retry-After": _header("seconds to wait before the next try")}
_CLIENT_HEADERS = _RETRY | {
    "WWW-Authenticate": _header("of 401: the authentication scheme"),
    "Allow": _header("of 405: the allowed methods"),
}
_PROBLEMS: Part = {
    "4XX": {"description": "rejected; `code` is the reason", "headers": _CLIENT_HEADERS, "content": _PROBLEM},
    "5XX": {"description": "The service could not answer", "headers": _RETRY, "content": _PROBLEM},
}
_MADE_BY = {
    "job_id": ({"/jobs", "/jobs/{job_id}/clone"}, "$response.body#/id"),
    "key_id": ({"/keys"}, "$response.body#/key/id"),
    "webhook_id": ({"/webhooks"}, "$response.body#/webhook/id"),
}
"""Path parameter → the POST paths whose response contains its value, and the expression that selects it."""


def json_body(model: type[BaseModel], *, required: bool = False) -> Part:
    """Return the description of a manually parsed body of this model."""
    content = {"application/json": {"schema": model.model_json_schema()}}
    return {"requestBody": {"required": required, "content": content}}


def operation_id(route: APIRoute) -> str:
    """Return a short operation id that stays the same if paths change."""
    return "_".join([*map(str, route.tags[:1]), route.name])


class OpenApiApp(FastAPI):
    """An app with a complete OpenAPI document."""

    def openapi(self) -> Part:
        """Return the OpenAPI document."""
        if self.openapi_schema is None:
            _complete(super().openapi())
        assert self.openapi_schema is not None
        return self.openapi_schema

    @cached_property
    def openapi_text(self) -> bytes:
        """The OpenAPI document as JSON."""
        return json.dumps(self.openapi(), ensure_ascii=False, separators=(",", ":")).encode()


@dataclass(frozen=True)
class _Operation:
    """An operation of the OpenAPI document."""

    path: str
    method: str
    definition: Part

    @property
    def parameters(self) -> set[str]:
        """The names of its path parameters."""
        return set(re.findall(r"{(\w+)}", self.path))


def _complete(document: Part) -> None:
    schemas: Part = document["components"]["schemas"]
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    schemas["ProblemDetails"] = _hoisted(ProblemDetails.model_json_schema(), schemas)
    operations = [
        _Operation(path, method, definition)
        for path, methods in document["paths"].items()
        for method, definition in methods.items()
    ]
    used = {tag for operation in operations for tag in operation.definition["tags"]}
    document["tags"] = [
        {"name": name, "description": description} for name, description in TAGS.items() if name in used
    ]
    for operation in operations:
        for parameter in operation.definition.get("parameters", []):
            parameter["schema"] = _given(parameter["schema"])
        for content in operation.definition.get("requestBody", {}).get("content", {}).values():
            content["schema"] = _hoisted(content["schema"], schemas)
        _complete_answers(operation, operations)


def _given(schema: Part) -> Part:
    """Return a parameter's schema without null: a URL cannot contain null."""
    kinds = [kind for kind in schema.get("anyOf", []) if kind != {"type": "null"}]
    return {name: value for name, value in schema.items() if name != "anyOf"} | kinds[0] if len(kinds) == 1 else schema


def _hoisted(schema: Part, schemas: Part) -> Part:
    """Move a schema's definitions to the document's components, and return the schema with updated references."""
    placed: Part = json.loads(json.dumps(schema).replace("#/$defs/", _REFERENCE))
    schemas.update(placed.pop("$defs", {}))
    return placed


def _complete_answers(operation: _Operation, operations: Sequence[_Operation]) -> None:
    answers: Part = operation.definition["responses"]
    # FastAPI's default, whose schema no response of this service has.
    answers.pop("422", None)
    answers.update(_PROBLEMS)
    links = _links(operation, operations)
    for status, answer in answers.items():
        answers[status] = answer | {"headers": answer.get("headers", {}) | _REQUEST_ID}
        if links and status.startswith("2"):
            answers[status]["links"] = links


def _links(operation: _Operation, operations: Sequence[_Operation]) -> Part:
    """Return the links to operations that take the id which this operation creates."""
    return {
        other.definition["operationId"]: {"operationId": other.definition["operationId"], "parameters": {name: place}}
        for name, (makers, place) in _MADE_BY.items()
        if operation.method == "post" and operation.path in makers
        for other in operations
        if other.parameters == {name}
    }
