"""Watchdog of the loop: if no step finishes in time, every rank writes its stacks."""

import faulthandler
import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from train_loop.liveness.fencing import check_fence
from train_loop.loop.session import Session
from train_loop.run_dir import append_regular, copy_files, is_remote, make_folder, run_dir_of, size_of
from train_loop.system.retry import retry_storage

log = logging.getLogger(__name__)


class Watchdog:
    """A timer that writes the stacks of all threads if it is not fed for `seconds`."""

    def __init__(self, path: Path, *, seconds: float) -> None:
        # Keep the stacks of an earlier start of this attempt: they explain its end.
        self._file = os.fdopen(append_regular(path, below=run_dir_of(path)), "a")
        self._seconds = seconds

    def feed(self) -> None:
        """Restart the timer."""
        # faulthandler uses its own thread, which needs no interpreter lock.
        faulthandler.dump_traceback_later(self._seconds, file=self._file)

    def close(self) -> None:
        """Cancel the timer and close the file."""
        faulthandler.cancel_dump_traceback_later()
        self._file.close()


@contextmanager
def watched(session: Session) -> Iterator[Watchdog]:
    """Run the body under a watchdog. The file of stacks is kept only if the body hung.

    A failed cleanup is only logged: it must neither fail a finished run nor hide its error.
    """
    attempt = session.run_dir.attempt(session.attempt)
    own = attempt.stacks_of(session.rank, session.epoch)
    # On object storage a local file is used until this rank ends.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as elsewhere:
        place = Path(elsewhere) if is_remote(own) else own.parent
        path = place / own.name
        dog = retry_storage(partial(_open, path, session), seconds=session.patience)
        try:
            dog.feed()
            yield dog
        finally:
            _close(dog, path, session)


def _open(path: Path, session: Session) -> Watchdog:
    make_folder(path.parent)
    return Watchdog(path, seconds=session.timeout.total_seconds())


def _close(dog: Watchdog, path: Path, session: Session) -> None:
    folder = session.run_dir.attempt(session.attempt).stacks
    try:
        dog.close()
        # A newer group may be cleaning up after this one.
        check_fence(session.run_dir, session.token)
        size = size_of(path, below=run_dir_of(path))
        if size == 0:
            path.unlink(missing_ok=True)
        elif size and is_remote(folder):
            copy_files(path.parent, folder)
    except Exception as error:
        log.warning("the stacks of rank %d were not cleaned up: %s", session.rank, error)
