"""Preflight checks and pages of results in a helper process.

Its hangs, crashes and memory use do not affect the service.
"""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError

from service.adapters.helper_processes.report_cache import ReportCache, cache_key
from service.adapters.ray.environment import environment_of_helpers
from service.errors import PreflightFailed, ResultsUnreadable, StorageAway
from service.ports import Cancellation, PreflightReport
from service.recent import OfSame
from train_loop.run_dir import Parent, ReadPolicy
from train_loop.spec import AnyJobSpec

_GRACE_SECONDS = 2.0
"""Seconds for the helper to answer after the timeout of a check."""
_POLL_SECONDS = 0.1
"""Seconds between two looks at a helper that is starting."""
_COMMAND = (sys.executable, "-m", "train_loop.preflight.checks")
_PAGE_BYTES = 1 << 23
"""Maximum bytes of the rows in a page of results; a longer first row is returned alone."""
_MOST_BYTES = 1 << 30
"""Maximum bytes of an answer, each part counted as a whole one."""
_findings = TypeAdapter(PreflightReport)


class _Question(BaseModel):
    spec: AnyJobSpec
    read_policy: ReadPolicy
    parent: Parent | None
    seconds: float
    cpu_seconds: float
    memory_bytes: int


@dataclass(frozen=True)
class Limits:
    """Limits of one check: wall-clock seconds, CPU seconds, and bytes of memory beyond the helper's own."""

    seconds: float
    cpu_seconds: float = 30.0
    memory_bytes: int = 2 << 30


