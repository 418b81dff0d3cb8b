"""Checkpoints on object storage, which renames nothing: the manifest's existence is the commit. Torch-free."""

import errno
from dataclasses import dataclass
from pathlib import Path

from train_loop.checkpoint.ledger import check_fence, step_of
from train_loop.checkpoint.manifest import NAME, has_its_files
from train_loop.errors import FencedError
from train_loop.run_dir import Manifest, RunDir, create_object, remove_all


@dataclass(frozen=True)
class ObjectLedger:
    """`checkpoints/` where an object appears whole or not at all, and under its final name."""

    run_dir: RunDir
    attempt: int

    def workplace(self, step: int) -> Path:
        """Where the checkpoint will be: each process writes files of names that no other has."""
        return self.run_dir.checkpoint(step)

    def commit(self, draft: Manifest) -> Manifest:
        """The manifest, where there is none. Raises FencedError.

        An attempt that is held up between its look at the fence and its manifest looks once more, and takes it back.
        """
        manifest = draft.sealed()
        folder = self.run_dir.checkpoint(manifest.step)
        there = self.run_dir.manifests().get(manifest.step)
        if there == manifest:
            return manifest
        check_fence(self.run_dir, self.attempt)
        if not has_its_files(folder, manifest):
            raise FileNotFoundError(errno.ENOENT, "files of the checkpoint have been removed", str(folder))
        if there is not None and not has_its_files(folder, there):
            # Of an attempt that was held up, after its files had been cleared away.
            (folder / NAME).unlink(missing_ok=True)
        create_object(folder / NAME, manifest.model_dump_json(indent=2).encode())
        try:
            check_fence(self.run_dir, self.attempt)
        except FencedError:
            (folder / NAME).unlink(missing_ok=True)
            raise
        return manifest

    def discard(self, step: int) -> None:
        """Whatever it has written."""
        if step not in self.run_dir.manifests():
            remove_all(self.run_dir.checkpoint(step))

    def clear(self) -> list[int]:
        """Remove what has no manifest: nobody but this attempt may be saving."""
        damaged, known = [], self.run_dir.manifests()
        for folder in self.run_dir.checkpoints.glob("step-????????"):
            step = step_of(folder)
            if step in known:
                continue
            if (folder / NAME).exists():
                damaged.append(step)
            else:
                remove_all(folder)
        return sorted(damaged)

    def put_aside(self, step: int) -> None:
        """Remove it, its manifest first."""
        folder = self.run_dir.checkpoint(step)
        (folder / NAME).unlink(missing_ok=True)
        remove_all(folder)

    def retire(self, step: int) -> None:
        """The manifest, which is put back for whoever has pinned it meanwhile; then the rest."""
        folder = self.run_dir.checkpoint(step)
        manifest = (folder / NAME).read_bytes()
        (folder / NAME).unlink()
        if step in self.run_dir.pins():
            (folder / NAME).write_bytes(manifest)
            return
        remove_all(folder)
