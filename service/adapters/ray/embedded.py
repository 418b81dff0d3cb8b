"""Embedded Ray: one head, which the service keeps alive, reuses after its own crash, and stops on request."""

import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import structlog

from service.adapters.key_files import ensure_key
from service.adapters.ray.head import FolderOpen, HeadSettings, RayHead, read_head, record_head, start_head
from service.adapters.ray.session import RayAddress, request_version

log = structlog.get_logger(__name__)
_POLL_SECONDS = 0.5
_UP_SECONDS = 90.0
_JOIN_SECONDS = 0.5
_ANSWER_SECONDS = 5.0
_LONGEST_PAUSE_SECONDS = 30.0


class EmbeddedRay:
    """A Ray head that the service owns. It survives a SIGKILL of the service, but not a graceful stop."""

    def __init__(self, home: Path, settings: HeadSettings) -> None:
        self._home, self._settings = home, settings
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._keep_alive, name="embedded-ray", daemon=True)
        self._head: RayHead | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._up: RayAddress | None = None

    @property
    def _token_file(self) -> Path:
        return self._home / "ray.token"

    def address(self) -> RayAddress | None:
        """Return the address of the head; None while it is not up."""
        return self._up

    def start(self) -> None:
        """Start the thread that keeps a head alive. The first head takes seconds to start."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the head and all processes that it started."""
        self._stopped.set()
        if self._thread.is_alive():
            # Wait no longer: the thread may be waiting for a dashboard that does not answer.
            self._thread.join(_JOIN_SECONDS)
        self._up = None
        with self._lock:
            self._head = self._head or read_head(self._home / "ray.json")
            self._end_head()

    def _keep_alive(self) -> None:
        self._head, pause = read_head(self._home / "ray.json"), _POLL_SECONDS
        while not self._stopped.is_set():
            try:
                self._bring_up()
                pause = _POLL_SECONDS
            except Exception:
                log.exception("embedded_ray_did_not_start", log_file=str(self._home / "ray.log"))
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
            self._stopped.wait(pause)

    def _bring_up(self) -> None:
        """Ensure that a private head is up; if not, start one. Raises RuntimeError if that fails."""
        if self._up is not None and self._alive() and self._is_private():
            return
        self._up = None
        if not (self._alive() and self._is_private() and self._comes_up()):
            self._replace_head()
        if self._comes_up() and self._is_private():
            assert self._head is not None
            record_head(self._home, self._head)
            self._up = self._address()
            log.info("embedded_ray_up", dashboard=self._head.dashboard_url, pid=self._head.pid)
        elif not self._stopped.is_set():
            with self._lock:
                self._end_head()
            raise RuntimeError(f"Ray ended, or its dashboard did not answer within {_UP_SECONDS:g} s")

    def _replace_head(self) -> None:
        with self._lock:
            # Do not start a head after `stop`: it would keep running.
            if not self._stopped.is_set():
                self._end_head()
                # Each head has its own token: one that leaked is useless for the next head.
                self._token_file.unlink(missing_ok=True)
                ensure_key(self._token_file)
                self._head, self._child = start_head(self._home, self._settings)

    def _comes_up(self) -> bool:
        return _wait(self._answers, lambda: self._head is None or self._stopped.is_set() or not self._alive())

    def _answers(self) -> bool:
        """Return whether the dashboard has announced its port and accepts the token there."""
        address = self._address()
        if address is None:
            return False
        try:
            return request_version(address, _ANSWER_SECONDS).ok
        except OSError:
            return False

    def _address(self) -> RayAddress | None:
        """Return the head's address, which only the head's dashboard may answer; None if it is not known yet."""
        if self._head is None:
            return None
        if self._head.dashboard_url is None:
            self._head = self._head.model_copy(update={"dashboard_url": self._head.find_dashboard()})
        url = self._head.dashboard_url
        return None if url is None else RayAddress(url, ensure_key(self._token_file), self._head.dashboard)

    def _is_private(self) -> bool:
        """Return whether the head's folder is closed to other users. If not, log the reason."""
        try:
            if self._head is not None:
                self._head.check_folder()
        except FolderOpen as error:
            log.error("embedded_ray_folder_open", error=str(error))
            return False
        return self._head is not None

    def _alive(self) -> bool:
        if self._child is not None and self._child.poll() is not None:
            return False
        return self._head is not None and self._head.alive()

    def _end_head(self) -> None:
        if self._head is not None:
            self._head.stop()
        if self._child is not None:
            self._child.wait()
        (self._home / "ray.json").unlink(missing_ok=True)
        self._head = self._child = None


def _wait(reached: Callable[[], bool], hopeless: Callable[[], bool]) -> bool:
    """Poll until `reached` returns true. Return False after the timeout, or once `hopeless` returns true."""
    end = time.monotonic() + _UP_SECONDS
    while time.monotonic() < end and not hopeless():
        if reached():
            return True
        time.sleep(_POLL_SECONDS)
    return False
