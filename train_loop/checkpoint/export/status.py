"""Status of an export, written to the run directory while the export runs."""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from train_loop.checkpoint.export.tensors import Piece
from train_loop.run_dir import ExportState, ExportStatus, ExportWish, RunDir, storage_may_fail

log = logging.getLogger(__name__)
_WRITE_SECONDS = 5.0


class Progress:
    """The progress of an export, in weights written."""

    def __init__(self) -> None:
        self.total = 0
        self.difference: float | None = None
        """Largest difference of a merged model's outputs from those with adapters."""
        self._done = 0

    def counted(self, pieces: Iterator[Piece]) -> Iterator[Piece]:
        """Yield the pieces, and count their values."""
        for piece in pieces:
            yield piece
            self._done += piece.values.numel()

    @property
    def share(self) -> float:
        """Fraction of the weights that is written, from 0 to 1."""
        return round(self._done / self.total, 4) if self.total else 0.0


@contextmanager
def report_status(run_dir: RunDir, step: int, wish: ExportWish) -> Iterator[Progress]:
    """Write the status every few seconds while the export runs, and its result at the end."""
    progress, ended = Progress(), threading.Event()

    def write(state: ExportState, reason: str | None = None) -> None:
        status = ExportStatus(
            step=step,
            wish=wish,
            state=state,
            progress=progress.share,
            time=time.time(),
            reason=reason,
            difference=progress.difference,
        )
        run_dir.exports.write(status)

    def keep_writing() -> None:
        while not ended.wait(_WRITE_SECONDS):
            with storage_may_fail(partial(log.warning, "the progress of the export could not be written: %s")):
                write("running")

    write("running")
    writer = threading.Thread(target=keep_writing, daemon=True)
    writer.start()
    try:
        yield progress
    except BaseException as error:
        _end(writer, ended)
        write("failed", str(error).partition("\n")[0] or type(error).__name__)
        raise
    _end(writer, ended)
    write("done")


def _end(thread: threading.Thread, ended: threading.Event) -> None:
    ended.set()
    thread.join()
