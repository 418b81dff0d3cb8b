"""Checkpoints on object storage, which renames nothing: the manifest's existence is the commit. Torch-free."""

import errno
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from train_loop.checkpoint.ledger import check_fence
from train_loop.checkpoint.manifest import NAME, has_its_files
from train_loop.errors import FencedError
from train_loop.run_dir import Manifest, RunDir, create_object, list_folder, read_whole, remove_all, size_of

_RETIRED = "retired.json"
"""The manifest of one that is being removed."""
_REJECTED = "rejected.json"
"""That of one that was put aside."""


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
        if there is not None and (there.attempt < self.attempt or not has_its_files(folder, there)):
            # Of an attempt that was held up, after those who took over had looked which checkpoints there are.
            (folder / NAME).unlink(missing_ok=True)
        create_object(folder / NAME, manifest.model_dump_json(indent=2).encode())
        try:
            check_fence(self.run_dir, self.attempt)
        except FencedError:
            # By now it may be another's.
            if self.run_dir.manifests().get(manifest.step) == manifest:
                (folder / NAME).unlink(missing_ok=True)
            raise
        return manifest

    def discard(self, step: int) -> None:
        """Whatever it has written, unless somebody else may be writing there."""
        if self.run_dir.fence() <= self.attempt and step not in self.run_dir.manifests():
            remove_all(self.run_dir.checkpoint(step))

    def clear(self) -> list[int]:
        """Remove what has no manifest: nobody but this attempt may be saving."""
        damaged, known, pins = [], self.run_dir.manifests(), self.run_dir.pins()
        for step in self.run_dir.checkpoint_folders():
            folder = self.run_dir.checkpoint(step)
            names = set() if step in known else set(list_folder(folder))
            if NAME in names:
                damaged.append(step)
            elif _RETIRED in names:
                self._remove_unless_pinned(step, pins)
            elif names and _REJECTED not in names:
                remove_all(folder)
        return damaged

    def put_aside(self, step: int) -> None:
        """Its manifest gets another name."""
        _move(self.run_dir.checkpoint(step) / NAME, _REJECTED)

    def retire(self, step: int) -> None:
        """Its manifest gets another name, and the old one again for whoever has pinned it meanwhile; then the rest."""
        check_fence(self.run_dir, self.attempt)
        _move(self.run_dir.checkpoint(step) / NAME, _RETIRED)
        self._remove_unless_pinned(step, self.run_dir.pins())

    def remove_rejected(self) -> None:
        """All but the newest."""
        known, pins = self.run_dir.manifests(), self.run_dir.pins()
        others = [step for step in self.run_dir.checkpoint_folders() if step not in known]
        rejected = [step for step in others if _REJECTED in list_folder(self.run_dir.checkpoint(step))]
        for step in rejected[:-1]:
            if step not in pins:
                remove_all(self.run_dir.checkpoint(step))

    def _remove_unless_pinned(self, step: int, pins: Collection[int]) -> None:
        folder = self.run_dir.checkpoint(step)
        if step in pins:
            _move(folder / _RETIRED, NAME)
        else:
            remove_all(folder)


def _move(path: Path, name: str) -> None:
    """Under another name beside it; whatever happens in between, one of the two is there, and it can be repeated."""
    try:
        content = read_whole(path)
    except FileNotFoundError:
        if size_of(path.with_name(name)) is not None:
            return
        raise
    path.with_name(name).write_bytes(content)
    path.unlink(missing_ok=True)
