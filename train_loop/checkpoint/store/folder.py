"""Checkpoints on file systems: a rename is the commit. Torch-free."""

import errno
import re
import shutil
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from train_loop.checkpoint.manifest import NAME, has_its_files
from train_loop.checkpoint.store.base import METADATA, step_of
from train_loop.liveness.fencing import check_fence
from train_loop.run_dir import Fence, Manifest, RunDir, list_folder, make_folder, replace_durably, sync

_IN_PROGRESS = r"step-\d+\.tmp-(?P<attempt>\d+)(\.(?P<epoch>\d{1,9}))?(?P<gone>\..*)?"
"""Older versions wrote no epoch."""
_REJECTED = r"step-\d+\.rejected-.*"
_RETIRED = r"step-\d+\.retired(-(?P<attempt>\d+)\.(?P<epoch>\d+))?"
"""A checkpoint that a group is removing; older versions wrote no token."""


@dataclass(frozen=True)
class FolderLedger:
    """`checkpoints/` where folders can be renamed at one stroke.

    Groups share no name but that of a committed checkpoint. Each takes a folder over by renaming it to a name of its
    own, which only one of several can do.
    """

    run_dir: RunDir
    token: Fence

    def workplace(self, step: int) -> Path:
        """step-N.tmp-<attempt>.<epoch>."""
        folder = self._in_progress(step)
        make_folder(folder)
        return folder

    def metadata_name(self) -> str:
        """The name that DCP expects: the folder belongs to this group alone."""
        return METADATA

    def commit(self, draft: Manifest) -> Manifest:
        """Write the manifest, then rename the folder to its final name. Raises FencedError.

        A newer group raises the fence, then renames the folders of older ones, then selects its checkpoint. So a group
        that is paused between its check and the rename finds nothing to rename.
        """
        manifest = draft.sealed()
        folder, final = self._in_progress(manifest.step), self.run_dir.checkpoint(manifest.step)
        if self.run_dir.manifests().get(manifest.step) != manifest:
            replace_durably(folder / NAME, manifest.model_dump_json(indent=2))
            check_fence(self.run_dir, self.token)
            # Where this process was thought dead, those who took over may be writing the same step in the same place.
            if not has_its_files(folder, manifest):
                raise FileNotFoundError(errno.ENOENT, "files of the checkpoint have been removed", str(folder))
            # It fails where the name is taken, by whoever has trained this step meanwhile.
            folder.rename(final)
        sync(final.parent)
        return manifest

    def discard(self, step: int) -> None:
        """What is left of it may be what fills the disk."""
        shutil.rmtree(self._in_progress(step), ignore_errors=True)

    def clear(self) -> list[int]:
        """Take away what older groups and dead processes of this one are saving, at one stroke each."""
        check_fence(self.run_dir, self.token)
        for folder, found in self._folders(_IN_PROGRESS):
            if _token(found) <= self.token:
                gone = folder if found["gone"] else folder.with_name(f"{folder.name}.{uuid.uuid4().hex}")
                # Its group may have committed it meanwhile, or another one may have taken it away.
                with suppress(FileNotFoundError):
                    folder.rename(gone)
                shutil.rmtree(gone, ignore_errors=True)
        self._finish_removals()
        return sorted(set(self.run_dir.checkpoint_folders()) - self.run_dir.manifests().keys())

    def put_aside(self, step: int) -> None:
        """Rename it. Raises FencedError."""
        check_fence(self.run_dir, self.token)
        folder = self.run_dir.checkpoint(step)
        aside = folder.with_name(f"{folder.name}.rejected-{self.token}")
        if aside.exists():
            # The same step may be rejected again by a later start of the same group.
            aside = aside.with_name(f"{aside.name}.{uuid.uuid4().hex}")
        # Repeated after its answer was lost, it finds nothing to rename.
        with suppress(FileNotFoundError):
            folder.rename(aside)
        self._give_back(aside)
        sync(folder.parent)

    def retire(self, step: int) -> None:
        """Out of the ledger at one stroke, then the manifest, then the rest.

        Whoever pinned it and has seen its manifest after that keeps it.
        """
        check_fence(self.run_dir, self.token)
        folder = self.run_dir.checkpoint(step)
        retired = self._retired(step)
        folder.rename(retired)
        sync(folder.parent)
        self._remove_unless_pinned(retired)

    def sweep(self) -> None:
        """Of what was rejected, the one of the newest step that was rejected last stays."""
        check_fence(self.run_dir, self.token)
        self._finish_removals()
        pins = self.run_dir.pins()
        rejected = [(step_of(folder), folder.stat().st_ctime, folder) for folder, _ in self._folders(_REJECTED)]
        for step, _, folder in sorted(rejected)[:-1]:
            if step not in pins:
                shutil.rmtree(folder, ignore_errors=True)

    def _finish_removals(self) -> None:
        """Take over what this group or older ones were removing. Of two groups that try it, one succeeds."""
        for folder, found in self._folders(_RETIRED):
            mine = self._retired(step_of(folder))
            if _token(found) <= self.token:
                with suppress(FileNotFoundError):
                    if folder != mine:
                        folder.rename(mine)
                    self._remove_unless_pinned(mine)

    def _folders(self, pattern: str) -> list[tuple[Path, re.Match[str]]]:
        """The folders whose whole names match, and how."""
        matches = ((name, re.fullmatch(pattern, name)) for name in list_folder(self.run_dir.checkpoints))
        return [(self.run_dir.checkpoints / name, match) for name, match in matches if match]

    def _remove_unless_pinned(self, retired: Path) -> None:
        manifest, final = retired / NAME, self.run_dir.checkpoint(step_of(retired))
        if self._give_back(retired):
            return
        # The step may have been trained and saved again.
        if step_of(retired) in self.run_dir.pins() and manifest.exists() and not final.exists():
            retired.rename(final)
            sync(retired.parent)
            return
        manifest.unlink(missing_ok=True)
        sync(retired)
        shutil.rmtree(retired, ignore_errors=True)

    def _give_back(self, taken: Path) -> bool:
        """Undo a rename that came so late that it took the checkpoint of a newer group; return whether it did."""
        manifest = self.run_dir.manifest_in(taken)
        if manifest is None or manifest.token <= self.token or self.run_dir.fence() <= self.token:
            return False
        taken.rename(self.run_dir.checkpoint(manifest.step))
        sync(taken.parent)
        return True

    def _in_progress(self, step: int) -> Path:
        return self.run_dir.checkpoint_in_progress(step, self.token)

    def _retired(self, step: int) -> Path:
        folder = self.run_dir.checkpoint(step)
        return folder.with_name(f"{folder.name}.retired-{self.token}")


def _token(found: re.Match[str]) -> Fence:
    """The token in a folder's name; older versions wrote none, or no epoch."""
    return Fence(int(found["attempt"] or 0), int(found["epoch"] or 0))
