"""The `trainshed` command, in this process or in one of its own."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from typer.testing import CliRunner, Result

from trainshed.cli.main import app


def run(*arguments: str, stdin: str | None = None) -> Result:
    """A command line in this process."""
    return CliRunner().invoke(app, list(arguments), input=stdin)


@contextmanager
def running(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A command that goes on, which ends here at the latest."""
    command = [sys.executable, "-m", "trainshed.cli.main", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()
