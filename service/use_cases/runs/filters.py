"""Filters of log lines, and downsampling of metrics lines."""

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal, get_args

from service.domain.runs.json_lines import Line

Level = Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"]
_LEVELS = get_args(Level)
_LEVEL = re.compile(
    r"^(?:\x1b\[[\d;]*m)*(?:\(\w[\w ]* pid=\d+[^()]*\)(?:\x1b\[[\d;]*m)* )?\S+ \S+\s" rf"({'|'.join(_LEVELS)}) "
)
"""Line format of train_loop.telemetry.logs; logs of older versions may have Ray's prefix before it."""
_RECORD = re.compile(r"\d{4}-\d\d-\d\d[T ][\d:.,]+Z? +\[?[A-Za-z]+")
"""Start of a log record: its time and level."""
_TRACEBACK = re.compile(r"(Traceback \(most recent call last\):|ray(\.\w+)*\.exceptions\.\w+|ray::)")
"""Start of a traceback below a record."""
_RAYS_REPORT = re.compile(
    r"open an issue on|Full stack trace|abbreviated stack trace"
    r"|set DataContext\.max_errored_blocks|Dataset \S+ execution failed"
)
"""Text in records in which Ray reports an error that the driver reports, too."""
_RAYS_DAEMON = re.compile(r"\((raylet|gcs_server|autoscaler)\b[^)]*\) ")
"""Start of a message that Ray's daemons send to the driver: a dead worker, and advice about Ray's own settings."""
Filter = Callable[[str], bool]


def contains(text: str) -> Filter:
    """Return a filter for lines that contain a text; case-sensitive."""
    return lambda line: text in line


@dataclass
class AtLeast:
    """Filter for lines of a level or a higher one. Lines without a level, as in a traceback, follow the line before."""

    level: Level
    _shown: bool = True
    """Initially True: a stream that starts inside a traceback shows the rest of it."""

    def __call__(self, line: str) -> bool:
        found = _LEVEL.match(line)
        if found is not None:
            self._shown = _LEVELS.index(found[1]) >= _LEVELS.index(self.level)
        return self._shown


@dataclass
class WithoutTracebacks:
    """Filter that leaves out tracebacks, and Ray's reports about its own code, up to the next log record.

    Lines of Ray's daemons are left out, too.
    """

    _hides: bool = False

    def __call__(self, line: str) -> bool:
        if _RECORD.match(line):
            self._hides = _RAYS_REPORT.search(line) is not None
        elif _TRACEBACK.match(line) or _RAYS_DAEMON.match(line):
            self._hides = True
        return not self._hides


class _Part:
    """A run of consecutive lines that keeps only the lines of minimum and maximum loss, with their positions."""

    def __init__(self, line: Line) -> None:
        self.count = 1
        self.lowest = self.highest = (0, line)

    def add(self, line: Line) -> None:
        """Append a line."""
        self._hold((self.count, line), (self.count, line))
        self.count += 1

    def join(self, other: "_Part") -> "_Part":
        """Append the run that follows this one, and return the result."""
        self._hold(*((self.count + place, line) for place, line in (other.lowest, other.highest)))
        self.count += other.count
        return self

    def lines(self) -> list[Line]:
        """Return the kept lines in their order."""
        return [line for _, line in sorted(dict((self.lowest, self.highest)).items())]

    def _hold(self, lowest: tuple[int, Line], highest: tuple[int, Line]) -> None:
        self.lowest = min(self.lowest, lowest, key=lambda one: _loss(one[1]))
        self.highest = max(self.highest, highest, key=lambda one: _loss(one[1]))


def downsample(lines: Iterable[Line], *, points: int) -> list[Line]:
    """Downsample lines to at most `points`: all, or the minimum and maximum loss of each of equal parts.

    One pass, and memory for at most `points` lines: if there are too many parts, neighbours are joined in pairs.
    """
    limit, size, parts = points // 2, 1, list[_Part]()
    for line in lines:
        while len(parts) == (2 * limit if size == 1 else limit) and parts[-1].count == size:
            pairs = zip_longest(parts[::2], parts[1::2])
            parts, size = [first.join(second) if second else first for first, second in pairs], 2 * size
        if parts and parts[-1].count < size:
            parts[-1].add(line)
        else:
            parts.append(_Part(line))
    return [line for part in parts for line in part.lines()]


def _loss(line: Line) -> float:
    """Return the loss of a line; infinity for null, which stands for a loss that is not finite."""
    loss = line.get("loss")
    return float(loss) if isinstance(loss, int | float) else math.inf
