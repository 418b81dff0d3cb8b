"""Signals that end a process, as input of a thread."""

import os
import select
import signal
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class SignalPipe:
    """A pipe that receives SIGINT and SIGTERM, also if the main thread is blocked or the parent ignored them.

    A process that a shell started in the background ignores SIGINT, and so do its children.
    """

    def __init__(self) -> None:
        self._end, wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.install()
        signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)

    def install(self) -> None:
        """Handle the signals; call it again in the main thread after a library has set its own handlers."""
        for number in _SIGNALS:
            signal.signal(number, _ignore)

    def wait(self, seconds: float) -> signal.Signals | None:
        """Return the next of these signals; None if none arrives within `seconds`."""
        ready, _, _ = select.select([self._end], [], [], seconds)
        received = os.read(self._end, 512) if ready else b""
        return next((number for number in _SIGNALS if number in received), None)


def _ignore(_number: int, _frame: FrameType | None) -> None:
    """Do nothing: the pipe has the number."""
