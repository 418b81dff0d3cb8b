"""The results of an inference job: Parquet files of a fixed number of rows each, committed one by one.

Shard k holds rows k * R to (k + 1) * R - 1, at any number of workers, and its name contains k. A file under such a name
is complete. A superseded worker group can therefore only write the same rows under the same name again.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from train_loop.run_dir.files.durable import write_durably
from train_loop.run_dir.remote import list_folder

_SHARD = re.compile(r"part-(\d{6,})\.parquet")


@dataclass(frozen=True)
class ResultsDir:
    """The results/ folder of a run directory."""

    root: Path

    def shard(self, number: int) -> Path:
        """Return the file of a shard, by its number from 0."""
        return self.root / f"part-{number:06d}.parquet"

    def shards(self) -> list[int]:
        """Return the numbers of the committed shards, ascending."""
        return sorted(
            int(match[1]) for match in map(_SHARD.fullmatch, list_folder(self.root, below=self.root.parent)) if match
        )

    @property
    def complete(self) -> int:
        """Return the number of shards from the first one on that are committed without a gap."""
        numbers = self.shards()
        return next((place for place, number in enumerate(numbers) if place != number), len(numbers))

    def commit(self, number: int, content: bytes) -> None:
        """Write a shard durably and as a whole; a repeated call writes the same rows again."""
        write_durably(self.shard(number), content, below=self.root.parent)
