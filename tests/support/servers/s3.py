"""A real S3 server for tests: moto's, in a separate process, which refuses requests on demand.

`python -m tests.support.servers.s3 FOLDER` serves. Server and test exchange the port, the log of requests and the
switch for refusals as files in FOLDER.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from s3fs import S3FileSystem
from werkzeug.serving import make_server

from tests.support.waiting import wait_for
from train_loop.run_dir import read_lines, write_durably

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

_HOST = "127.0.0.1"
_KEY = "test"
_NEVER_REFUSED = "X-Never-Refused"
_SLOW_DOWN = b"""<?xml version="1.0" encoding="UTF-8"?>
<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message><RequestId>test</RequestId></Error>"""


class S3Server:
    """A running server, as seen from the test; its buckets and objects are in memory only."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._objects: dict[str, bytes] = {}
        """The objects put so far, in order; a bucket is recorded as a path of one part."""
        self._process: subprocess.Popen[bytes] | None = None
        self._port = 0

    @property
    def endpoint(self) -> str:
        """Return the URL, which stays the same after `gone`."""
        return f"http://{_HOST}:{self._port}"

    def environment(self) -> dict[str, str]:
        """Return the variables by which botocore, and with it fsspec's s3://, finds the server."""
        return s3_environment(self.endpoint)

    def bucket(self, name: str) -> None:
        """Create a bucket."""
        self.put(name, b"")

    def put(self, path: str, content: bytes) -> None:
        """Put an object at bucket/key; this request is never refused."""
        self._objects[path] = content
        self._send(path, content)

    def requests(self) -> list[dict[str, Any]]:
        """Return the answered requests, each with method, path, range and status, in order."""
        return list(read_lines(_requests(self._folder)))

    @property
    def refused(self) -> int:
        """Return the number of requests answered with 503 SlowDown."""
        return sum(request["status"] == 503 for request in self.requests())

    @contextmanager
    def refuse(self) -> Iterator[None]:
        """Answer every request with 503 SlowDown for a while."""
        self.switch.touch()
        try:
            yield
        finally:
            self.switch.unlink()

    @property
    def switch(self) -> Path:
        """Return the file that makes the server refuse requests while it exists; any process may create it."""
        return _flag(self._folder)

    @contextmanager
    def gone(self) -> Iterator[None]:
        """Refuse connections for a while; then serve the same objects on the same port."""
        self.stop()
        try:
            yield
        finally:
            # Until all objects are restored: a missing object would simulate data loss, not an outage.
            with self.refuse():
                self.start()
                for path, content in self._objects.items():
                    self._send(path, content)

    def start(self) -> None:
        """Start the process, on the port that it had, and wait until it listens."""
        _port_file(self._folder).unlink(missing_ok=True)
        command = [sys.executable, "-m", "tests.support.servers.s3", str(self._folder), "--port", str(self._port)]
        with _log(self._folder).open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, cwd=Path(__file__).parents[3])
        self._port = wait_for(self._reported_port, "an S3 server")

    def stop(self) -> None:
        """Stop the process."""
        if self._process is not None:
            self._process.kill()  # the process holds no data that could be lost
            self._process.wait(timeout=30)

    def _reported_port(self) -> int | None:
        assert self._process is not None
        assert self._process.poll() is None, _log(self._folder).read_text()[-4000:]
        file = _port_file(self._folder)
        return int(file.read_text()) if file.exists() else None

    def _send(self, path: str, content: bytes) -> None:
        # moto requires a signature without checking it; without one, an object cannot be put twice.
        signature = f"AWS4-HMAC-SHA256 Credential={_KEY}/20260101/us-east-1/s3/aws4_request, Signature=none"
        headers = {"Content-Type": "application/octet-stream", "Authorization": signature, _NEVER_REFUSED: "yes"}
        request = urllib.request.Request(f"{self.endpoint}/{quote(path)}", content, headers, method="PUT")
        with urllib.request.urlopen(request, timeout=30):
            pass


def s3_environment(endpoint: str) -> dict[str, str]:
    """Return the variables by which botocore finds a server of this module."""
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": _KEY,
        "AWS_SECRET_ACCESS_KEY": _KEY,
        "AWS_DEFAULT_REGION": "us-east-1",
    }


@contextmanager
def s3_server() -> Iterator[S3Server]:
    """Run a server on a free loopback port."""
    with tempfile.TemporaryDirectory(prefix="s3-") as folder:
        server = S3Server(Path(folder))
        try:
            server.start()
            # fsspec caches file systems, and with them the address of an earlier server.
            S3FileSystem.clear_instance_cache()
            yield server
        finally:
            S3FileSystem.clear_instance_cache()
            server.stop()


class ReadinessGate:
    """A WSGI layer before moto's application that refuses requests on demand and logs every answer."""

    def __init__(self, application: "WSGIApplication", folder: Path) -> None:
        self.application = application
        self.folder = folder
        self._writing = threading.Lock()

    def __call__(self, environ: "WSGIEnvironment", start_response: "StartResponse") -> Iterable[bytes]:
        """Answer one request."""

        def start_and_log(status: str, headers: list[tuple[str, str]], *rest: Any) -> Any:
            # Log before the answer is sent, so that a client with the answer finds the log line.
            self._log_request(environ, int(status.split()[0]))
            return start_response(status, headers, *rest)

        if "HTTP_X_NEVER_REFUSED" in environ or not _flag(self.folder).exists():
            return self.application(environ, start_and_log)
        start_and_log("503 Slow Down", [("Content-Type", "application/xml"), ("Content-Length", str(len(_SLOW_DOWN)))])
        return [] if environ["REQUEST_METHOD"] == "HEAD" else [_SLOW_DOWN]

    def _log_request(self, environ: "WSGIEnvironment", status: int) -> None:
        request = {
            "method": environ["REQUEST_METHOD"],
            "path": environ["PATH_INFO"],
            "range": environ.get("HTTP_RANGE"),
        }
        with self._writing, _requests(self.folder).open("a") as file:
            file.write(json.dumps(request | {"status": status}) + "\n")


def main() -> None:
    """Serve until killed; write the port to a file once requests are accepted."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.servers.s3", description=__doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--port", type=int, default=0, help="0: the system chooses")
    parser.add_argument("--host", default=_HOST, help="address to listen on")
    arguments = parser.parse_args()
    gate = ReadinessGate(DomainDispatcherApplication(create_backend_app), arguments.folder)
    server = make_server(arguments.host, arguments.port, gate, threaded=True, request_handler=MotoRequestHandler)
    write_durably(_port_file(arguments.folder), str(server.server_port))
    server.serve_forever()


def _port_file(folder: Path) -> Path:
    return folder / "port"


def _flag(folder: Path) -> Path:
    return folder / "refuse"


def _requests(folder: Path) -> Path:
    return folder / "requests.jsonl"


def _log(folder: Path) -> Path:
    return folder / "log"


if __name__ == "__main__":
    main()
