"""A watch on the loop: where no step ends in time, every rank writes down where it stands."""

import faulthandler
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from train_loop.run_dir import copy_files, is_remote
from train_loop.session import Session


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
        place.mkdir(parents=True, exist_ok=True)
        path = place / f"rank-{session.rank:05d}.txt"
        dog = Watchdog(path, seconds=session.timeout.total_seconds())
        try:
            dog.feed()
            yield dog
        finally:
            dog.close()
            if not path.stat().st_size:
                path.unlink()
            elif is_remote(folder):
                copy_files(place, folder)
