"""`python -m service.serve`: the service in the foreground until SIGTERM or SIGINT. What `trainshed serve` becomes."""

import gc
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import FrameType

import uvicorn
from fastapi import FastAPI
from filelock import FileLock, Timeout

from service.adapters.sql.database import sqlite_file
from service.address import ServiceAddress
from service.app import create_app
from service.environment import BadSettings, read_settings, strangers
from service.logs import configure_logs
from service.settings import Settings
from train_loop.run_dir import write_durably


def main() -> int:
    """Serve; 1 where another service has the home, or a setting cannot be."""
    for line in strangers():
        print(line, file=sys.stderr)  # noqa: T201
    try:
        settings = read_settings()
    except BadSettings as error:
        print(error, file=sys.stderr)  # noqa: T201
        return 1
    configure_logs(settings.logs)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave)
    settings.make_home()
    with ExitStack() as stack:
        for path, refusal in _locks(settings):
            try:
                stack.enter_context(FileLock(path).acquire(timeout=0))
            except Timeout:
                print(refusal, file=sys.stderr)  # noqa: T201
                return 1
        return _serve(settings)


def _locks(settings: Settings) -> Iterator[tuple[Path, str]]:
    """What one service at a time may have, and what the next one is told."""
    yield settings.home / "service.lock", f"Another service uses {settings.home}; stop it, or set TRAINSHED_HOME"
    database = sqlite_file(settings.database)
    if database is not None:
        # Its writers would wait for each other, and for nobody's leases.
        yield (
            database.with_name(f"{database.name}.lock"),
            f"Another service uses the SQLite database {database}; several services share a Postgres one, "
            "which TRAINSHED_DATABASE_URL names",
        )


def _serve(settings: Settings) -> int:
    app = create_app(settings)
    # Its logs go where all go, and each request is a line of ours.
    config = uvicorn.Config(
        app, host=settings.host, port=settings.port, log_config=None, access_log=False, server_header=False
    )
    # What was imported stays, and a full collection of the garbage would walk it, for 100 ms, under load every second.
    gc.collect()
    gc.freeze()
    try:
        _Server(config, settings, app).run()
    finally:
        settings.address_file.unlink(missing_ok=True)
    return 0


class _Server(uvicorn.Server):
    """uvicorn, which says where it listens once it does: only then is a port of 0 a number."""

    def __init__(self, config: uvicorn.Config, settings: Settings, app: FastAPI) -> None:
        super().__init__(config)
        self._settings = settings
        self._app = app

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Let those go who follow a job; they come back with the id of the last line that they got."""
        self._app.state.leaving.set()
        super().handle_exit(sig, frame)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Bind, then announce."""
        await super().startup(sockets)
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
            address = ServiceAddress(url=url, pid=os.getpid())
            write_durably(self._settings.address_file, address.model_dump_json())
            self._settings.address_file.chmod(0o600)
            print(f"Trainshed listens on {url} (docs: /docs)", flush=True)  # noqa: T201


def _leave(number: int, frame: FrameType | None) -> None:
    # uvicorn raises the signal that ended it once more when it is done; being asked to stop is no failure.
    raise SystemExit(0)


if __name__ == "__main__":
    sys.exit(main())
