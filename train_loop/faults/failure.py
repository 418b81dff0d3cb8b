"""What is said of a run that fails: in the log, in the events, in the outcome."""

import logging
import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial

from train_loop.errors import CheckpointError, FencedError, MemoryRanOutError, UserError, VersionSkewError
from train_loop.loop.session import Session
from train_loop.run_dir import Outcome, create_new, flush_all, storage_failed, storage_may_fail
from train_loop.spec import SpecError
from train_loop.system.redact import masker
from train_loop.system.retry import retry_storage
from train_loop.telemetry.event_log import group_journal

log = logging.getLogger(__name__)
MISTAKES = (UserError, SpecError)
"""What a person must mend; the message says what and how."""
_WRAPPERS = ("controller_failure", "health_check_failure", "_base_exc", "cause")
"""Attributes by which Ray's errors carry what they wrap."""
_MOST_CHARACTERS = 4000
_GLOO_PLACE = re.compile(r"\[\S*/gloo/\S*:\d+\] ")
_GLOO_ADVICE = re.compile(r"\. This is typically caused by a remote.*")
_RETRYABLE = (CheckpointError, VersionSkewError)
_NAMED = (*MISTAKES, FencedError, *_RETRYABLE)
"""What ends an attempt and has said all there is to say."""
_KILLED_FOR_MEMORY = re.compile(r"low on memory|OutOfMemoryError")
"""How Ray says that it has killed a process because its node was short of memory."""


@contextmanager
def failure_told(session: Session) -> Iterator[None]:
    """Log what ends a rank, and say in the events what trying again cannot help: then nobody tries."""
    try:
        yield
    except _NAMED as error:
        # Behind a mistake can be what a library raised, which may turn out to be no mistake of the user's.
        log.error("rank %d failed: %s", session.rank, error, exc_info=error.__cause__)
        if not isinstance(error, FencedError):
            _report_end(session, _named(error))
        raise
    except Exception as error:
        log.error("rank %d failed: %s", session.rank, error, exc_info=error)
        raise
    finally:
        # Ray ends its workers from outside.
        flush_all()


def _report_end(session: Session, outcome: Outcome) -> None:
    """Write the event `training_ended`, once per group, unless a newer group has taken over."""
    if not _is_first(session):
        return
    with suppress(FencedError):
        journal = group_journal(session.run_dir, session.token)
        journal.event("training_ended", **outcome.model_dump(exclude_none=True))
        with storage_may_fail(partial(log.error, "the end of training could not be reported: %s")):
            retry_storage(journal.flush, seconds=session.patience)


def _is_first(session: Session) -> bool:
    """Return whether this rank is the first of its group to report; True also if storage is unavailable."""
    try:
        create_new(session.run_dir.attempt(session.attempt).end_mark(session.token.epoch), b"")
    except FileExistsError:
        return False
    except Exception as error:
        if not storage_failed(error):
            raise
    return True


def failed(error: BaseException) -> Outcome:
    """What went wrong, and whether trying again can help."""
    found = cause(error)
    if isinstance(found, (*_NAMED, MemoryRanOutError)):
        return _named(found)
    if killed_for_memory(message(error)):
        return Outcome(result="failed", code=MemoryRanOutError.code, reason=message(error), retryable=True)
    return Outcome(result="failed", code="worker_failure", reason=message(error), retryable=True)


def _named(
    error: UserError | SpecError | FencedError | CheckpointError | VersionSkewError | MemoryRanOutError,
) -> Outcome:
    # Ray Data appends advice of its own to what our functions raise.
    said, retryable = masker()(str(error).partition("\n")[0]), isinstance(error, (*_RETRYABLE, MemoryRanOutError))
    return Outcome(result="failed", code=error.code, reason=said, retryable=retryable)


def reason(error: BaseException) -> str:
    """Return the cause in one line; its traceback is in the logs."""
    line = "".join(traceback.format_exception_only(cause(error))).strip().partition("\n")[0]
    # Of gloo's errors, without the place in its sources and its advice.
    return masker()(_GLOO_ADVICE.sub("", _GLOO_PLACE.sub("", line)))


def message(error: BaseException) -> str:
    """Return all that the cause says, up to 4,000 characters."""
    text = "".join(traceback.format_exception_only(cause(error))).strip()
    return masker()(_GLOO_ADVICE.sub("", _GLOO_PLACE.sub("", text)))[:_MOST_CHARACTERS]


def killed_for_memory(said: str) -> bool:
    """Return whether an error of Ray's says that it killed a process because its node was short of memory."""
    return _KILLED_FOR_MEMORY.search(said) is not None


def from_ranks(error: BaseException) -> bool:
    """Return whether an error was raised by ranks, as Ray Train reports it."""
    return bool(getattr(error, "worker_failures", None))


def cause(error: BaseException) -> BaseException:
    """Return what a user would call the cause: Ray wraps it in errors of its own. An error of ours is the cause."""
    failures: dict[int, BaseException] = getattr(error, "worker_failures", {})
    # A user's mistake on one rank makes its peers fail of lost connections: the mistake is the cause. So is memory.
    causes = sorted(
        map(cause, failures.values()), key=lambda e: (not isinstance(e, MISTAKES), not isinstance(e, MemoryRanOutError))
    )
    wrapped = (getattr(error, name, None) for name in _WRAPPERS)
    inner = next(filter(None, [*causes[:1], *wrapped]), None)
    # Ray's wrapper of a task's error is of the error's own class, too, so it is unwrapped before this.
    if inner is None and not isinstance(error, (*_NAMED, MemoryRanOutError)):
        inner = error.__cause__
    return cause(inner) if isinstance(inner, BaseException) and inner is not error else error
