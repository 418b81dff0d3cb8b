"""Hands a new worker process of Ray over to `tests.support.servers.worker_forks`, which forks it with its imports done.

Python imports this module at every start of a process whose PYTHONPATH has this folder. All other processes go on.
"""

import os
import sys

FORKS_VARIABLE = "TRAINSHED_TEST_FORKS"
"""Variable with the path of the socket."""


def _hand_over(path: str, argv: list[str]) -> int:
    """Have the process forked, with this one's arguments, variables, folder and files; return its exit code."""
    import json  # noqa: PLC0415 - other processes need neither
    import socket  # noqa: PLC0415

    request = json.dumps({"argv": argv, "environment": dict(os.environ), "folder": os.getcwd()}).encode()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(path)
        socket.send_fds(connection, [len(request).to_bytes(4, "big")], [0, 1, 2])
        connection.sendall(request)
        return int(connection.recv(4) or b"1")


if FORKS_VARIABLE in os.environ and os.path.basename("".join(sys.orig_argv[1:2])) == "default_worker.py":
    os._exit(_hand_over(os.environ[FORKS_VARIABLE], sys.orig_argv[1:]))
