"""Every error as RFC 9457 application/problem+json with a stable `code`."""

from http import HTTPStatus

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from service.api.schemas import ProblemDetails, ProblemOut
from service.errors import InvalidRequest, ServiceError
from train_loop.spec import Problem

log = structlog.get_logger(__name__)


def install_problems(app: FastAPI) -> None:
    """Answer every error, ours and the framework's, as a problem."""
    app.add_exception_handler(ServiceError, _service_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _fault)


def problem(error: ServiceError) -> Response:
    """The answer to a ServiceError."""
    errors = [ProblemOut(pointer=p.pointer, message=p.message) for p in error.problems]
    told = {"WWW-Authenticate": error.challenge, "Retry-After": error.retry_after}
    headers = {name: str(value) for name, value in told.items() if value is not None}
    return _answer(error.status, error.code, str(error), errors=errors or None, headers=headers)


def _service_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ServiceError)
    if error.notable:
        client = request.client.host if request.client else None
        log.warning(
            "refused", status=error.status, code=error.code, method=request.method, path=request.url.path, client=client
        )
    return problem(error)


def _validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return problem(
        InvalidRequest([Problem("".join(f"/{part}" for part in e["loc"]), f"{e['msg']}") for e in error.errors()])
    )


def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = HTTPStatus(error.status_code).phrase.lower().replace(" ", "_")
    detail = f"{request.method} {request.url.path}: {error.detail}; GET /docs lists the calls there are"
    return _answer(error.status_code, code, detail, headers=dict(error.headers or {}))


def _fault(request: Request, error: Exception) -> Response:
    log.error("request_failed", method=request.method, path=request.url.path, exc_info=error)
    return _answer(500, "internal", "the service failed to answer; its log says why")


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
