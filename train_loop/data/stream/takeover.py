"""The stream of a rank under Ray Train: its own rows until Ray Data delivers them, and again whenever Ray Data fails.

The rows of a step do not depend on their reader. Each rank switches separately, and no failure of Ray Data ends a run.
"""

import itertools
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from datetime import timedelta
from queue import Empty, Full, Queue
from typing import Any, NamedTuple

import torch.distributed as dist

from train_loop.data.dataset import Rows
from train_loop.data.ray_context import has_whole_cpu
from train_loop.data.stream.local import StreamPlan, local_stream
from train_loop.data.stream.ray_data import Split, by_step, end_execution, most_steps, open_splits
from train_loop.plan import MeshPlan

log = logging.getLogger(__name__)

_WORTH_IT = 10.0
"""Seconds before Ray Data starts. Its processes take 8 CPU seconds to start; a short run avoids this cost."""
_ROWS_SECONDS = 30.0
"""Maximum wait for the rows of a step. A rank reads its own rows in less time."""
_STEPS_AHEAD = 2
"""Steps of which a rank holds the rows in addition to the blocks of Ray Data."""
_MOST_FAILURES = 5
"""Failures of Ray Data in one run after which the ranks read their own rows to the end."""
_CLOSED_CHECK_SECONDS = 0.5
"""Seconds between two checks whether the rows are still wanted."""

Report = Callable[..., None]
"""Writes an event: its name and fields."""


def _no_report(_event: str, **_fields: object) -> None:
    """Report nothing."""


class Offer(NamedTuple):
    """Rank 0's start of Ray Data, as it broadcasts it to the other readers."""

    first: int
    """First step that Ray Data delivers."""
    splits: list[Split]
    """One iterator per data rank; empty if Ray Data does not run."""
    error: str | None = None
    """Error of the start."""


def ray_stream(
    plan: StreamPlan,
    mesh: MeshPlan,
    rank: int,
    *,
    timeout: timedelta | None = None,
    after: float = _WORTH_IT,
    report: Report = _no_report,
) -> Iterator[Rows | None]:
    """Yield this rank's rows of every step, `order.per_rank` of them; every rank must take every step.

    Only the first of the ranks with the same samples gets rows; its peers get None, and receive its rows. Ray Data
    starts after `after` seconds, and later after each failure. `timeout`: timeout of collectives. `report` writes an
    event for each failure.
    """
    readers = [reader for reader in range(mesh.world) if mesh.leads(reader)]
    # A separate process group: its collectives run in a thread, concurrently with those of the loop.
    group = dist.new_group(readers, backend="gloo", timeout=timeout)
    if rank not in readers:
        yield from itertools.repeat(None, plan.steps)
        return
    done, failures, delay = 0, 0, after
    while done < plan.steps:
        own = local_stream(_after(plan, done), mesh, rank)
        takeover = Takeover(plan, mesh.data_rank(rank), group, done=done, failures=failures)
        takeover.begin(delay)
        try:
            while done < plan.steps and not takeover.is_due(done):
                yield next(own)
                done += 1
                takeover.taken = done
            for rows in takeover.rows(done):
                yield rows
                done += 1
        finally:
            takeover.close()
        delay = 0.0
        if takeover.error is not None:
            failures += 1
            delay = after * 2**failures
            log.warning("Ray Data failed; this rank reads its rows itself: %s", takeover.error)
            report("data_reader_failed", step=done, error=str(takeover.error), failures=failures)


