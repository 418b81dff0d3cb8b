"""A watch on the loop: where no step ends in time, every rank writes down where it stands."""

import faulthandler
import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from train_loop.liveness.fencing import check_fence
from train_loop.loop.session import Session
from train_loop.run_dir import copy_files, is_remote, make_folder, size_of
from train_loop.system.retry import retry_storage

log = logging.getLogger(__name__)


class Watchdog:
    """Writes the stacks of all threads once it was not fed for so many seconds."""

    def __init__(self, path: Path, *, seconds: float) -> None:
        # Those of an earlier start of this attempt are what its end is to be understood by.
        self._file = path.open("a")
        self._seconds = seconds

    def feed(self) -> None:
        """Something was done: wait anew."""
        # By a thread of faulthandler's own, which needs neither the interpreter nor its lock.
        faulthandler.dump_traceback_later(self._seconds, file=self._file)

    def close(self) -> None:
        """Watch no more."""
        faulthandler.cancel_dump_traceback_later()
        self._file.close()


@contextmanager
def watched(session: Session) -> Iterator[Watchdog]:
    """Watch over the body; the file of stacks stays only if something hung.

    A cleanup that fails is logged: it must neither fail a run that is done nor mask what ended it.
    """
    attempt = session.run_dir.attempt(session.attempt)
    own = attempt.stacks_of(session.rank, session.epoch)
    # On object storage it lies elsewhere until this rank ends.
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
        size = size_of(path)
        if size == 0:
            path.unlink(missing_ok=True)
        elif size and is_remote(folder):
            copy_files(path.parent, folder)
    except Exception as error:
        log.warning("the stacks of rank %d were not cleaned up: %s", session.rank, error)
