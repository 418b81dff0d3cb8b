"""A bounded cache of results for values that callers send repeatedly."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Recent(Generic[K, V]):
    """The results of the `most` keys that were used last. Thread-safe; two threads may compute the same result."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._found: OrderedDict[K, V] = OrderedDict()

    def get(self, key: K) -> V | None:
        """Return the result of a key; None without one."""
        with self._lock:
            if key in self._found:
                self._found.move_to_end(key)
            return self._found.get(key)

    def put(self, key: K, result: V) -> None:
        """Keep the result of a key, and drop that of the key that was used longest ago if there are too many."""
        with self._lock:
            self._found[key] = result
            self._found.move_to_end(key)
            if len(self._found) > self._most:
                self._found.popitem(last=False)


class OfSame(Generic[K, V]):
    """The results of `compute` for objects that do not change, by identity: equal objects are computed again."""

    def __init__(self, most: int, compute: "Callable[[K], V]") -> None:
        self._recent = Recent[int, tuple[K, V]](most)
        self._compute = compute

    def __call__(self, value: K) -> V:
        """Return the result for an object."""
        # The cache holds the object, so that no other one has its id.
        found = self._recent.get(id(value))
        if found is None:
            found = value, self._compute(value)
            self._recent.put(id(value), found)
        return found[1]
