"""A private folder for a Ray cluster that this user starts.

Ray sets its temporary folder, with logs and sockets, to mode 0777. Another user could replace a socket there, receive
the token and run commands with it. So Ray's folder lies inside a folder of mode 0700, which Ray does not change.
"""

import os
import tempfile

_SOCKET_BYTES = 107
"""Maximum length of a Unix socket's path on Linux."""
_RAYS_BYTES = len("/r/session_2026-01-01_00-00-00_000000_4194304/sockets/dash_TaskEventsHead")
"""Length that Ray adds to the private folder in its longest socket path."""
_PREFIX = "shed-"
_RANDOM_BYTES = 8


def make_private_folder() -> str:
    """Create a folder of mode 0700. Ray's `--temp-dir` is a folder with a one-letter name inside it."""
    return tempfile.mkdtemp(prefix=_PREFIX, dir=parent_folder())


def parent_folder() -> str:
    """Return the default temporary folder, or /tmp if socket paths below it would be too long."""
    folder = tempfile.gettempdir()
    length = len(os.fsencode(folder)) + len(f"/{_PREFIX}") + _RANDOM_BYTES + _RAYS_BYTES
    return folder if length <= _SOCKET_BYTES else "/tmp"