class Takeover:
    """One execution of Ray Data: its start in a thread, and its rows for this rank."""

    def __init__(
        self, plan: StreamPlan, data_rank: int, group: dist.ProcessGroup, *, done: int, failures: int = 0
    ) -> None:
        self._plan, self._data_rank, self._group, self._failures = plan, data_rank, group, failures
        self._first: int | None = None
        """First step that Ray Data delivers in time; None until its rows have arrived. 0 if the start has failed."""
        self._items = Queue[Rows | Exception | None](_STEPS_AHEAD)
        """Rows of each step from `_first` on, then None; or the error that ends them."""
        self._split: Split | None = None
        self._closed = threading.Event()
        self.taken = done
        """Number of steps whose rows this rank has taken."""
        self.error: Exception | None = None
        """Error that has ended the execution."""

    def begin(self, after: float) -> None:
        """Start Ray Data in a thread after `after` seconds, unless it is closed before. Returns at once."""
        threading.Thread(target=self._run, args=(after,), name="ray-rows", daemon=True).start()

    def is_due(self, done: int) -> bool:
        """Return whether `rows` continues after the first `done` steps. True if the start has failed."""
        return self._first is not None and self._first <= done

    def rows(self, done: int) -> Iterator[Rows]:
        """Yield the rows of the steps after the first `done`, until the execution ends or fails."""
        if self._first is None:
            return
        for step in itertools.count(self._first):
            item = self._next()
            if not isinstance(item, Rows):
                self.error = item
                return
            if step >= done:
                yield item

    def close(self) -> None:
        """Stop reading. If the execution has failed here, end it for all ranks, as it would wait for this one."""
        self._closed.set()
        if self.error is not None and self._split is not None:
            # It may have ended already.
            with suppress(Exception):
                end_execution(self._split)

    def _next(self) -> Rows | Exception | None:
        try:
            return self._items.get(timeout=_ROWS_SECONDS)
        except Empty:
            return TimeoutError(f"Ray Data delivered no rows within {_ROWS_SECONDS:g} s")

    def _run(self, after: float) -> None:
        # Every reader waits: a collective that only some have entered might time out.
        if self._closed.wait(after):
            return
        try:
            # All readers enter it once for each execution, however that has ended for them.
            offer = _shared(self._offer() if self._data_rank == 0 else None, self._group)
            if offer.error is not None:
                raise RuntimeError(offer.error)
            if not offer.splits:
                return
            self._split = offer.splits[self._data_rank]
            self._read(self._split, offer.first)
        except Exception as error:
            self._put(error)
            self._first = self._first or 0

    def _read(self, split: Split, first: int) -> None:
        """Put the rows of each step into the queue, from the first that this rank has not taken."""
        plan = self._plan
        with closing(by_step(split, plan.order.per_rank)) as steps:
            for step, rows in enumerate(itertools.islice(steps, most_steps(_after(plan, first))), first):
                if self._first is None and step < self.taken:
                    continue
                if not self._put(rows):
                    return
                self._first = step if self._first is None else self._first
        self._put(None)

    def _put(self, item: Rows | Exception | None) -> bool:
        """Put an item into the queue once there is room. Return False if the rows are no longer wanted."""
        while not self._closed.is_set():
            with suppress(Full):
                self._items.put(item, timeout=_CLOSED_CHECK_SECONDS)
                return True
        return False

    def _offer(self) -> Offer:
        """Start Ray Data on rank 0."""
        first = self.taken
        rest = _after(self._plan, first)
        # Without a free CPU, a task of Ray Data would never start.
        if not rest.steps or self._failures >= _MOST_FAILURES or not has_whole_cpu():
            return Offer(first, [])
        try:
            return Offer(first, open_splits(rest, rest.start, most_steps(rest)))
        except Exception as error:
            return Offer(first, [], f"{type(error).__name__}: {error}")


def _after(plan: StreamPlan, done: int) -> StreamPlan:
    """Return the plan of the steps after the first `done`."""
    return replace(plan, start=plan.start + done * plan.order.global_batch, steps=plan.steps - done)


def _shared(offer: Offer | None, group: dist.ProcessGroup) -> Offer:
    """Return rank 0's offer. A collective call of the readers."""
    shared: list[Any] = [offer]
    dist.broadcast_object_list(shared, src=0, group=group)
    found: Offer = shared[0]
    return found
