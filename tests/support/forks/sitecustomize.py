"""Hands a new worker or driver over to `tests.support.servers.worker_forks`, which forks it with its imports done.

Python imports this module at every start of a process whose PYTHONPATH has this folder. All other processes
continue. In each, packages may be hidden as if they were not installed.
"""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.abc import MetaPathFinder
    from importlib.machinery import ModuleSpec
    from typing import Any

ABSENT_VARIABLE = "TRAINSHED_TEST_ABSENT"
"""Variable with the names of hidden packages, separated by commas."""
FORKS_VARIABLE = "TRAINSHED_TEST_FORKS"
"""Variable with the path of the socket."""
_CONTEXT = "--serialized-runtime-env-context="
_DRIVER = ["-m", "train_loop.ray_train.driver"]


class _Blind:
    """A finder of modules that does not find the hidden packages."""

    def __init__(self, finder: "MetaPathFinder", absent: "frozenset[str]") -> None:
        self.finder, self.absent = finder, absent

    def find_spec(self, name: str, path: "Any" = None, target: "Any" = None) -> "ModuleSpec | None":
        """Return the spec of a module that is not hidden."""
        return None if name.partition(".")[0] in self.absent else self.finder.find_spec(name, path, target)

    def __getattr__(self, name: str) -> "Any":
        return getattr(self.finder, name)


def hide_packages() -> None:
    """Hide the packages that the environment names from later imports of this process."""
    absent = frozenset(filter(None, os.environ.get(ABSENT_VARIABLE, "").split(",")))
    if absent:
        sys.meta_path[:] = [_Blind(finder, absent) for finder in sys.meta_path]  # type: ignore[arg-type]


def _fork_command(command: list[str]) -> list[str] | None:
    """Return the command of a driver or a worker; None for all other commands.

    Ray's setup_worker.py sets the variables of a job, then executes the rest of its own command. For that it imports
    Ray, which takes half a second; this function does the same.
    """
    if command[:2] == _DRIVER:
        return command
    import json  # noqa: PLC0415 - other processes need neither
    import re  # noqa: PLC0415

    if os.path.basename(command[0]) == "setup_worker.py":
        context = json.loads(
            "".join(word.removeprefix(_CONTEXT) for word in command if word.startswith(_CONTEXT)) or "{}"
        )
        variables = context.pop("env_vars", {})
        if context.pop("py_executable", None) != sys.executable or any(context.values()):
            return None
        for name, value in variables.items():
            os.environ[name] = re.sub(r"\$\{[A-Z0-9_]+\}", "", os.path.expandvars(value))
        command = [word for word in command[1:] if not word.startswith((_CONTEXT, "--language="))]
    return command if os.path.basename(command[0]) == "default_worker.py" else None


def _hand_over(path: str, command: list[str]) -> int:
    """Have the process forked, with this one's variables, folder and files; return its exit code."""
    import json  # noqa: PLC0415
    import signal  # noqa: PLC0415
    import socket  # noqa: PLC0415

    numbers = signal.SIGINT, signal.SIGTERM
    asked = {
        "argv": command,
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "ignored": [number for number in numbers if signal.getsignal(number) is signal.SIG_IGN],
        "blocked": list(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    }
    request = json.dumps(asked).encode()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(path)
        socket.send_fds(connection, [len(request).to_bytes(4, "big")], [0, 1, 2])
        connection.sendall(request)
        for number in numbers:
            # The server sends it to the forked process.
            signal.signal(number, lambda number, _: connection.send(bytes([number]), socket.MSG_NOSIGNAL))
        with connection.makefile() as answers:
            # The first line is its id.
            answers.readline()
            return int(answers.readline() or 1)


hide_packages()
if FORKS_VARIABLE in os.environ and (sys.orig_argv[1:3] == _DRIVER or "_worker.py" in "".join(sys.orig_argv[1:2])):
    _command = _fork_command(sys.orig_argv[1:])
    if _command is not None:
        os._exit(_hand_over(os.environ[FORKS_VARIABLE], _command))
