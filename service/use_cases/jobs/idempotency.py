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
    def hold(self, once: IdempotencyKey) -> Iterator[None]:
        """Hold a key until the block ends. Raises IdempotencyMismatch, KeyInFlight if another request holds it."""
        with self._lock:
            if (body := self._bodies.get(once.id)) is not None:
                raise KeyInFlight(once.key) if body == once.body else IdempotencyMismatch(once.key)
            self._bodies[once.id] = once.body
        try:
            yield
        finally:
            with self._lock:
                del self._bodies[once.id]
