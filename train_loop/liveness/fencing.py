"""Fencing of worker groups: only the newest group of a run may write to its run directory.

Torch-free. `docs/explanation/decisions/0018-fencing.md` states what this guarantees.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from train_loop.errors import FencedError
from train_loop.liveness import heartbeat
from train_loop.run_dir import Fence, RunDir, check_storage, check_writable, storage_may_fail

log = logging.getLogger(__name__)
EPOCH_VARIABLE = "TRAINSHED_EPOCH"
"""Passes the epoch of a worker group to its ranks."""
FENCED_EXIT_CODE = 77
"""Exit code of a rank that a newer group has superseded."""
_POLL_SECONDS = 1.0
_LOG_SECONDS = 1.0


def check_fence(run_dir: RunDir, token: Fence) -> None:
    """Raise FencedError if a newer worker group has taken over."""
    fence = _read(run_dir)
    if fence > token:
        raise FencedError(_superseded(fence, token))


def next_epoch(run_dir: RunDir, attempt: int) -> int:
    """Return the epoch of the attempt's next worker group. Raises FencedError if a newer attempt has taken over."""
    fence = _read(run_dir)
    if fence.attempt > attempt:
        raise FencedError(_superseded(fence, Fence(attempt)))
    return fence.epoch + 1 if fence.attempt == attempt else 1


def raise_fence(run_dir: RunDir, token: Fence, *, by: str) -> None:
    """Make `token` the fence, durably, before its group starts; `by` is unique per group and may repeat the call.

    Raises FencedError if the token is not newer than the fence, or if another writer took it first.
    """
    if not run_dir.raise_fence_to(token, by=by):
        raise FencedError(_superseded(max(_read(run_dir), token), token))


def begin_group(run_dir: RunDir, attempt: int, *, by: str) -> Fence:
    """Supersede all groups before, durably, and return the token of the new one; `by` is unique per group.

    A repeated call with the same `by` returns the same token while it is the newest. Raises FencedError if a newer
    attempt has taken over, or if another writer took the same epoch first.
    """
    fence = _read(run_dir)
    if fence.attempt == attempt and fence.epoch and run_dir.fence_owner(fence) == by:
        return fence
    token = Fence(attempt, next_epoch(run_dir, attempt))
    raise_fence(run_dir, token, by=by)
    return token


class NewestEpoch:
    """The newest epoch of an attempt, for log lines without a group, such as the driver's."""

    def __init__(self, run_dir: RunDir, attempt: int) -> None:
        self._run_dir = run_dir
        self._attempt = attempt
        self._known = 0

    def __call__(self) -> int:
        """Return the newest epoch, or the last known one if storage fails or a newer attempt has taken over."""
        with suppress(ValueError), storage_may_fail(lambda _: None):
            fence = self._run_dir.fence()
            if fence.attempt == self._attempt:
                self._known = max(self._known, fence.epoch)
        return self._known


class FenceWatch:
    """A daemon thread that ends the process once a newer group has taken over.

    It works while the main thread is blocked in a collective, and after the process was frozen.
    """

    def __init__(self, run_dir: RunDir, token: Fence, *, poll_seconds: float, leave: Callable[[int], object]) -> None:
        self._run_dir = run_dir
        self._token = token
        self._poll_seconds = poll_seconds
        self._leave = leave
        self._checking_since: float | None = None
        """Monotonic time of the first storage check since the last success; None after a success."""
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fence", daemon=True)

    def start(self) -> None:
        """Start watching."""
        self._thread.start()

    def stop(self) -> None:
        """Stop watching without waiting for the thread, which storage may block."""
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.is_set():
            fence = self._newer()
            if fence is not None and not self._stopped.is_set():
                self._end(fence)
                return
            self._stopped.wait(self._poll_seconds)

    def _newer(self) -> Fence | None:
        """Return the fence if it is newer than the token. Storage that cannot be read is not a newer fence."""
        if self._checking_since is None:
            self._checking_since = time.monotonic()
            heartbeat.mark_storage(self._checking_since)
        try:
            check_storage(self._run_dir.root)
            check_writable(self._run_dir.root)
            fence = self._run_dir.fence()
        except Exception as error:
            log.debug("the fence cannot be read: %s", error)
            heartbeat.mark_storage(self._checking_since, getattr(error, "errno", None) or 0)
            return None
        self._checking_since = None
        heartbeat.mark_storage(None)
        return fence if fence > self._token else None

    def _end(self, fence: Fence) -> None:
        # Logging can block, on a lock of the main thread or on storage: it gets 1 s.
        message = f"{_superseded(fence, self._token)}; this process exits with code {FENCED_EXIT_CODE}"
        logger = threading.Thread(target=log.error, args=(message,), name="fence log", daemon=True)
        logger.start()
        logger.join(_LOG_SECONDS)
        # Flush nothing: unwritten data of this process belongs to a superseded group.
        self._leave(FENCED_EXIT_CODE)


@contextmanager
def fence_watched(run_dir: RunDir, token: Fence, *, poll_seconds: float = _POLL_SECONDS) -> Iterator[None]:
    """End this process within 5 s after a newer group has taken over, as long as the body runs.

    Heartbeats then report since when storage has failed.
    """
    watch = FenceWatch(run_dir, token, poll_seconds=poll_seconds, leave=os._exit)
    watch.start()
    try:
        yield
    finally:
        watch.stop()


def _read(run_dir: RunDir) -> Fence:
    """Return the fence. Raises OSError also for a damaged fence.json: another tool may be writing it."""
    try:
        return run_dir.fence()
    except ValueError as error:
        raise OSError(f"{run_dir.root}/control/fence.json is damaged: {error}") from error


def _superseded(fence: Fence, token: Fence) -> str:
    if fence.attempt > token.attempt:
        return f"attempt {fence.attempt} has taken over from attempt {token.attempt}, which stops"
    groups = f"worker group {fence.epoch} of attempt {fence.attempt} has taken over from group {token.epoch}"
    return f"{groups}, which stops"
