"""A helper process with all imports that forks for each question."""

import json
import math
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from socketserver import ForkingMixIn, StreamRequestHandler, UnixStreamServer
from typing import Any


def serve(path: str, answer: Callable[[dict[str, Any]], object]) -> None:
    """Answer each question in a process of its own, until standard input ends: then whoever asks has gone."""

    class Handler(StreamRequestHandler):
        def handle(self) -> None:
            question = json.load(self.rfile)
            # Who asked does not wait any longer.
            signal.alarm(math.ceil(question["seconds"]))
            try:
                found = answer(question)
            except Exception as error:
                traceback.print_exc()
                found = {"failed": f"{type(error).__name__}: {error}"}
            self.wfile.write(json.dumps(found).encode())

    with Server(path, Handler) as server:
        threading.Thread(target=_leave_with_stdin, daemon=True).start()
        server.serve_forever()


class Server(ForkingMixIn, UnixStreamServer):
    """A process for each question."""


def _leave_with_stdin() -> None:
    os.read(sys.stdin.fileno(), 1)
    os._exit(0)
