"""Errors of calls, and checks whether a retry may succeed."""

from http import HTTPStatus

import httpx
from pydantic import ValidationError

from service.api.schemas import ProblemDetails

_IN_FLIGHT = "idempotency_in_flight"
_UNANSWERED = frozenset(
    {
        HTTPStatus.BAD_GATEWAY,
        HTTPStatus.SERVICE_UNAVAILABLE,
        HTTPStatus.GATEWAY_TIMEOUT,
        HTTPStatus.INSUFFICIENT_STORAGE,
    }
)


class ApiError(Exception):
    """An error response of the service; `problem` holds its details."""

    def __init__(self, problem: ProblemDetails, retry_after: float | None = None) -> None:
        super().__init__(problem.detail)
        self.problem = problem
        self.retry_after = retry_after
        """Seconds after which a retry may succeed."""

    @property
    def code(self) -> str:
        """The stable error code."""
        return self.problem.code

    @property
    def status(self) -> int:
        """The HTTP status."""
        return self.problem.status


def error_of(response: httpx.Response) -> Exception:
    """Return the ApiError of a response, or an HTTPStatusError if the response is not from Trainshed."""
    try:
        problem = ProblemDetails.model_validate_json(response.content)
    except ValidationError:
        what = f"{response.status_code} from {response.url}, which does not answer like Trainshed"
        return httpx.HTTPStatusError(what, request=response.request, response=response)
    return ApiError(problem, _seconds(response))


def wished_pause(error: BaseException | None) -> float | None:
    """Return the seconds of the response's Retry-After header, or None."""
    if isinstance(error, httpx.HTTPStatusError):
        return _seconds(error.response)
    return error.retry_after if isinstance(error, ApiError) else None


def was_kept_out(error: BaseException) -> bool:
    """Return True if the service cannot have processed the call: it never arrived, or was rate limited (429)."""
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout):
        return True
    return _status(error) == HTTPStatus.TOO_MANY_REQUESTS


def may_pass(error: BaseException) -> bool:
    """Return True if a retry may succeed. The failed call may already have taken effect."""
    if isinstance(error, httpx.UnsupportedProtocol | httpx.LocalProtocolError):
        # An error of the caller, although httpx classifies it as a transport error.
        return False
    if isinstance(error, ApiError) and error.code == _IN_FLIGHT:
        return True
    return isinstance(error, httpx.TransportError) or was_kept_out(error) or _status(error) in _UNANSWERED


def _status(error: BaseException) -> int | None:
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code
    return error.status if isinstance(error, ApiError) else None


def _seconds(response: httpx.Response) -> float | None:
    given = response.headers.get("retry-after", "")
    return float(given) if given.isdecimal() else None
