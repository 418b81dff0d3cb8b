"""Idempotency-Keys of the requests that this process is answering."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from service.errors import IdempotencyMismatch, KeyInFlight
from service.ports import IdempotencyKey


class KeysInFlight:
    """In-memory set of keys in use, so that a failed request or a crash leaves none locked. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bodies: dict[str, str] = {}

    @contextmanager
    def hold(self, key: IdempotencyKey) -> Iterator[None]:
        """Hold a key until the block ends. Raises IdempotencyMismatch, KeyInFlight if another request holds it."""
        with self._lock:
            if (body := self._bodies.get(key.id)) is not None:
                raise KeyInFlight(key.key) if body == key.body else IdempotencyMismatch(key.key)
            self._bodies[key.id] = key.body
        try:
            yield
        finally:
            with self._lock:
                del self._bodies[key.id]
