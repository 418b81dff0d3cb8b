"""Retries of calls that may succeed later."""

import logging
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from tenacity import RetryCallState, Retrying, retry_if_exception, stop_after_delay, wait_random_exponential

from train_loop.run_dir import IrregularFileError, is_transient, storage_seconds

T = TypeVar("T")
log = logging.getLogger(__name__)
_AWAY = "storage is unavailable; retrying for %g s: %s"


def patiently(
    call: Callable[[], T],
    *,
    seconds: float,
    may_pass: Callable[[BaseException], bool],
    on_first_failure: Callable[[BaseException], None] | None = None,
) -> T:
    """Retry `call` while `may_pass` accepts its error, for up to `seconds`; then raise the last error.

    `on_first_failure` is called with the first error that is retried.
    """

    def report_first_failure(state: RetryCallState) -> None:
        if on_first_failure is not None and state.attempt_number == 1 and state.outcome is not None:
            error = state.outcome.exception()
            assert error is not None, "only failures are retried"
            on_first_failure(error)

    retrying = Retrying(
        # A user has replaced a file: no retry brings it back.
        retry=retry_if_exception(lambda error: may_pass(error) and not isinstance(error, IrregularFileError)),
        wait=wait_random_exponential(multiplier=0.5, max=15),
        stop=stop_after_delay(seconds),
        before_sleep=report_first_failure,
        reraise=True,
    )
    return retrying(call)


def retry_storage(
    call: Callable[[], T],
    *,
    seconds: float | None = None,
    may_pass: Callable[[BaseException], bool] = is_transient,
    on_first_failure: Callable[[BaseException], None] | None = None,
) -> T:
    """Retry `call` while storage is unavailable, for up to `seconds` (default: the setting); then raise the last error.

    The first failure is logged, or passed to `on_first_failure`.
    """
    limit = storage_seconds() if seconds is None else seconds
    return patiently(
        call, seconds=limit, may_pass=may_pass, on_first_failure=on_first_failure or partial(log.warning, _AWAY, limit)
    )
