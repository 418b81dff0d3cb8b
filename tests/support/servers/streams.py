"""A service on fakes behind a real server, for clients of its streams."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from service.api.build import put_state
from tests.support.fakes.service import FakeService
from tests.support.waiting import wait_for


class Address:
    """The address of the service after each start."""

    def __init__(self, service: FakeService) -> None:
        self._service = service
        self._app = service.app()
        # Create its routes while no other thread runs: FastAPI then disables warnings in all threads.
        self._app.openapi()
        self.url: str | None = None
        self.starts = 0

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Run a real server on a separate port until the block ends."""
        put_state(self._app, self._service.parts())
        server = uvicorn.Server(uvicorn.Config(self._app, port=0, log_level="warning"))
        thread = threading.Thread(target=server.run)
        thread.start()
        try:
            wait_for(lambda: server.started, "the server")
            self.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
            self.starts += 1
            yield
        finally:
            self.url = None
            self._app.state.shutdown.set()
            server.should_exit = True
            thread.join()
