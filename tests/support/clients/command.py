"""The `trainshed` command, in this process or in a separate one."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from typer.testing import CliRunner, Result

from trainshed.cli.main import app


def run(*arguments: str, stdin: str | None = None) -> Result:
    """Run a command line in this process."""
    return CliRunner().invoke(app, list(arguments), input=stdin)


@contextmanager
def running(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run a command in a process that is stopped at the end of the block."""
    command = [sys.executable, "-m", "trainshed.cli.main", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()
