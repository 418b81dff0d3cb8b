"""The fence of a run directory: the token of the newest worker group, stored so that no writer can lower it.

`control/fence/` holds one immutable entry per token. The fence is the highest of them and of `control/fence.json`. A
writer that was paused for any time can only add an entry, so the fence never goes down.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from pydantic import TypeAdapter

from train_loop.run_dir.files.durable import create_new, remove_below, write_durably
from train_loop.run_dir.formats import NO_FENCE, Fence
from train_loop.run_dir.remote import list_folder, read_whole

_FENCE = TypeAdapter(Fence)
_ENTRY = re.compile(r"(\d{8,})\.(\d{8,})")
_KEPT = 16
"""Number of newest entries to keep. Pruning an older entry cannot lower the fence."""


class FenceStore:
    """The fence in a `control` folder."""

    def __init__(self, control: Path) -> None:
        self._run_dir = control.parent
        self._entries = control / "fence"
        self._file = control / "fence.json"

    def read(self) -> Fence:
        """Return the newest token. Raises ValueError if fence.json is damaged, and any storage error."""
        return max(self._newest_entry(), self._written())

    def raise_to(self, fence: Fence, *, by: str) -> bool:
        """Raise the fence to a token, durably; return whether the token now belongs to `by`.

        Returns False if the token is not newer than the fence, or if another writer created it first. The same `by` may
        repeat the call: after a lost response it finds its own entry.
        """
        known = self._known()
        if fence <= known:
            return fence == known and self.owner(fence) == by
        if not self._create(fence, by):
            return False
        # An entry that was pruned in the meantime can be created again: only the newest token counts.
        if self._known() > fence:
            return False
        self._prune()
        self._mirror(fence)
        return True

    def owner(self, fence: Fence) -> str | None:
        """Return the writer that raised the fence to a token; None if its entry is missing or was pruned."""
        try:
            return read_whole(self._entry(fence), below=self._run_dir).decode(errors="replace")
        except (FileNotFoundError, NotADirectoryError):
            return None

    def _known(self) -> Fence:
        """Return the newest token, ignoring a damaged fence.json."""
        try:
            return self.read()
        except ValueError:
            return self._newest_entry()

    def _newest_entry(self) -> Fence:
        return max(self._listed(), default=NO_FENCE)

    def _listed(self) -> Iterator[Fence]:
        try:
            names = list_folder(self._entries, below=self._run_dir)
        except NotADirectoryError:
            return
        for match in filter(None, map(_ENTRY.fullmatch, names)):
            yield Fence(int(match[1]), int(match[2]))

    def _written(self) -> Fence:
        try:
            return _FENCE.validate_json(read_whole(self._file, below=self._run_dir))
        except (FileNotFoundError, NotADirectoryError):
            return NO_FENCE

    def _entry(self, fence: Fence) -> Path:
        return self._entries / f"{fence.attempt:08d}.{fence.epoch:08d}"

    def _create(self, fence: Fence, by: str) -> bool:
        """Create the entry of a token. Creation is exclusive: only one of two writers succeeds."""
        try:
            # A crash before the write leaves an entry without an owner; the next group then takes the next epoch.
            create_new(self._entry(fence), by.encode(), below=self._run_dir)
        except FileExistsError:
            return self.owner(fence) == by
        return True

    def _prune(self) -> None:
        for fence in sorted(self._listed())[:-_KEPT]:
            remove_below(self._entry(fence), below=self._run_dir)

    def _mirror(self, fence: Fence) -> None:
        """Write fence.json for readers. A late writer may lower this file, but not the fence."""
        text = _FENCE.dump_json(fence).decode()
        try:
            current = self._written()
        except ValueError:
            current = NO_FENCE
        if current < fence:
            write_durably(self._file, text, below=self._run_dir)
