"""Every error as RFC 9457 application/problem+json with a stable `code`."""

from collections.abc import Sequence
from http import HTTPStatus

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import BaseRoute, Match

from service.api.schemas import ProblemDetails, ProblemOut
from service.errors import InvalidRequest, ServiceError
from service.fault_log import FaultLog
from train_loop.spec import Problem

_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")
_LONGEST_PATH = 256
_CLIENT_LEFT = 499
log = structlog.get_logger(__name__)
_faults = FaultLog()


def install_problems(app: FastAPI) -> None:
    """Install handlers that answer service and framework errors as problems; RequestIds answers unexpected errors."""
    app.add_exception_handler(ServiceError, _service_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientDisconnect, _client_left)


def fault(error: Exception) -> Response:
    """Log an unexpected error and return a 500 response without its details."""
    _faults.report_each("request_failed", error)
    return _answer(500, "internal", "the service failed to answer; its log says why")


def problem(error: ServiceError) -> Response:
    """Return the response to a ServiceError."""
    errors = [ProblemOut(pointer=p.pointer, message=p.message, line=p.line, column=p.column) for p in error.problems]
    optional_headers = {"WWW-Authenticate": error.challenge, "Retry-After": error.retry_after}
    headers = {name: str(value) for name, value in optional_headers.items() if value is not None}
    return _answer(error.status, error.code, str(error), errors=errors or None, headers=headers)


def answer_error(request: Request, error: ServiceError) -> Response:
    """Return the response to a ServiceError, and log it if it is notable."""
    request.state.outage = error.outage
    if error.notable:
        client = request.client.host if request.client else None
        # The raw path: decoded, it may contain line breaks or terminal control characters.
        path = request.scope["raw_path"][:_LONGEST_PATH].decode("latin-1")
        log.warning("refused", status=error.status, code=error.code, method=request.method, path=path, client=client)
    return problem(error)


def _service_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ServiceError)
    return answer_error(request, error)


def _client_left(request: Request, error: Exception) -> Response:
    """Return a response without a reader; its status, nginx's, stands in the log and the metrics."""
    return Response(status_code=_CLIENT_LEFT)


def _validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    found = [("".join(f"/{part}" for part in one["loc"]), str(one["msg"])) for one in error.errors()]
    return problem(InvalidRequest([Problem(place, text.removeprefix("Value error, ")) for place, text in found]))


def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = HTTPStatus(error.status_code).phrase.lower().replace(" ", "_")
    detail = f"{request.method} {request.url.path}: {error.detail}; GET /openapi.json lists the calls"
    headers = dict(error.headers or {})
    if error.status_code == 405 and error.detail == HTTPStatus.METHOD_NOT_ALLOWED.phrase:
        # Starlette lists only the methods of one route.
        headers["Allow"] = ", ".join(_methods(request))
    return _answer(error.status_code, code, detail, headers=headers)


def _methods(request: Request) -> list[str]:
    """Return the methods that a path accepts, over all its routes."""
    tried = ({**request.scope, "method": method} for method in _METHODS)
    routes: Sequence[BaseRoute] = request.app.routes
    return [scope["method"] for scope in tried if any(route.matches(scope)[0] is Match.FULL for route in routes)]


def _answer(
    status: int,
    code: str,
    detail: str,
    *,
    errors: list[ProblemOut] | None = None,
    headers: dict[str, str] | None = None,
) -> Response:
    body = ProblemDetails(title=HTTPStatus(status).phrase, status=status, detail=detail, code=code, errors=errors)
    return Response(body.model_dump_json(exclude_none=True), status, headers, media_type="application/problem+json")
