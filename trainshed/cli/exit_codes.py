"""Exit codes of commands, and their one-line errors."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from typing import NoReturn

import typer

from train_loop.spec import show


class Exit(IntEnum):
    """Exit code of a command."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    ENDED_BADLY = 3
    INTERRUPTED = 130

    @property
    def meaning(self) -> str:
        """The description in `trainshed --help`."""
        return _MEANINGS[self]


_MEANINGS = {
    Exit.DONE: "done",
    Exit.FAILED: "rejected by the service, no response, or the operation failed",
    Exit.USAGE: "usage error or unreadable file",
    Exit.ENDED_BADLY: "the job did not succeed",
    Exit.INTERRUPTED: "interrupted; the job continues",
}
# Separate paragraphs: Typer joins the lines of a paragraph.
EPILOG = "\n\n".join(["Exit codes:", *(f"{code}: {code.meaning}" for code in Exit)])


def fail(message: str, details: Sequence[str] = (), *, code: Exit = Exit.FAILED) -> NoReturn:
    """Exit with an error on stderr: a line with rule, value and remedy, and a line below it for each detail."""
    print(show("\n".join([f"trainshed: {message}", *(f"  {detail}" for detail in details)])), file=sys.stderr)
    raise typer.Exit(code)


@contextmanager
def detach_on_interrupt(*job_ids: str) -> Iterator[None]:
    """Exit on Ctrl-C without affecting the jobs, and print the command that watches them again."""
    try:
        yield
    except KeyboardInterrupt:
        print(f"\nthe job continues; next: trainshed {' '.join(('watch', *job_ids))}", file=sys.stderr)
        raise typer.Exit(Exit.INTERRUPTED) from None
