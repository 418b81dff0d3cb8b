"""The sizes of searches that try one seed after the other, and the cases that a commit draws.

`python -m tests.support.builders.searches A+B C+D+E` prints all but one of each group: what the commit leaves out.
"""

import os
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


def seeds(number: int, *, more: int | None = None) -> int:
    """Return the number of seeds that a search tries.

    A tenth of `number` if QUICK is set, as in `make test-fast`; `more` if MORE is set, for a long search.
    """
    if os.environ.get("QUICK"):
        return number // 10
    return more if more is not None and os.environ.get("MORE") else number


def commit() -> str:
    """Return the commit that is checked out; an empty text outside of a repository."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


SEED = os.environ.get("MODELS_SEED") or commit()
"""Seed of the cases that a run draws: each commit computes others."""


def drawn(cases: Sequence[T], number: int) -> list[T]:
    """Return some of the cases, in their order: others for each commit, and all with MORE."""
    if os.environ.get("MORE"):
        return list(cases)
    places = random.Random(SEED).sample(range(len(cases)), number)
    return [cases[place] for place in sorted(places)]


if __name__ == "__main__":
    random_of_commit = random.Random(SEED)
    for group in [argument.split("+") for argument in sys.argv[1:]]:
        group.remove(random_of_commit.choice(group))
        print(*group)  # noqa: T201
