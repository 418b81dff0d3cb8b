"""Receiver of heartbeats, in a thread of Ray Train's controller."""

import logging
import secrets
import socket
import threading
from collections.abc import Callable

from train_loop.liveness.heartbeat import MAX_BYTES, Beat, Target, decode

log = logging.getLogger(__name__)
TICK_SECONDS = 0.25
"""Time between two calls of `tick`."""
_ERROR_SECONDS = 10.0
"""Minimum time between two logged errors."""


class HeartbeatListener:
    """A thread that passes each heartbeat to `on_beat`, and calls `tick` every 0.25 s."""

    def __init__(
        self, address: str, *, on_beat: Callable[[Beat], None], tick: Callable[[], None], clock: Callable[[], float]
    ) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_DGRAM)
        self._socket.bind((address, 0))
        self._socket.settimeout(TICK_SECONDS)
        self.target = Target(address, self._socket.getsockname()[1], secrets.token_hex(16))
        self.closed = threading.Event()
        self._on_beat, self._tick, self._clock = on_beat, tick, clock
        self._quiet_until = 0.0
        self._thread = threading.Thread(target=self._run, name="group-monitor", daemon=True)

    def start(self) -> None:
        """Start listening."""
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        self.closed.set()
        if self._thread.is_alive():
            self._thread.join()
        self._socket.close()

    def _run(self) -> None:
        while not self.closed.is_set():
            self._attempt(self._listen)
            # Also after an error in a heartbeat: silence must be noticed whatever arrives.
            self._attempt(self._tick)

    def _attempt(self, action: Callable[[], None]) -> None:
        """Call a function. An error must neither stop the monitor nor fill the log."""
        try:
            action()
        except Exception:
            if self._clock() >= self._quiet_until:
                log.exception("an error in the monitor of the worker group; it continues")
                self._quiet_until = self._clock() + _ERROR_SECONDS
            self.closed.wait(TICK_SECONDS)

    def _listen(self) -> None:
        """Pass on heartbeats for at most one tick; datagrams that are not heartbeats extend it by nothing."""
        deadline = self._clock() + TICK_SECONDS
        while self._clock() < deadline:
            try:
                # One byte more shows that a datagram is too long; the kernel drops the rest.
                data = self._socket.recv(MAX_BYTES + 1)
            except TimeoutError:
                return
            beat = decode(data, self.target.token)
            if beat is not None:
                self._on_beat(beat)
