"""The order of inference: rows of similar length follow each other, so that batches have little padding."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from train_loop.data.dataset import Dataset
from train_loop.data.order import Ids, Order
from train_loop.data.stream.local import row_lengths

_KEPT = 4
"""Windows whose order is kept: a batch has rows of neighbours."""


@dataclass(frozen=True, kw_only=True)
class LengthOrder(Order):
    """An order in windows of `window` positions, each of which is sorted by the length of its rows.

    The set of rows before the end of a window is that of the plain order. Every second window ascends, so that
    neighbours meet at rows of similar length.
    """

    rows: Dataset
    window: int

    def at(self, positions: Ids) -> Ids:
        """Return the sample ids at the given positions, PADDING past the end. The result has the shape of the input."""
        plain = super().at(positions)
        numbers, found = plain // self.window, plain.copy()
        # PADDING is in no window.
        for number in np.unique(numbers[numbers >= 0]):
            chosen = numbers == number
            found[chosen] = self._sorted(int(number))[plain[chosen] - number * self.window]
        return found

    @cached_property
    def _sorted(self) -> Callable[[int], Ids]:
        """Return the function `_sort`, whose latest results are kept; several threads use it."""
        return lru_cache(maxsize=_KEPT)(self._sort)

    def _sort(self, number: int) -> Ids:
        """Return the samples of a window in their order."""
        first, stop = number * self.window, min((number + 1) * self.window, self.samples)
        ascending: Ids = first + np.argsort(row_lengths(self.rows, first, stop), kind="stable")
        return ascending if number % 2 else ascending[::-1]

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields alone."""
        return {name: value for name, value in self.__dict__.items() if name != "_sorted"}
