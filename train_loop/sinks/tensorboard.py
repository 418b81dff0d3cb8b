"""TensorBoard sink: event files in the run directory."""

import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from train_loop.run_dir import Outcome, is_remote, make_folder
from train_loop.sinks.sink import Point, cannot_import

_ROLL_BYTES = 1 << 20
"""Size after which object storage gets a new file: an object that grows is uploaded again as a whole."""


class TensorBoard:
    """Event files for `tensorboard --logdir`; for object storage they are written locally and then uploaded."""

    settle_seconds = 0.0

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._temporary = TemporaryDirectory(prefix="tensorboard-") if is_remote(folder) else None
        self._local = Path(self._temporary.name) if self._temporary else folder
        self._file: _EventFile | None = None

    def write(self, points: Sequence[Point]) -> None:
        """Append points durably to the newest file; a new attempt starts a new file."""
        for point in points:
            if self._file is None or self._is_over(self._file, point):
                self._finish()
                self._file = _EventFile(self._local, point.attempt)
            self._file.append(point)
        self._flush()

    def close(self, outcome: Outcome | None) -> None:
        """Close the file."""
        try:
            self._finish()
        finally:
            if self._temporary is not None:
                self._temporary.cleanup()

    def _is_over(self, file: "_EventFile", point: Point) -> bool:
        return file.attempt != point.attempt or (self._temporary is not None and file.bytes > _ROLL_BYTES)

    def _finish(self) -> None:
        if self._file is not None:
            self._flush()
            self._file.close()
            self._file = None

    def _flush(self) -> None:
        if self._file is None:
            return
        self._file.flush()
        if self._temporary is not None:
            self._folder.joinpath(self._file.path.name).write_bytes(self._file.path.read_bytes())


class _EventFile:
    """An event file whose name sorts after those of earlier attempts: TensorBoard reads files in this order.

    tensorboardX's SummaryWriter would write from its own thread, so it would be unknown which points are on disk.
    """

    def __init__(self, folder: Path, attempt: int) -> None:
        try:
            # The only import of a package that takes seconds to import.
            from tensorboardX.event_file_writer import EventsWriter  # noqa: PLC0415
            from tensorboardX.proto.event_pb2 import Event, SessionLog  # noqa: PLC0415
            from tensorboardX.proto.summary_pb2 import Summary  # noqa: PLC0415
        except ImportError as error:
            raise cannot_import("tensorboard", error) from error
        self._event, self._session_log, self._summary = Event, SessionLog, Summary
        make_folder(folder)
        self.attempt = attempt
        suffix = f".{time.time_ns()}"
        self._writer = EventsWriter(str(folder / f"attempt-{attempt:05d}.events"), suffix)
        (self.path,) = folder.glob(f"*{suffix}")
        self._newest: int | None = None

    @property
    def bytes(self) -> int:
        """Size on disk, in bytes."""
        return self.path.stat().st_size

    def append(self, point: Point) -> None:
        """Add the values of a step; it becomes the file's newest step."""
        if self._newest is None or point.step <= self._newest:
            # START discards earlier values of this and later steps. A new file may need it, as earlier files may
            # contain them.
            start = self._session_log(status=self._session_log.START)
            self._writer.write_event(self._event(wall_time=point.time, step=point.step, session_log=start))
        values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in point.scalars.items()]
        summary = self._summary(value=values)
        self._writer.write_event(self._event(wall_time=point.time, step=point.step, summary=summary))
        self._newest = point.step

    def flush(self) -> None:
        """Write all events to the disk."""
        self._writer.flush()

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()
