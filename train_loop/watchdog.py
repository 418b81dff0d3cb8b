"""A watch on the loop: where no step ends in time, every rank writes down where it stands."""

import faulthandler
import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from train_loop.patience import retry_storage
from train_loop.run_dir import copy_files, is_remote, make_folder, size_of, storage_may_fail
from train_loop.session import Session

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
    """A watch over what is done inside; its file stays only where something hung."""
    folder = session.run_dir.attempt(session.attempt).stacks
    # On object storage it lies elsewhere until this rank ends.
    with tempfile.TemporaryDirectory() as elsewhere:
        place = Path(elsewhere) if is_remote(folder) else folder
        path = place / f"rank-{session.rank:05d}.txt"
        dog = retry_storage(partial(_open, path, session), seconds=session.patience)
        try:
            dog.feed()
            yield dog
        finally:
            # What ended the rank is on its way through here, and must not be replaced by a storage error.
            with storage_may_fail(partial(log.warning, "the file of stacks could not be tidied up: %s")):
                dog.close()
                _tidy(path, folder)


def _open(path: Path, session: Session) -> Watchdog:
    make_folder(path.parent)
    return Watchdog(path, seconds=session.timeout.total_seconds())


def _tidy(path: Path, folder: Path) -> None:
    """Remove an empty file of stacks; copy one that is not empty to object storage."""
    size = size_of(path)
    if size == 0:
        path.unlink(missing_ok=True)
    elif size and is_remote(folder):
        copy_files(path.parent, folder)
