"""Postgres connections whose calls end after a time limit, even if the server is frozen.

libpq has no such limit: a stopped server still acknowledges packets, so TCP timeouts never fire.
"""

import time
from typing import TypeVar

from psycopg import Connection, OperationalError
from psycopg.abc import PQGen
from psycopg.rows import TupleRow

T = TypeVar("T")


class TimedConnection(Connection[TupleRow]):
    """A connection whose statements, commits and rollbacks raise OperationalError after `seconds`."""

    seconds = 10.0

    def wait(self, gen: PQGen[T], interval: float = 0.1, timeout: float | None = None) -> T:
        """Run a protocol exchange to its end. Close the connection and raise OperationalError after the limit."""
        return super().wait(self._limited(gen), interval, timeout)

    def _limited(self, exchange: PQGen[T]) -> PQGen[T]:
        end = time.monotonic() + self.seconds
        try:
            wanted = next(exchange)
            while True:
                # psycopg resumes the generator after each interval, with 0 if no answer arrived.
                ready = yield wanted
                if not ready and time.monotonic() >= end:
                    # Close the connection: a late answer must not be read as the answer to a later statement.
                    self.pgconn.finish()
                    raise OperationalError(f"the server did not answer within {self.seconds:g} s")
                wanted = exchange.send(ready)
        except StopIteration as done:
            answer: T = done.value
            return answer
