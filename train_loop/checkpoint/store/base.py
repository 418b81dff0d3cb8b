"""Interface to commit and remove checkpoints on a kind of storage; `clear` repairs the state after a crash."""

from pathlib import Path
from typing import Protocol

from train_loop.run_dir import Manifest

METADATA = ".metadata"
"""Name of DCP's description of a checkpoint's files; on object storage, the suffix of its name."""


class CheckpointStore(Protocol):
    """The checkpoints of a run, as one worker group changes them.

    Every call may raise OSError, and can be repeated. After a newer group has taken over, a call raises FencedError, or
    changes only files that no newer group uses.
    """

    def workplace(self, step: int) -> Path:
        """Return the folder for the files of a save; the folder exists."""

    def metadata_name(self) -> str:
        """Return the name for DCP's metadata of one save. Two groups never write an object of the same name."""

    def commit(self, draft: Manifest) -> Manifest:
        """Make the durable files in the workplace a checkpoint. Raises FencedError if a newer group has taken over."""

    def discard(self, step: int) -> None:
        """Remove the files of a failed save."""

    def clear(self) -> list[int]:
        """Clean up unfinished saves and removals of dead processes. Return the steps whose checkpoints are damaged.

        Call it after the fence was raised and before checkpoints are selected: an older group that is still alive then
        cannot commit its unfinished save.
        """

    def put_aside(self, step: int) -> None:
        """Quarantine a rejected checkpoint: it is no longer a checkpoint, but none of its files is removed."""

    def retire(self, step: int) -> None:
        """Remove a checkpoint unless it is pinned. Raises FencedError if a newer group has taken over."""

    def sweep(self) -> None:
        """Finish removals, and remove quarantined checkpoints except the newest and the pinned ones.

        Raises FencedError.
        """


def step_of(folder: Path) -> int:
    """Return the step in a checkpoint's name."""
    return int(folder.name.removeprefix("step-").partition(".")[0])
