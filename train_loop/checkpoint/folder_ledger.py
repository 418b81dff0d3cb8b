"""Checkpoints on file systems: a rename is the commit. Torch-free."""

import errno
import re
import shutil
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from train_loop.checkpoint.ledger import check_fence, step_of
from train_loop.checkpoint.manifest import NAME, has_its_files
from train_loop.run_dir import Manifest, RunDir, list_folder, make_folder, replace_durably, sync

_IN_PROGRESS = r"step-\d+\.tmp-(?P<attempt>\d+)(?P<gone>\..*)?"
_REJECTED = r"step-\d+\.rejected-.*"
_RETIRED = r"step-\d+\.retired"
"""One that is being removed."""


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
        for folder, found in self._folders(_IN_PROGRESS):
            if int(found["attempt"]) <= self.attempt:
                gone = folder if found["gone"] else folder.with_name(f"{folder.name}.{uuid.uuid4().hex}")
                folder.rename(gone)
                shutil.rmtree(gone, ignore_errors=True)
        self._finish_removals()
        return sorted(set(self.run_dir.checkpoint_folders()) - self.run_dir.manifests().keys())

    def put_aside(self, step: int) -> None:
        """Rename it."""
        folder = self.run_dir.checkpoint(step)
        aside = folder.with_name(f"{folder.name}.rejected-{self.attempt}")
        # Repeated after its answer was lost, it finds nothing to rename.
        with suppress(FileNotFoundError):
            # The same step may be rejected again by a later start of the same attempt.
            folder.rename(aside if not aside.exists() else aside.with_name(f"{aside.name}.{uuid.uuid4().hex}"))
        sync(folder.parent)

    def retire(self, step: int) -> None:
        """Out of the ledger at one stroke, then the manifest, then the rest.

        Whoever pinned it and has seen its manifest after that keeps it.
        """
        check_fence(self.run_dir, self.attempt)
        folder = self.run_dir.checkpoint(step)
        retired = folder.with_name(f"{folder.name}.retired")
        folder.rename(retired)
        sync(folder.parent)
        self._remove_unless_pinned(retired)

    def sweep(self) -> None:
        """Of what was rejected, the one of the newest step that was rejected last stays."""
        check_fence(self.run_dir, self.attempt)
        self._finish_removals()
        pins = self.run_dir.pins()
        rejected = [(step_of(folder), folder.stat().st_ctime, folder) for folder, _ in self._folders(_REJECTED)]
        for step, _, folder in sorted(rejected)[:-1]:
            if step not in pins:
                shutil.rmtree(folder, ignore_errors=True)

    def _finish_removals(self) -> None:
        for folder, _ in self._folders(_RETIRED):
            self._remove_unless_pinned(folder)

    def _folders(self, pattern: str) -> list[tuple[Path, re.Match[str]]]:
        """The folders whose whole names match, and how."""
        matches = ((name, re.fullmatch(pattern, name)) for name in list_folder(self.run_dir.checkpoints))
        return [(self.run_dir.checkpoints / name, match) for name, match in matches if match]

    def _remove_unless_pinned(self, retired: Path) -> None:
        manifest, final = retired / NAME, retired.with_suffix("")
        # The step may have been trained and saved again.
        if step_of(retired) in self.run_dir.pins() and manifest.exists() and not final.exists():
            retired.rename(final)
            sync(retired.parent)
            return
        manifest.unlink(missing_ok=True)
        sync(retired)
        shutil.rmtree(retired, ignore_errors=True)

    def _in_progress(self, step: int) -> Path:
        return self.run_dir.checkpoint_in_progress(step, self.attempt)
