"""What goes wrong with calls, and whether the same call may go well a moment later."""

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
    """The service said no; `problem` is what it said."""

    def __init__(self, problem: ProblemDetails, retry_after: float | None = None) -> None:
        super().__init__(problem.detail)
        self.problem = problem
        self.retry_after = retry_after
        """Seconds after which it may say yes."""

    @property
    def code(self) -> str:
        """What went wrong, in a word that stays the same."""
        return self.problem.code

    @property
    def status(self) -> int:
        """The HTTP status."""
        return self.problem.status


def error_of(response: httpx.Response) -> Exception:
    """What the service said, or, where it was somebody else who answered, the status."""
    try:
        problem = ProblemDetails.model_validate_json(response.content)
    except ValidationError:
        what = f"{response.status_code} from {response.url}, which does not answer like Trainshed"
        return httpx.HTTPStatusError(what, request=response.request, response=response)
    return ApiError(problem, _seconds(response))


def wished_pause(error: BaseException | None) -> float | None:
    """Seconds until the next try, if whoever answered has said how many."""
    if isinstance(error, httpx.HTTPStatusError):
        return _seconds(error.response)
    return error.retry_after if isinstance(error, ApiError) else None


def was_kept_out(error: BaseException) -> bool:
    """Whether the service cannot have done anything, because the call did not reach it, or one too many did."""
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout):
        return True
    return _status(error) == HTTPStatus.TOO_MANY_REQUESTS


def may_pass(error: BaseException) -> bool:
    """Whether the same call may go well later; whether something was done already is unknown."""
    if isinstance(error, httpx.UnsupportedProtocol | httpx.LocalProtocolError):
        # The caller's own mistake, though httpx counts it among those of the network.
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
