"""Globs of data files: matched step by step, and local folders searched once, whatever the pattern.

The search takes time in proportion to the folders that can match. A pattern of many `**/` would take exponential time
with the globs of pathlib, and one of many `*` with the regular expressions of fsspec.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

from train_loop.errors import DataError
from train_loop.run_dir import ReadPolicy, is_below
from train_loop.system.input_files import current_policy, stdlib_root

_MOST_STEPS = 64
"""Maximum number of steps of a pattern: a state of the search for each."""
_MOST_ENTRIES = 1_000_000
"""Maximum number of names in the folders of a search."""
_ANY = "**"
"""Step that matches any number of folders; at the end, all files below."""
States = frozenset[int]
"""Numbers of the steps that the next name of a path may match; the number of steps if the path is complete."""


@dataclass(frozen=True)
class Pattern:
    """The steps of a glob below its fixed folder."""

    steps: tuple[str, ...]

    @classmethod
    def parse(cls, below: str) -> "Pattern":
        """Return the pattern of the steps of a glob. Raises DataError for an invalid one."""
        steps = list[str]()
        for step in below.split("/"):
            if _ANY in step and step != _ANY:
                raise DataError(f"invalid pattern {below}: ** is only allowed as a whole step, such as **/*.jsonl")
            if step and (step != _ANY or steps[-1:] != [_ANY]):
                steps.append(step)
        if len(steps) > _MOST_STEPS:
            raise DataError(f"invalid pattern {below:.60}…: it has {len(steps)} steps; expected at most {_MOST_STEPS}")
        return cls(tuple(steps))

    @property
    def depth(self) -> int | None:
        """Number of steps below the fixed folder at which files may match; None if unlimited."""
        return None if _ANY in self.steps else len(self.steps)

    @property
    def shows_hidden(self) -> bool:
        """True if a step asks for hidden names."""
        return any(step.startswith(".") for step in self.steps)

    @property
    def start(self) -> States:
        """The states before the first name."""
        return self._reached({0})

    def advance(self, states: States, name: str) -> States:
        """Return the states after another name of a path; empty if no path with these names matches."""
        found = set[int]()
        for state in states:
            step = self.steps[state] if state < len(self.steps) else None
            if step == _ANY:
                found.add(state)
            elif step is not None and fnmatchcase(name, step):
                found.add(state + 1)
        return self._reached(found)

    def is_complete(self, states: States) -> bool:
        """Return whether the names so far are a whole match."""
        return len(self.steps) in states

    def goes_on(self, states: States) -> bool:
        """Return whether more names can follow."""
        return any(state < len(self.steps) for state in states)

    def matches(self, names: list[str]) -> bool:
        """Return whether the names of a path below the fixed folder match."""
        states = self.start
        for name in names:
            states = self.advance(states, name)
        return self.is_complete(states)

    def _reached(self, states: set[int]) -> States:
        for state in sorted(states):
            while state < len(self.steps) and self.steps[state] == _ANY:
                state += 1
                states.add(state)
        return frozenset(states)


ALL_BELOW = Pattern((_ANY,))
"""All files below a folder."""


def search(folder: str, pattern: Pattern) -> Iterator[str]:
    """Yield the files below a local folder that match. Other projects' files are left out, as if they did not exist.

    Raises DataError for a folder that cannot be listed, and for links that are broken, lead to a folder below `**`, or
    lead out of the project's storage roots; the last error does not depend on whether its target exists.
    """
    policy, seen = current_policy(), 0
    folders = [(folder, os.path.realpath(folder), pattern.start)]
    while folders:
        place, real, states = folders.pop()
        for entry in _entries(place):
            seen += 1
            if seen > _MOST_ENTRIES:
                raise DataError(f"{folder} holds over {_MOST_ENTRIES:,} names to search; name narrower folders")
            after = pattern.advance(states, entry.name)
            if not after or (entry.name.startswith(".") and not pattern.shows_hidden):
                continue
            target = _target(entry, f"{real}/{entry.name}", policy)
            if target is None:
                continue
            if not entry.is_dir():
                if pattern.is_complete(after):
                    yield entry.path
            elif pattern.goes_on(after):
                if entry.is_symlink() and pattern.depth is None:
                    raise DataError(
                        f"{entry.path} is a link to a folder, which is not followed; name its target as a separate "
                        "source, or remove the link"
                    )
                folders.append((entry.path, target, after))


def _entries(folder: str) -> "list[os.DirEntry[str]]":
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except NotADirectoryError:
        return []
    except OSError as error:
        raise DataError(f"{folder} cannot be listed: {error.strerror}; give service and workers read access") from error


def _target(entry: "os.DirEntry[str]", place: str, policy: ReadPolicy | None) -> str | None:
    """Return the real path of an entry; None if it is left out. Raises DataError for a link that must not be read."""
    if not entry.is_symlink():
        hidden = policy is not None and entry.is_dir() and policy.hides(place)
        return None if hidden else place
    target, stdlib = os.path.realpath(entry.path), str(stdlib_root())
    if is_below(place, stdlib):
        # Distributions link to /etc from here, and leave links whose targets they have not installed.
        return target if is_below(target, stdlib) and os.path.exists(target) else None
    if policy is not None and policy.refusal(target, named=entry.path) is not None:
        raise DataError(
            f"{entry.path} is a link to a place that jobs of project {policy.project!r} may not read; remove the link, "
            "or name other files"
        )
    if not os.path.exists(target):
        raise DataError(f"{entry.path} is a broken link; restore its target, or remove the link")
    return target
