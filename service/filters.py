"""Which lines of a log, or of metrics, somebody wants to see."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from service.ports import Line

Level = Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"]
_LEVELS = get_args(Level)
_LEVEL = re.compile(rf"^\S+ \S+ ({'|'.join(_LEVELS)}) ")
"""As train_loop.logs writes it."""
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


def thin_out(lines: Sequence[Line], *, points: int) -> list[Line]:
    """At most so many lines: of each of equal parts the two of least and of most loss, in their order."""
    if len(lines) <= points:
        return list(lines)
    parts = points // 2
    kept = set[int]()
    for part in range(parts):
        places = range(part * len(lines) // parts, (part + 1) * len(lines) // parts)
        kept |= {min(places, key=lambda place: _loss(lines[place])), max(places, key=lambda place: _loss(lines[place]))}
    return [lines[place] for place in sorted(kept)]


def _loss(line: Line) -> float:
    """Its loss; one that was not finite is null there, and stands out at the top."""
    loss = line.get("loss")
    return float(loss) if isinstance(loss, int | float) else math.inf
