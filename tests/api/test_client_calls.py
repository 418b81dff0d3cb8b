"""The client's calls against the API's own description: none is forgotten, and each is typed."""

import inspect
import subprocess
import sys

import pytest

from service.api.ledger_schemas import ExportIn
from service.client import Api
from service.client.call import Operation, Stream
from tests.support.service import FakeService

NO_CALL = {("GET", "/healthz"), ("GET", "/readyz"), ("GET", "/metrics"), ("GET", "/schemas/job.json")}
"""What others than callers of the API ask for."""


def _declared() -> list[tuple[str, Operation[..., object] | Stream[..., object]]]:
    names = [name for kind in Api.__mro__ for name in vars(kind)]
    found = [(name, getattr(Api, name)) for name in names]
    return [(name, one) for name, one in found if isinstance(one, Operation | Stream)]


def test_every_operation_of_the_api_has_a_call(service: FakeService) -> None:
    described = {
        (method.upper(), path) for path, methods in service.app().openapi()["paths"].items() for method in methods
    }
    called = {(one.route.method, one.route.path) for _, one in _declared() if isinstance(one, Operation)}
    assert called == described - NO_CALL, "declare a call of each route in service/client/*_calls.py"


def test_every_stream_of_the_api_is_followed(service: FakeService) -> None:
    described = {
        path
        for path, methods in service.app().openapi()["paths"].items()
        if "text/event-stream" in methods.get("get", {}).get("responses", {}).get("200", {}).get("content", {})
    }
    assert {one.route.path for _, one in _declared() if isinstance(one, Stream)} == described


@pytest.mark.parametrize(("name", "declared"), _declared(), ids=lambda value: value if isinstance(value, str) else "")
def test_a_call_sends_all_that_the_api_takes(
    service: FakeService, name: str, declared: Operation[..., object] | Stream[..., object]
) -> None:
    """Every parameter of the description is one of the method, under its own name or the one that is said here."""
    renamed = {
        "id": "id_prefix",
        "label.KEY": "labels",
        "state": "states",
        "idempotency-key": "idempotency_key",
        "last-event-id": "after",
    }
    operation = service.app().openapi()["paths"][declared.route.path][declared.route.method.lower()]
    wanted = {renamed.get(one["name"], one["name"]) for one in operation.get("parameters", [])}
    if isinstance(declared, Stream):
        wanted -= {"limit", "points"}
    taken = set(inspect.signature(declared.send).parameters)
    assert wanted <= taken | (set(ExportIn.model_fields) if "wish" in taken else set())


def test_the_client_is_imported_without_the_service_s_own_libraries() -> None:
    """Whoever types a command waits for its imports."""
    heavy = ("fastapi", "starlette", "uvicorn", "sqlalchemy", "alembic", "ray", "torch", "numpy", "pyarrow")
    program = f"import sys, service.client; print([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
