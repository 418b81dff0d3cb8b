"""Checkpoints on file systems: a rename is the commit. Torch-free."""

import errno
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path

from train_loop.checkpoint.ledger import check_fence, step_of
from train_loop.checkpoint.manifest import NAME, has_its_files
from train_loop.run_dir import Manifest, RunDir, make_folder, replace_durably, sync

_RETIRED = ".retired"
"""How the name of a checkpoint ends while it is being removed."""


@dataclass(frozen=True)
class FolderLedger:
    """`checkpoints/` where folders can be renamed at one stroke."""

    run_dir: RunDir
    attempt: int

    def workplace(self, step: int) -> Path:
        """step-N.tmp-<attempt>."""
        folder = self.run_dir.checkpoint_in_progress(step, self.attempt)
        make_folder(folder)
        return folder

    def commit(self, draft: Manifest) -> Manifest:
        """The manifest, then the folder's final name. Raises FencedError.

        A newer attempt writes its fence, then takes away the folders of older ones, then looks which checkpoints there
        are. So an attempt that is held up between its look at the fence and the rename finds nothing to rename.
        """
        manifest = draft.sealed()
        folder, final = self._in_progress(manifest.step), self.run_dir.checkpoint(manifest.step)
        if self.run_dir.manifests().get(manifest.step) != manifest:
            replace_durably(folder / NAME, manifest.model_dump_json(indent=2))
            check_fence(self.run_dir, self.attempt)
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
        """Take away what older attempts and dead processes of this one are saving, at one stroke each."""
        for folder in self.run_dir.checkpoints.glob("step-*.tmp-*"):
            owner = folder.name.split(".")[1].removeprefix("tmp-")
            if int(owner) <= self.attempt:
                gone = folder.with_name(f"{folder.name}.{uuid.uuid4().hex}")
                folder.rename(gone)
                shutil.rmtree(gone, ignore_errors=True)
        for folder in self.run_dir.checkpoints.glob(f"step-*{_RETIRED}"):
            self._remove_unless_pinned(folder)
        known = self.run_dir.manifests()
        return sorted({step_of(path) for path in self.run_dir.checkpoints.glob("step-????????")} - known.keys())

    def put_aside(self, step: int) -> None:
        """Rename it, for whoever wants to know why; only the newest of them is kept."""
        for older in self.run_dir.checkpoints.glob("step-*.rejected-*"):
            shutil.rmtree(older, ignore_errors=True)
        folder = self.run_dir.checkpoint(step)
        folder.rename(folder.with_name(f"{folder.name}.rejected-{self.attempt}"))
        sync(folder.parent)

    def retire(self, step: int) -> None:
        """Out of the ledger at one stroke, then the manifest, then the rest.

        Whoever pinned it and has seen its manifest after that keeps it.
        """
        folder = self.run_dir.checkpoint(step)
        retired = folder.with_name(folder.name + _RETIRED)
        folder.rename(retired)
        sync(folder.parent)
        self._remove_unless_pinned(retired)

    def _remove_unless_pinned(self, retired: Path) -> None:
        manifest = retired / NAME
        if step_of(retired) in self.run_dir.pins() and manifest.exists():
            retired.rename(retired.with_suffix(""))
            sync(retired.parent)
            return
        manifest.unlink(missing_ok=True)
        sync(retired)
        shutil.rmtree(retired, ignore_errors=True)

    def _in_progress(self, step: int) -> Path:
        return self.run_dir.checkpoint_in_progress(step, self.attempt)
