"""The `console` blocks of a page of documentation, run in one shell as a user types them."""

import os
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

_BLOCK = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_DONE = "=== exit code "


@dataclass(frozen=True)
class Typed:
    """A command and the output that the page shows; `…` matches within a line, and alone any lines."""

    command: str
    answer: str

    def fits(self, output: str) -> bool:
        """Return True if an output matches the page, regardless of alignment spaces."""
        return re.fullmatch(_pattern(_plain(self.answer)), _plain(output), re.DOTALL) is not None


def typed_in(page: Path) -> list[Typed]:
    """Return all commands of a page in their order."""
    return [one for block in _BLOCK.findall(page.read_text()) for one in _commands(block)]


def _commands(block: str) -> Iterator[Typed]:
    for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        # A command continues on the next line after a backslash.
        match = re.match(r"(?:.*\\\n)*.*\n", part)
        assert match is not None, part
        yield Typed(match[0].strip(), part[match.end() :])


def _plain(text: str) -> str:
    return "".join(f"{' '.join(line.split())}\n" for line in text.splitlines() if line.strip())


def _pattern(answer: str) -> str:
    return "".join(
        r"(?:[^\n]*\n)*?" if line == "…" else r"[^\n]*".join(map(re.escape, line.split("…"))) + r"\n"
        for line in answer.splitlines()
    )


class Shell:
    """One bash for all commands, so that variables stay."""

    def __init__(self, environment: Mapping[str, str], *, command: Sequence[str] = ("bash", "--norc")) -> None:
        self._bash = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **environment},
        )

    def __enter__(self) -> "Shell":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bash.kill()
        self._bash.communicate()

    def type(self, command: str) -> tuple[str, int]:
        """Run a command; return its stdout and stderr, and its exit code."""
        assert self._bash.stdin is not None
        assert self._bash.stdout is not None
        self._bash.stdin.write(f"{command} </dev/null\ncode=$?; echo; echo '{_DONE}'$code\n")
        self._bash.stdin.flush()
        lines = list[str]()
        for line in self._bash.stdout:
            if line.startswith(_DONE):
                return "".join(lines), int(line.removeprefix(_DONE))
            lines.append(line)
        raise AssertionError(f"the shell ended:\n{''.join(lines)}")
