"""How checkpoints come to exist, and go, on a kind of storage; what a crash leaves `clear` puts right."""

from pathlib import Path
from typing import Protocol

from train_loop.run_dir import Manifest

METADATA = ".metadata"
"""DCP's own description of what lies where; on object storage the end of its name."""


class Ledger(Protocol):
    """The checkpoints of a run, as one worker group changes them.

    Every call may raise OSError, and can be repeated. After a newer group has taken over, a call raises FencedError, or
    changes only what no newer group uses.
    """

    def workplace(self, step: int) -> Path:
        """The folder that the files of a save are written to; it is there."""

    def metadata_name(self) -> str:
        """Return the name for DCP's metadata of one save. Two groups never write an object of the same name."""

    def commit(self, draft: Manifest) -> Manifest:
        """Make what lies in the workplace, durable, a checkpoint. Raises FencedError where it is not ours to do."""

    def discard(self, step: int) -> None:
        """Remove what a save that failed has left."""

    def clear(self) -> list[int]:
        """Remove what dead processes have left half saved or half removed; steps whose checkpoints are damaged.

        Call it after the fence was raised and before checkpoints are selected: then an older group that is still alive
        cannot commit what it has begun to save.
        """

    def put_aside(self, step: int) -> None:
        """Take a checkpoint that was rejected out of the ledger; nothing of it is removed."""

    def retire(self, step: int) -> None:
        """Remove a checkpoint, unless somebody has pinned it. Raises FencedError where it is not ours to do."""

    def sweep(self) -> None:
        """Finish what was begun to be removed, and remove what was put aside, but the newest and what is pinned.

        Raises FencedError.
        """


def step_of(folder: Path) -> int:
    """The step in a checkpoint's name."""
    return int(folder.name.removeprefix("step-").partition(".")[0])
