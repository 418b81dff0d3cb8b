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
"""Pattern of the folders of unfinished saves; older versions wrote no epoch."""
_REJECTED = r"step-\d+\.rejected-.*"
_RETIRED = r"step-\d+\.retired(-(?P<attempt>\d+)\.(?P<epoch>\d+))?"
"""Pattern of the folders of checkpoints that a group is removing; older versions wrote no token."""


@dataclass(frozen=True)
class FolderStore:
    """The checkpoints of a run on a file system with atomic renames of folders.

    Groups share only the names of committed checkpoints. A group takes over any other folder by renaming it to its own
    name. If several groups try, only one succeeds.
    """

    run_dir: RunDir
    token: Fence

    def workplace(self, step: int) -> Path:
        """Create and return the folder step-N.tmp-<attempt>.<epoch>."""
        folder = self._in_progress(step)
        make_folder(folder)
        return folder

    def metadata_name(self) -> str:
        """Return the name that DCP expects: only this group writes to the folder."""
        return METADATA

    def commit(self, draft: Manifest) -> Manifest:
        """Write the manifest, then rename the folder to its final name. Raises FencedError.

        A newer group raises the fence, then renames the folders of older groups, then selects its checkpoint. A group
        that is paused between its check and the rename therefore finds no folder to rename.
        """
        manifest = draft.sealed()
        folder, final = self._in_progress(manifest.step), self.run_dir.checkpoint(manifest.step)
        if self.run_dir.manifests().get(manifest.step) != manifest:
            replace_durably(folder / NAME, manifest.model_dump_json(indent=2), below=self.run_dir.root)
            check_fence(self.run_dir, self.token)
            # If this process was presumed dead, its successors may be writing the same step to the same folder.
            if not has_its_files(folder, manifest):
                raise FileNotFoundError(errno.ENOENT, "files of the checkpoint have been removed", str(folder))
            # The rename fails if another group has committed this step meanwhile.
            folder.rename(final)
        sync(final.parent)
        return manifest

    def discard(self, step: int) -> None:
        """Remove the files of a failed save: they may have filled the disk."""
        shutil.rmtree(self._in_progress(step), ignore_errors=True)

    def clear(self) -> list[int]:
        """Remove unfinished saves of older groups and of this group's dead processes. Return the damaged steps.

        Each folder is first taken over by one rename.
        """
        check_fence(self.run_dir, self.token)
        for folder, found in self._folders(_IN_PROGRESS):
            if _token(found) <= self.token:
                gone = folder if found["gone"] else folder.with_name(f"{folder.name}.{uuid.uuid4().hex}")
                # Its group may have committed it meanwhile, or another group may have taken it over.
                with suppress(FileNotFoundError):
                    folder.rename(gone)
                shutil.rmtree(gone, ignore_errors=True)
        self._finish_removals()
        return sorted(set(self.run_dir.checkpoint_folders()) - self.run_dir.manifests().keys())

    def put_aside(self, step: int) -> None:
        """Rename the folder of a rejected checkpoint. Raises FencedError."""
        check_fence(self.run_dir, self.token)
        folder = self.run_dir.checkpoint(step)
        aside = folder.with_name(f"{folder.name}.rejected-{self.token}")
        if aside.exists():
            # The same step may be rejected again by a later start of the same group.
            aside = aside.with_name(f"{aside.name}.{uuid.uuid4().hex}")
        # A retry after a lost response finds nothing to rename.
        with suppress(FileNotFoundError):
            folder.rename(aside)
        self._give_back(aside)
        sync(folder.parent)

    def retire(self, step: int) -> None:
        """Remove a checkpoint: rename its folder, delete the manifest, then the other files.

        If a client has pinned the checkpoint and afterwards still sees its manifest, the checkpoint is kept.
        """
        check_fence(self.run_dir, self.token)
        folder = self.run_dir.checkpoint(step)
        retired = self._retired(step)
        folder.rename(retired)
        sync(folder.parent)
        self._remove_unless_pinned(retired)

    def sweep(self) -> None:
        """Finish removals. Remove rejected checkpoints, except pinned ones and the newest step's last rejection."""
        check_fence(self.run_dir, self.token)
        self._finish_removals()
        pins = self.run_dir.pins()
        rejected = [(step_of(folder), folder.stat().st_ctime, folder) for folder, _ in self._folders(_REJECTED)]
        for step, _, folder in sorted(rejected)[:-1]:
            if step not in pins:
                shutil.rmtree(folder, ignore_errors=True)

    def _finish_removals(self) -> None:
        """Finish the removals of this group and of older groups. If two groups try, one succeeds."""
        for folder, found in self._folders(_RETIRED):
            mine = self._retired(step_of(folder))
            if _token(found) <= self.token:
                with suppress(FileNotFoundError):
                    if folder != mine:
                        folder.rename(mine)
                    self._remove_unless_pinned(mine)

    def _folders(self, pattern: str) -> list[tuple[Path, re.Match[str]]]:
        """Return the folders whose whole names match a pattern, with the matches."""
        names = list_folder(self.run_dir.checkpoints, below=self.run_dir.root)
        matches = ((name, re.fullmatch(pattern, name)) for name in names)
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
