"""Start of the service, until it knows the nodes of its cluster."""

import threading
import time
from collections.abc import Callable

_POLL_SECONDS = 0.2


class FirstView:
    """The wait for the first list of a cluster's nodes. It ends after a time limit, as the cluster may be away."""

    def __init__(self, *, pending: bool = True) -> None:
        self.pending = pending

    def wait(self, shutdown: threading.Event, *, known: Callable[[], object | None], seconds: float) -> None:
        """Ask for the nodes until they are known, at least once, and for `seconds` at most."""
        end = time.monotonic() + seconds
        while known() is None and time.monotonic() < end and not shutdown.wait(_POLL_SECONDS):
            pass
        self.pending = False
