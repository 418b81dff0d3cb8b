"""A private folder for a Ray that this user starts.

Ray opens its own folder, with logs and sockets, to all users (mode 0777). Whoever puts a socket of his own there gets
the token, and can run commands with it. So Ray's folder lies inside one of mode 0700, which Ray never touches.
"""

import os
import tempfile

_SOCKET_BYTES = 107
"""The longest path of a Unix socket on Linux."""
_RAYS_BYTES = len("/r/session_2026-01-01_00-00-00_000000_4194304/sockets/dash_TaskEventsHead")
"""What Ray adds to the private folder in the longest path of its sockets."""
_PREFIX = "shed-"
_RANDOM_BYTES = 8


def make_private_folder() -> str:
    """Create a folder of mode 0700; Ray's own folder goes inside it, with a name of one letter."""
    return tempfile.mkdtemp(prefix=_PREFIX, dir=parent_folder())


def parent_folder() -> str:
    """Return the folder for temporary files, or /tmp if its path is too long for the names of Ray's sockets."""
    folder = tempfile.gettempdir()
    length = len(os.fsencode(folder)) + len(f"/{_PREFIX}") + _RANDOM_BYTES + _RAYS_BYTES
    return folder if length <= _SOCKET_BYTES else "/tmp"
