"""`python -m service.serve`: the service in the foreground until SIGTERM or SIGINT. `trainshed serve` executes this."""

import gc
import os
import signal
import socket
import sys
from types import FrameType

import structlog
import uvicorn
from fastapi import FastAPI

from service.app import create_app
from service.config.address import ServiceAddress
from service.config.environment import BadSettings, read_settings, unknown_variables
from service.config.listen import check_address
from service.config.logs import configure_logs
from service.config.running import SettingsRecord
from service.config.settings import Settings
from service.errors import AddressUnusable, DatabaseUnusable, HomeInUse, HomeUnusable, KeyUnusable, NotReady
from service.lifecycle.connection_limits import (
    BACKLOG,
    Limits,
    bounded,
    max_connections,
    parse_proxies,
    raise_open_files,
)
from service.lifecycle.locks import locked
from service.lifecycle.shutdown import Shutdown
from service.lifecycle.startup import DatabaseStartup
from train_loop.run_dir import write_durably

log = structlog.get_logger(__name__)
_ANSWER_SECONDS = 4
"""Time for in-flight requests after a stop signal."""


def main() -> int:
    """Run the service; return 1 if it cannot: an invalid setting, a home or port in use, a permanent database error."""
    for line in unknown_variables():
        print(line, file=sys.stderr)  # noqa: T201
    try:
        settings = read_settings()
    except BadSettings as error:
        print(error, file=sys.stderr)  # noqa: T201
        return 1
    configure_logs(settings.logs)
    raise_open_files()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave)
    try:
        with locked(settings):
            _serve(settings)
    except (AddressUnusable, HomeInUse, HomeUnusable, KeyUnusable, DatabaseUnusable, NotReady) as error:
        print(error, file=sys.stderr)  # noqa: T201
        return 1
    return 0


def _serve(settings: Settings) -> None:
    """Serve until a stop signal. Raises AddressUnusable, DatabaseUnusable, DatabaseUnreachable."""
    # Before Ray starts: uvicorn binds the port last.
    check_address(settings.host, settings.port)
    server = _Server(create_app(settings), settings)
    # Freeze imported objects: otherwise each full garbage collection, every second under load, scans them for 100 ms.
    gc.collect()
    gc.freeze()
    try:
        server.run()
    finally:
        settings.address_file.unlink(missing_ok=True)
    if server.database_startup.hopeless is not None:
        raise server.database_startup.hopeless


class _Server(uvicorn.Server):
    """A uvicorn server that announces its URL once it listens (port 0 is then known) and shuts down in time."""

    def __init__(self, app: FastAPI, settings: Settings) -> None:
        # No logging of uvicorn: the service configures logs and writes the access log.
        config = uvicorn.Config(
            app,
            # asyncio listens on IPv6 only if the host is "::", and on all addresses if it is empty.
            host="" if settings.host == "::" else settings.host,
            port=settings.port,
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=_ANSWER_SECONDS,
            # uvicorn's default trusts loopback, where every process of the host may send these headers.
            forwarded_allow_ips=_forwarded_allow_ips(),
            http=bounded(_limits(settings)),
            ws="none",
            backlog=BACKLOG,
        )
        super().__init__(config)
        self._settings = settings
        self._shutdown: Shutdown = app.state.shutdown
        self.database_startup: DatabaseStartup = app.state.startup

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin the shutdown; streams end, and clients reconnect with the id of their last line."""
        if self.should_exit:
            self._shutdown.end_now(128 + sig, "second stop signal")
        self._shutdown.begin()
        super().handle_exit(sig, frame)

    async def on_tick(self, counter: int) -> bool:
        """Return True to stop the server, also if the database can never be opened."""
        if self.database_startup.hopeless is not None:
            self._shutdown.begin()
            return True
        return await super().on_tick(counter)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Bind the port, then write and print the URL."""
        await super().startup(sockets)
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
            address = ServiceAddress(url=url, pid=os.getpid(), settings=SettingsRecord.of(self._settings))
            write_durably(self._settings.address_file, address.model_dump_json())
            self._settings.address_file.chmod(0o600)
            print(f"Trainshed listens on {url} (docs: /docs)", flush=True)  # noqa: T201


def _limits(settings: Settings) -> Limits:
    total = min(settings.connections, max_connections())
    if total < settings.connections:
        log.warning("connections_limited", connections=total, setting=settings.connections, remedy="raise ulimit -Hn")
    return Limits(
        total,
        settings.connections_per_address,
        settings.head_seconds,
        settings.body_bytes_per_second,
        parse_proxies(_forwarded_allow_ips()),
    )


def _forwarded_allow_ips() -> str:
    """Return the addresses of trusted proxies; none unless they are set."""
    return os.environ.get("FORWARDED_ALLOW_IPS", "")


def _leave(number: int, frame: FrameType | None) -> None:
    # uvicorn raises the stop signal again after its shutdown; a requested stop exits with 0.
    raise SystemExit(0)


if __name__ == "__main__":
    sys.exit(main())
