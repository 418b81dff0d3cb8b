"""Transfer of a run's metrics to one sink, from its last position on."""

import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from train_loop.errors import FencedError
from train_loop.run_dir import (
    CurrentGroup,
    Outcome,
    RunDir,
    SinkName,
    SinkPlace,
    read_lines_after,
    read_place,
    write_place,
)
from train_loop.sinks.sink import Point, Sink, points


class SinkCursor:
    """The transfer of metrics to one sink, from all attempts up to `attempt` (None: from all attempts).

    The position is written once all metrics before it are safe in the sink. If the process is killed earlier, its
    successor sends those metrics again.
    """

    def __init__(
        self, run_dir: RunDir, name: SinkName, open_sink: Callable[[], Sink], *, attempt: int | None = None
    ) -> None:
        self.run_dir = run_dir
        self.name = name
        self._open = open_sink
        self._attempt = attempt
        self._sink: Sink | None = None
        self._place: SinkPlace | None = None
        self._given: deque[tuple[float, SinkPlace]] = deque()
        """Positions that are not written yet, each with the time at which the sink got the metrics before it."""

    def hand_over(self) -> None:
        """Send all new metrics. Raises FencedError if a newer attempt has taken over, and the sink's errors."""
        while (found := self._next()) is not None:
            new, place = found
            if new:
                self._sink = self._sink or self._open()
                self._sink.write(new)
            self._place = place
            self._given.append((time.monotonic(), place))
            self._settle()
        self._settle()

    def drop(self) -> None:
        """Discard a sink that failed. The next call opens it again and repeats the metrics that may be lost."""
        failed, self._sink = self._sink, None
        self._place = None
        self._given.clear()
        if failed is not None:
            # Its failure was already reported.
            with suppress(Exception):
                failed.close(None)

    def close(self, outcome: Outcome | None) -> None:
        """Close the sink, if it was opened."""
        sink, self._sink = self._sink, None
        if sink is not None:
            sink.close(outcome)
        self._settle()

    def _settle(self) -> None:
        """Write the newest position before which all metrics are safe in the sink."""
        settled = None
        until = time.monotonic() - (self._sink.settle_seconds if self._sink else 0.0)
        while self._given and self._given[0][0] <= until:
            _, settled = self._given.popleft()
        if settled is not None:
            write_place(self.run_dir.sink_file(self.name), settled)

    def _next(self) -> tuple[list[Point], SinkPlace] | None:
        """Return the next points and the position after them; None without new metrics."""
        place = self._place or read_place(self.run_dir.sink_file(self.name))
        self._place = place
        # List attempts before reading lines: if a later attempt is listed, the earlier one's lines are complete.
        for attempt in self.run_dir.attempts():
            if attempt.number < place.attempt or attempt.number > (self._attempt or attempt.number):
                continue
            same = attempt.number == place.attempt
            offset, group = place.offset if same else 0, CurrentGroup(place.epoch if same else 0)
            lines, behind = read_lines_after(attempt.metrics, offset)
            if behind > offset:
                self._check_fence()
                current = points(list(filter(group.keeps, lines)))
                return current, SinkPlace(attempt=attempt.number, offset=behind, epoch=group.newest)
        return None

    def _check_fence(self) -> None:
        if self._attempt is not None and (newer := self.run_dir.fence().attempt) > self._attempt:
            raise FencedError(f"attempt {newer} sends metrics to {self.name} now")