class HelperPreflight:
    """A Preflight that asks a long-running `python -m train_loop.preflight.checks`. Each check runs within `limits`.

    It also reads ResultPages: a new process would import for longer than it reads.
    """

    def __init__(
        self, *, read_policy: Callable[[str], ReadPolicy], limits: Limits, command: Sequence[str] = _COMMAND
    ) -> None:
        self._read_policy = read_policy
        self._limits = limits
        self._command = tuple(command)
        self._lock = threading.Lock()
        self._helper: subprocess.Popen[bytes] | None = None
        self._requests: socket.socket | None = None
        """Socket to the helper alone: each request is a connection that is sent there."""
        self._is_ready = threading.Event()
        self._answers = ReportCache()
        self._key = OfSame(256, cache_key)

    def start(self) -> None:
        """Start the helper if it does not run. It takes seconds until it answers."""
        with self._lock:
            if self._helper is None or self._helper.poll() is not None:
                self._end()
                # A socket without a name: other processes, and code that a check runs, cannot connect to it.
                self._requests, theirs = socket.socketpair()
                with theirs:
                    self._helper = subprocess.Popen(
                        self._command,
                        stdin=theirs.fileno(),
                        start_new_session=True,
                        env=environment_of_helpers(os.environ),
                    )
                waiter = threading.Thread(
                    target=self._wait_ready, args=(self._requests,), name="preflight", daemon=True
                )
                waiter.start()

    def _wait_ready(self, requests: socket.socket) -> None:
        """Wait until the helper has done its imports, or has ended."""
        with suppress(OSError):
            if requests.recv(1) and requests is self._requests:
                self._is_ready.set()

    def trouble(self) -> str | None:
        """Return why no spec can be checked now; None if the next one is checked at once.

        Does not wait. Restarts a helper that has ended.
        """
        helper = self._helper
        if helper is None:
            return "is not started"
        if (code := helper.poll()) is not None:
            threading.Thread(target=self.start, name="preflight", daemon=True).start()
            return f"exited with {code} and is restarting"
        return None if self._is_ready.is_set() else "is importing its libraries"

    def stop(self) -> None:
        """Stop the helper."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        self._is_ready.clear()
        if self._requests is not None:
            with suppress(OSError):
                self._requests.shutdown(socket.SHUT_RDWR)
            self._requests.close()
            self._requests = None
        if self._helper is not None:
            self._helper.kill()
            self._helper.wait()

    def check(
        self, spec: AnyJobSpec, parent: Parent | None = None, cancellation: Cancellation | None = None
    ) -> PreflightReport:
        """Return all problems, and the model's sizes.

        Raises PreflightFailed if the helper has no result, StorageAway if the storage is unavailable, CallCancelled.
        """
        call = cancellation or Cancellation()
        # A package of code may change between two checks.
        if parent is not None or spec.code is not None:
            return self._run_check(spec, parent, call)
        return self._answers.get(self._key(spec), lambda: self._run_check(spec, None, call))

    def results(self, run_dir: str, *, after: int | None, limit: int, cancellation: Cancellation) -> bytes:
        """Return a page of the committed rows after an id as JSON: data, has_more and next.

        Raises ResultsUnreadable, CallCancelled.
        """
        page = {"run_dir": run_dir, "after": after, "limit": limit, "most_bytes": _PAGE_BYTES}
        limits = self._limits
        question = {"results": page, "seconds": limits.seconds, "output_bytes": _MOST_BYTES}
        question |= {"cpu_seconds": limits.cpu_seconds, "memory_bytes": limits.memory_bytes}
        try:
            found = self._request(json.dumps(question).encode(), cancellation)
        except ConnectionError:
            found = b""
        except TimeoutError:
            found = b"{}"
        if found.startswith(b'{"data": '):
            return found
        answer, why = _error_in(found), f"it took over {limits.seconds:g} s; check that the storage answers"
        if not found:
            why = "the helper that reads them crashed; see the service's log"
        if exceeded := answer.get("problems"):
            why = exceeded[0]["message"]
        raise ResultsUnreadable(f"the results could not be read: {answer.get('unreadable', why)}")

    def cached(self, spec: AnyJobSpec) -> PreflightReport | None:
        """Return the result of a recent check without problems, else None. Does not start a check."""
        return self._answers.cached(self._key(spec))

    def _run_check(self, spec: AnyJobSpec, parent: Parent | None, call: Cancellation) -> PreflightReport:
        limits = self._limits
        question = _Question(
            spec=spec,
            read_policy=self._read_policy(spec.project),
            parent=parent,
            seconds=limits.seconds,
            cpu_seconds=limits.cpu_seconds,
            memory_bytes=limits.memory_bytes,
        )
        try:
            answer = self._request(question.model_dump_json().encode(), call)
        except ConnectionError:
            answer = b""
        except TimeoutError as error:
            raise PreflightFailed(
                f"checking the data and the model took over {self._limits.seconds:g} s; check that the storage "
                "answers, or raise TRAINSHED_PREFLIGHT_SECONDS"
            ) from error
        return _parse(answer)

    def _request(self, question: bytes, call: Cancellation) -> bytes:
        """Return the helper's answer; empty if the check crashed.

        Raises TimeoutError, CallCancelled, and the errors of `_connect`.
        """
        # The helper ends the check at its timeout, and reports the cause.
        deadline = time.monotonic() + self._limits.seconds + _GRACE_SECONDS
        with self._connect() as connection, call.ending(lambda: _disconnect(connection)):
            connection.sendall(question)
            connection.shutdown(socket.SHUT_WR)
            parts = list[bytes]()
            while True:
                connection.settimeout(max(deadline - time.monotonic(), 0.001))
                if not (part := connection.recv(1 << 16)):
                    return b"".join(parts)
                parts.append(part)
                if len(parts) * (1 << 16) > _MOST_BYTES or time.monotonic() > deadline:
                    raise TimeoutError("the helper's answer does not end")

    def _connect(self) -> socket.socket:
        """Connect to the helper, which is started if needed.

        Raises TimeoutError if it is not ready within the timeout, PreflightFailed if it has ended.
        """
        self.start()
        deadline = time.monotonic() + self._limits.seconds
        while not self._is_ready.wait(_POLL_SECONDS):
            if self._helper is not None and (code := self._helper.poll()) is not None:
                raise PreflightFailed(
                    f"the helper that checks data and model exited with {code}; see the service's log"
                )
            if time.monotonic() > deadline:
                raise TimeoutError("the helper does not start")
        connection, theirs = socket.socketpair()
        with theirs, self._lock:
            try:
                if self._requests is None:
                    raise ConnectionResetError("the helper has ended")
                socket.send_fds(self._requests, [b"\0"], [theirs.fileno()])
            except BaseException:
                connection.close()
                raise
        return connection


def _disconnect(connection: socket.socket) -> None:
    """End a request: the helper ends its check, and a thread that waits for the answer gets an empty one."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _parse(answer: bytes) -> PreflightReport:
    if not answer:
        raise PreflightFailed("the helper that checks data and model crashed during the check; see the service's log")
    try:
        return _findings.validate_json(answer)
    except ValidationError as error:
        found = _error_in(answer)
        if away := found.get("unavailable"):
            raise StorageAway(away["root"], None, away["error"]) from error
        reason = found.get("failed", answer[:200].decode(errors="replace"))
        raise PreflightFailed(f"the data and the model could not be checked: {reason}") from error


def _error_in(answer: bytes) -> dict[str, Any]:
    """Return the error that the helper answered; empty for any other answer."""
    try:
        found = json.loads(answer)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
