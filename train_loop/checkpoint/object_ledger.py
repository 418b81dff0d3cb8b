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
        if not self._is_there(manifest):
            check_fence(self.run_dir, self.attempt)
            if not has_its_files(folder, manifest):
                raise FileNotFoundError(errno.ENOENT, "files of the checkpoint have been removed", str(folder))
            self._make_room(manifest.step)
            try:
                create_object(folder / NAME, manifest.model_dump_json(indent=2).encode())
            except FileExistsError:
                # Asked again because the answer was lost, object storage says so of our own.
                if not self._is_there(manifest):
                    raise
        try:
            check_fence(self.run_dir, self.attempt)
        except FencedError:
            # By now it may be another's.
            if self._is_there(manifest):
                (folder / NAME).unlink(missing_ok=True)
            raise
        return manifest

    def _is_there(self, manifest: Manifest) -> bool:
        return self.run_dir.manifests().get(manifest.step) == manifest

    def _make_room(self, step: int) -> None:
        """Remove the manifest of an attempt that was held up until those who took over had looked what there is."""
        folder, there = self.run_dir.checkpoint(step), self.run_dir.manifests().get(step)
        if there is not None and (there.attempt < self.attempt or not has_its_files(folder, there)):
            (folder / NAME).unlink(missing_ok=True)

    def discard(self, step: int) -> None:
        """Whatever it has written, unless somebody else may be writing there, or what was rejected lies there too."""
        mine = self.run_dir.fence() <= self.attempt and step not in self.run_dir.manifests()
        if mine and _REJECTED not in list_folder(self.run_dir.checkpoint(step)):
            remove_all(self.run_dir.checkpoint(step))

    def clear(self) -> list[int]:
        """Remove what has no manifest: nobody but this attempt may be saving."""
        damaged = []
        self._finish_removals()
        for step, names in self._without_manifest():
            if NAME in names:
                damaged.append(step)
            elif _REJECTED not in names:
                remove_all(self.run_dir.checkpoint(step))
        return damaged

    def put_aside(self, step: int) -> None:
        """Its manifest gets another name."""
        _move(self.run_dir.checkpoint(step) / NAME, _REJECTED)

    def retire(self, step: int) -> None:
        """Its manifest gets another name, and the old one again for whoever has pinned it meanwhile; then the rest."""
        check_fence(self.run_dir, self.attempt)
        _move(self.run_dir.checkpoint(step) / NAME, _RETIRED)
        self._remove_unless_pinned(step, self.run_dir.pins())

    def sweep(self) -> None:
        """Of what was rejected, the newest stays."""
        check_fence(self.run_dir, self.attempt)
        self._finish_removals()
        pins = self.run_dir.pins()
        for step in [step for step, names in self._without_manifest() if _REJECTED in names][:-1]:
            if step not in pins:
                remove_all(self.run_dir.checkpoint(step))

    def _finish_removals(self) -> None:
        pins = self.run_dir.pins()
        for step, names in self._without_manifest():
            if _RETIRED in names and NAME not in names:
                self._remove_unless_pinned(step, pins)

    def _without_manifest(self) -> list[tuple[int, list[str]]]:
        """Steps of which something is there, but no manifest that is whole; and the names of what is."""
        known = self.run_dir.manifests()
        others = [step for step in self.run_dir.checkpoint_folders() if step not in known]
        return [(step, list_folder(self.run_dir.checkpoint(step))) for step in others]

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
