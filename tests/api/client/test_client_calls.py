"""The client's calls against the API's own description: none is forgotten, and each is typed."""

import inspect
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.api.schemas import ExportIn
from tests.support.fakes.service import FakeService
from trainshed import Api

NO_CALL = {("GET", "/healthz"), ("GET", "/readyz"), ("GET", "/metrics"), ("GET", "/schemas/job.json")}
"""Operations for probes, monitoring and editors, not for users of the API."""
OUR_MODULES = ("service.api.schemas", "service.domain", "train_loop.spec", "trainshed")
LIBRARIES = {"annotated_types", "pydantic", "pydantic_core", "typing_extensions", "typing_inspection", "yaml"} | {
    *("httpx", "httpx_sse", "httpcore", "h11", "anyio", "certifi", "idna", "sniffio"),
}
"""The client's four dependencies, and theirs."""
COMMAND_OF_HTTPX = ("click", "rich", "pygments")
"""httpx loads these for its own command, if they are installed."""


class _Sent(Exception):
    """Raised by the transport in place of an answer."""


@dataclass(frozen=True)
class Sent:
    """The request of a call."""

    name: str
    method: str
    path: str
    streams: bool

    @property
    def operation(self) -> tuple[str, str]:
        return self.method, self.path


def _sent(name: str) -> Sent:
    """Call a method of the API. Each id is the name of its parameter in braces, so that the path is its template."""
    requests = list[httpx.Request]()

    def record(request: httpx.Request) -> httpx.Response:
        requests.append(request)
        raise _Sent

    method: Any = getattr(Api(httpx.Client(base_url="http://test", transport=httpx.MockTransport(record)), 0), name)
    required = [one for one in inspect.signature(method).parameters.values() if one.default is one.empty]
    values = [ExportIn() if one.name == "wish" else f"{{{one.name}}}" for one in required]
    with suppress(_Sent):
        answer = method(*values)
        next(answer)
    (request,) = requests
    streams = request.headers["accept"] == "text/event-stream"
    return Sent(name, request.method, request.url.path, streams)


@cache
def paths() -> dict[str, Any]:
    """Return the paths of the OpenAPI document, which takes long to build."""
    found: dict[str, Any] = FakeService(Path("/nowhere")).app().openapi()["paths"]
    return found


CALLS = [name for name, _ in inspect.getmembers(Api, inspect.isfunction) if not name.startswith("_")]


def test_every_operation_of_the_api_has_a_call() -> None:
    described = {(method.upper(), path) for path, methods in paths().items() for method in methods}
    sent = [one for one in map(_sent, CALLS) if not one.streams]
    assert {one.operation for one in sent} == described - NO_CALL, "add a call of each route to trainshed/_async/api.py"


def test_every_stream_of_the_api_is_followed() -> None:
    described = {
        path
        for path, methods in paths().items()
        if "text/event-stream" in methods.get("get", {}).get("responses", {}).get("200", {}).get("content", {})
    }
    assert {one.path for one in map(_sent, CALLS) if one.streams} == described


@pytest.mark.parametrize("name", CALLS)
def test_a_call_sends_all_that_the_api_takes(name: str) -> None:
    """Each parameter in the description is one of the method, under its own name or the one in `renamed`."""
    renamed = {
        "id": "id_prefix",
        "label.KEY": "labels",
        "state": "states",
        "idempotency-key": "idempotency_key",
        "last-event-id": "after",
    }
    sent = _sent(name)
    operation = paths()[sent.path][sent.method.lower()]
    wanted = {renamed.get(one["name"], one["name"]) for one in operation.get("parameters", [])}
    if sent.streams:
        wanted -= {"limit", "points"}
    taken = set(inspect.signature(getattr(Api, name)).parameters)
    assert wanted <= taken | (set(ExportIn.model_fields) if "wish" in taken else set())


def _modules_of(program: str) -> set[str]:
    """Return the modules that are loaded after a program in a new process."""
    command = [sys.executable, "-c", f"import sys; {program}; print(*sys.modules)"]
    return set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())


def test_client_import_loads_only_schemas_spec_and_its_own_libraries() -> None:
    absent = f"sys.modules.update(dict.fromkeys({COMMAND_OF_HTTPX}))"
    loaded = _modules_of(f"{absent}; import trainshed, trainshed.models") - _modules_of(absent)
    ours = {name for name in loaded if name.split(".")[0] in ("service", "train_loop", "trainshed")}
    packages = {"service", "service.api", "train_loop"}
    assert {name for name in ours - packages if not name.startswith(OUR_MODULES)} == set()
    assert {name for name in ours if name.startswith("trainshed.cli")} == set()
    installed = {name.split(".")[0] for name in loaded - ours} - sys.stdlib_module_names
    assert {name for name in installed if not name.startswith(("_", "cython"))} <= LIBRARIES


def test_old_name_of_the_client_warns() -> None:
    with pytest.warns(DeprecationWarning, match="from trainshed import Client"):
        from service.client import Api as OldApi  # noqa: PLC0415
    assert OldApi is Api
