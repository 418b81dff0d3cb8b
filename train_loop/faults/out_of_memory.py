"""Handling of a rank that runs out of memory: its report, and one retry of the run."""

import logging
import os
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch

from train_loop.errors import MemoryRanOutError, TooLittleMemoryError
from train_loop.faults.memory_events import OUT_OF_MEMORY, groups_without_memory
from train_loop.loop.session import Session
from train_loop.model.faults import full_memory
from train_loop.model.folder import model_shape
from train_loop.plan import format_bytes, memory_advice, memory_terms
from train_loop.plan.memory.term import Place
from train_loop.run_dir import make_folder, storage_may_fail
from train_loop.spec import MEMORY, AnyJobSpec
from train_loop.system.memory_limit import is_limited
from train_loop.system.redact import redactor
from train_loop.system.retry import retry_storage
from train_loop.telemetry.timers import RSS_UNIT

log = logging.getLogger(__name__)


@contextmanager
def memory_watched(spec: AnyJobSpec, session: Session, *, shrinks: bool = False) -> Iterator[None]:
    """Report a rank that runs out of memory. Raises MemoryRanOutError, and TooLittleMemoryError the second time.

    If the next group `shrinks` its micro-batches, there may be more.
    """
    try:
        yield
    except Exception as error:
        place = full_memory(error)
        if place is None:
            raise
        # The frames of the failed step keep its tensors alive, so that the snapshot shows them.
        raise _reported(spec, session, error, place, shrinks=shrinks) from error


def _reported(spec: AnyJobSpec, session: Session, error: Exception, place: Place, *, shrinks: bool) -> Exception:
    host, committed = socket.gethostname(), max(session.run_dir.checkpoint_folders(), default=None)
    shape = model_shape(spec.model)
    terms = memory_terms(spec, shape, place)
    message = (
        f"rank {session.rank} on {host} ran out of {place} memory ({_brief(error)}; peak {format_bytes(_peak(place))}"
        f"{_limit(spec)}); {memory_advice(spec, shape, place)}"
    )
    if shrinks:
        size = spec.run.training.micro_batch
        message += f"; per_device_train_batch_size: auto makes the next worker group take fewer than {size} at once"
    # Other ranks of this group may have run out, too.
    others = groups_without_memory(session.run_dir, committed).keys() - {(session.attempt, session.epoch)}
    again = bool(others) and not shrinks
    session.journal.event_of_any_rank(
        OUT_OF_MEMORY,
        rank=session.rank,
        host=host,
        memory=place,
        committed=committed,
        error=message,
        estimate={term.name: term.bytes for term in terms},
        peak_bytes=_peak(place),
        snapshot=_snapshot(session) if place == "device" else None,
        again=again,
    )
    with storage_may_fail(partial(log.error, "the lack of memory could not be reported: %s")):
        retry_storage(session.journal.flush, seconds=session.patience)
    return TooLittleMemoryError(message) if again else MemoryRanOutError(message)


def _limit(spec: AnyJobSpec) -> str:
    """Return the limit of a rank's memory and the setting that raises it, as the end of a parenthesis."""
    each = spec.scaling.resources_per_worker
    if not is_limited(os.environ) or MEMORY not in each or each.get("GPU"):
        return ""
    return f"; limit {format_bytes(int(each[MEMORY]))}, which memory in scaling.resources_per_worker raises"


def _peak(place: Place) -> int:
    """Return the peak bytes of tensors on the device, or of the process on its host."""
    if place == "device" and torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RSS_UNIT


def _snapshot(session: Session) -> str | None:
    """Write a memory snapshot for https://docs.pytorch.org/memory_viz; return its path, or None if that fails."""
    if not torch.cuda.is_available():
        return None
    attempt = session.run_dir.attempt(session.attempt)
    path = attempt.root / "profile" / f"out-of-memory-rank-{session.rank:05d}.pickle"
    try:
        make_folder(path.parent)
        torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]
    except Exception as error:  # the run has already failed; do not hide its error
        log.warning("the memory snapshot of rank %d could not be written: %s", session.rank, error)
        return None
    return str(path)


def _brief(error: Exception) -> str:
    """Return the first three sentences of an error, without secrets and without CUDA's advice."""
    message = redactor()(" ".join(str(error).split()))
    return ". ".join(f"{type(error).__name__}: {message}".split(". ")[:3])
