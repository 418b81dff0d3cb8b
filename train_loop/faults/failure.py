"""Reports of a failed run: log lines, events and outcome."""

import logging
import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial

from train_loop.errors import CheckpointError, FencedError, MemoryRanOutError, UserError, VersionSkewError
from train_loop.faults.collective import contact_lost, explain_contact
from train_loop.faults.ray_reports import shorten_report
from train_loop.loop.session import Session
from train_loop.run_dir import Outcome, create_new, flush_all, storage_failed, storage_may_fail
from train_loop.spec import SpecError
from train_loop.system.redact import redactor
from train_loop.system.retry import retry_storage

log = logging.getLogger(__name__)
USER_ERRORS = (UserError, SpecError)
"""Errors that the user must fix; their messages contain the remedy."""
_WRAPPERS = ("controller_failure", "health_check_failure", "_base_exc", "cause")
"""Attributes of Ray's errors that hold the wrapped error."""
_MOST_CHARACTERS = 4000
_GLOO_PLACE = re.compile(r"\[\S*/gloo/\S*:\d+\] ")
_GLOO_ADVICE = re.compile(r"\. This is typically caused by a remote.*")
_TRACEBACK = re.compile(r"Traceback \(most recent call last\):|ray::")
_RETRYABLE = (CheckpointError, VersionSkewError)
_NAMED = (*USER_ERRORS, FencedError, *_RETRYABLE)
"""Errors with a complete message, which become the outcome of an attempt."""
_KILLED_FOR_MEMORY = re.compile(r"low on memory|OutOfMemoryError")
"""Text in Ray's error after it killed a process because its node was low on memory."""


@contextmanager
def report_failure(session: Session) -> Iterator[None]:
    """Log the error that ends a rank; write errors with a code as the event `training_ended`, or `work_ended`."""
    try:
        yield
    except _NAMED as error:
        # Log a library's error as well: it may show that the user is not at fault.
        log.error("rank %d failed: %s", session.rank, error, exc_info=error.__cause__)
        if not isinstance(error, FencedError):
            _report_end(session, _named(error))
        raise
    except Exception as error:
        log.error("rank %d failed: %s", session.rank, error, exc_info=error)
        raise
    finally:
        # Ray kills its workers without cleanup.
        flush_all()


def _report_end(session: Session, outcome: Outcome) -> None:
    """Write the event of the end once per group, unless a newer group has taken over."""
    if not _is_first(session):
        return
    with suppress(FencedError):
        # The error may be known to this rank only.
        session.journal.event_of_any_rank(session.end_event, **outcome.model_dump(exclude_none=True))
        with storage_may_fail(partial(log.error, "the end of training could not be reported: %s")):
            retry_storage(session.journal.flush, seconds=session.patience)


def _is_first(session: Session) -> bool:
    """Return whether this rank is the first of its group to report; True also if storage is unavailable."""
    try:
        mark = session.run_dir.attempt(session.attempt).end_mark(session.token.epoch)
        create_new(mark, b"", below=session.run_dir.root)
    except FileExistsError:
        return False
    except Exception as error:
        if not storage_failed(error):
            raise
    return True


def failed(error: BaseException) -> Outcome:
    """Return the outcome of an attempt that failed with an error: code, reason and retryable."""
    found = cause(error)
    if isinstance(found, (*_NAMED, MemoryRanOutError)):
        return _named(found)
    if killed_for_memory(message(error)):
        return Outcome(result="failed", code=MemoryRanOutError.code, reason=message(error), retryable=True)
    text = explain_contact(shorten_report(message(error)))
    return Outcome(result="failed", code="worker_failure", reason=text, retryable=True)


def _named(
    error: UserError | SpecError | FencedError | CheckpointError | VersionSkewError | MemoryRanOutError,
) -> Outcome:
    # Ray Data appends advice to the errors of our functions.
    line, retryable = redactor()(str(error).partition("\n")[0]), isinstance(error, (*_RETRYABLE, MemoryRanOutError))
    return Outcome(result="failed", code=error.code, reason=line, retryable=retryable)


def reason(error: BaseException) -> str:
    """Return the cause in one line; its traceback is in the logs."""
    line = _without_traceback(error).partition("\n")[0]
    # Without the source location and the advice in gloo's errors.
    return redactor()(_GLOO_ADVICE.sub("", _GLOO_PLACE.sub("", line)))


def message(error: BaseException) -> str:
    """Return the full message of the cause, up to 4,000 characters."""
    text = _without_traceback(error)
    return redactor()(_GLOO_ADVICE.sub("", _GLOO_PLACE.sub("", text)))[:_MOST_CHARACTERS]


def _without_traceback(error: BaseException) -> str:
    """Return the text of the cause. Of a traceback inside it, from another process of Ray, only the last line stays."""
    found = cause(error)
    # The name of our class says nothing that the message does not say.
    text = str(found) if isinstance(found, _NAMED) else "".join(traceback.format_exception_only(found))
    lines = text.strip().splitlines()
    begin = next((number for number, line in enumerate(lines) if _TRACEBACK.search(line)), None)
    return "\n".join(lines if begin is None else [*lines[:begin], lines[-1].strip()])


def killed_for_memory(text: str) -> bool:
    """Return whether Ray's error reports a process that it killed because its node was low on memory."""
    return _KILLED_FOR_MEMORY.search(text) is not None


def from_ranks(error: BaseException) -> bool:
    """Return whether Ray Train reports the error as raised by ranks."""
    return bool(getattr(error, "worker_failures", None))


def _only_lost_contact(error: BaseException) -> bool:
    return contact_lost(reason(error)) is not None


def cause(error: BaseException) -> BaseException:
    """Return the original error inside Ray's wrappers. Errors of Trainshed are not unwrapped further."""
    failures: dict[int, BaseException] = getattr(error, "worker_failures", {})
    # A user error or full memory on one rank makes its peers fail with lost connections: prefer it as the cause.
    causes = sorted(
        map(cause, failures.values()),
        key=lambda e: (not isinstance(e, USER_ERRORS), not isinstance(e, MemoryRanOutError), _only_lost_contact(e)),
    )
    wrapped = (getattr(error, name, None) for name in _WRAPPERS)
    inner = next(filter(None, [*causes[:1], *wrapped]), None)
    # Ray's wrapper of a task's error also has the class of that error: it is unwrapped before this check.
    if inner is None and not isinstance(error, (*_NAMED, MemoryRanOutError)):
        inner = error.__cause__
    return cause(inner) if isinstance(inner, BaseException) and inner is not error else error
