"""How a command ends: its exit code, and one readable line where it fails."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from typing import NoReturn

import typer

from train_loop.spec import show


class Exit(IntEnum):
    """What the exit code says."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    ENDED_BADLY = 3
    INTERRUPTED = 130

    @property
    def meaning(self) -> str:
        """A sentence for `trainshed --help`."""
        return _MEANINGS[self]


_MEANINGS = {
    Exit.DONE: "done",
    Exit.FAILED: "the service refused it or does not answer, or what was asked for failed",
    Exit.USAGE: "the command line makes no sense, or names a file that cannot be read",
    Exit.ENDED_BADLY: "the job that was waited for ended otherwise than hoped for",
    Exit.INTERRUPTED: "interrupted; the job goes on",
}
# Paragraphs: what stands in the lines of one is joined.
EPILOG = "\n\n".join(["Exit codes:", *(f"{code}: {code.meaning}" for code in Exit)])


def fail(message: str, details: Sequence[str] = (), *, code: Exit = Exit.FAILED) -> NoReturn:
    """End the command with a line on stderr that tells rule, value and remedy, and others below it."""
    print(show("\n".join([f"trainshed: {message}", *(f"  {detail}" for detail in details)])), file=sys.stderr)
    raise typer.Exit(code)


@contextmanager
def leaving_alone(*job_ids: str) -> Iterator[None]:
    """Ctrl-C ends the look at jobs, and says how to look again; the jobs know nothing of it."""
    try:
        yield
    except KeyboardInterrupt:
        print(f"\nleft as it is; next: trainshed {' '.join(('watch', *job_ids))}", file=sys.stderr)
        raise typer.Exit(Exit.INTERRUPTED) from None
