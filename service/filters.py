"""Which lines of a log, or of metrics, somebody wants to see."""

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal, get_args

from service.ports import Line

Level = Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"]
_LEVELS = get_args(Level)
_LEVEL = re.compile(
    r"^(?:\x1b\[[\d;]*m)*(?:\(\w[\w ]* pid=\d+[^()]*\)(?:\x1b\[[\d;]*m)* )?\S+ \S+\s" rf"({'|'.join(_LEVELS)}) "
)
"""As train_loop.telemetry.logs writes it; logs of older versions may have what Ray put before it."""
Filter = Callable[[str], bool]


def contains(text: str) -> Filter:
    """Lines that hold a text, as it is written."""
    return lambda line: text in line


@dataclass
class AtLeast:
    """Lines of a level or a higher one, with those that belong to them: a traceback has its error's."""

    level: Level
    _shown: bool = True
    """Of the lines before the first that has a level: whoever begins amid a traceback misses nothing of it."""

    def __call__(self, line: str) -> bool:
        found = _LEVEL.match(line)
        if found is not None:
            self._shown = _LEVELS.index(found[1]) >= _LEVELS.index(self.level)
        return self._shown


class _Part:
    """Lines in a row, of which the two of least and of most loss are held, with their places among them."""

    def __init__(self, line: Line) -> None:
        self.count = 1
        self.least = self.most = (0, line)

    def add(self, line: Line) -> None:
        """One more, behind the others."""
        self._hold((self.count, line), (self.count, line))
        self.count += 1

    def join(self, other: "_Part") -> "_Part":
        """Both in one, the other behind this one."""
        self._hold(*((self.count + place, line) for place, line in (other.least, other.most)))
        self.count += other.count
        return self

    def lines(self) -> list[Line]:
        """What is held, in its order."""
        return [line for _, line in sorted(dict((self.least, self.most)).items())]

    def _hold(self, least: tuple[int, Line], most: tuple[int, Line]) -> None:
        self.least = min(self.least, least, key=lambda one: _loss(one[1]))
        self.most = max(self.most, most, key=lambda one: _loss(one[1]))


def thin_out(lines: Iterable[Line], *, points: int) -> list[Line]:
    """At most so many lines: all, or of each of equal parts the two of least and of most loss, in their order.

    It goes over them once and holds no more of them than that: parts that become too many are joined, two by two.
    """
    most, size, parts = points // 2, 1, list[_Part]()
    for line in lines:
        while len(parts) == (2 * most if size == 1 else most) and parts[-1].count == size:
            pairs = zip_longest(parts[::2], parts[1::2])
            parts, size = [first.join(second) if second else first for first, second in pairs], 2 * size
        if parts and parts[-1].count < size:
            parts[-1].add(line)
        else:
            parts.append(_Part(line))
    return [line for part in parts for line in part.lines()]


def _loss(line: Line) -> float:
    """Its loss; one that was not finite is null there, and stands out at the top."""
    loss = line.get("loss")
    return float(loss) if isinstance(loss, int | float) else math.inf
