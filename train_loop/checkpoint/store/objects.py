"""Checkpoints on object storage, which cannot rename: creating the manifest is the commit. Torch-free."""

import errno
import uuid
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from train_loop.checkpoint.manifest import NAME, has_its_files
from train_loop.checkpoint.store.base import METADATA
from train_loop.liveness.fencing import check_fence
from train_loop.run_dir import Fence, Manifest, RunDir, create_object, list_folder, read_whole, size_of

_RETIRED = "retired.json"
"""Name of the manifest of a checkpoint that is being removed."""
_TRIES = 3
"""Maximum number of late manifests of superseded groups that a commit removes before it fails."""
_REJECTED = "rejected.json"
"""Name of the manifest of a rejected checkpoint."""
_MARKS = (NAME, _RETIRED, _REJECTED)
"""The only names that two groups may both write."""


@dataclass(frozen=True)
class ObjectStore:
    """The checkpoints of a run on storage where an object appears complete or not at all, under its final name.

    Every file of a checkpoint has a name that no other save uses. A list of files from before the last fence check
    therefore contains no file of a newer group. Its files can be removed at any later time.
    """

    run_dir: RunDir
    token: Fence

    def workplace(self, step: int) -> Path:
        """Return the checkpoint's final folder: each process writes files with unique names."""
        return self.run_dir.checkpoint(step)

    def metadata_name(self) -> str:
        """Return a unique name for every save; readers find it in the manifest."""
        return f"__{uuid.uuid4().hex[:8]}{METADATA}"

    def commit(self, draft: Manifest) -> Manifest:
        """Create the manifest. Raises FencedError.

        A newer group raises the fence, then removes files without a manifest, then selects its checkpoint. Suppose that
        this group is paused between its check and the manifest. Then either it has committed before the newer group
        selects, or its files are gone and the manifest does not verify.
        """
        manifest = draft.sealed()
        folder = self.run_dir.checkpoint(manifest.step)
        tries = 0
        while not self._is_there(manifest):
            check_fence(self.run_dir, self.token)
            if not has_its_files(folder, manifest):
                raise FileNotFoundError(errno.ENOENT, "files of the checkpoint have been removed", str(folder))
            self._make_room(manifest.step)
            try:
                create_object(folder / NAME, manifest.model_dump_json(indent=2).encode())
            except FileExistsError:
                # It may be this group's own, if the answer to an earlier request was lost; or that of a superseded
                # group, which was paused before its request.
                tries += 1
                if tries > _TRIES:
                    raise
        # Do not undo the commit: the newer group may have selected the checkpoint, or replaced its manifest.
        check_fence(self.run_dir, self.token)
        return manifest

    def _is_there(self, manifest: Manifest) -> bool:
        return self.run_dir.manifests().get(manifest.step) == manifest

    def _make_room(self, step: int) -> None:
        """Remove a manifest that a superseded group created late, or whose files are missing."""
        folder, there = self.run_dir.checkpoint(step), self.run_dir.manifests().get(step)
        if there is not None and (there.token < self.token or not has_its_files(folder, there)):
            check_fence(self.run_dir, self.token)
            (folder / NAME).unlink(missing_ok=True)

    def discard(self, step: int) -> None:
        """Remove the files of a failed save, unless the step has a committed or rejected manifest.

        Raises FencedError.
        """
        names = list_folder(self.run_dir.checkpoint(step))
        if not {NAME, _REJECTED} & set(names):
            self._remove(step, names)

    def clear(self) -> list[int]:
        """Remove files without a manifest: only this group may be saving. Return damaged steps. Raises FencedError."""
        check_fence(self.run_dir, self.token)
        damaged = []
        self._finish_removals()
        for step, names in self._without_manifest():
            if NAME in names:
                damaged.append(step)
            else:
                self._remove(step, self._unfinished(step, names))
        return damaged

    def put_aside(self, step: int) -> None:
        """Rename the manifest of a rejected checkpoint. Raises FencedError."""
        self._move(step, NAME, _REJECTED)

    def retire(self, step: int) -> None:
        """Rename the manifest, then remove the files. Restore the manifest if the checkpoint was pinned meanwhile."""
        self._move(step, NAME, _RETIRED)
        self._remove_unless_pinned(step, self.run_dir.pins())

    def sweep(self) -> None:
        """Finish removals. Remove rejected checkpoints, except the newest and the pinned ones."""
        check_fence(self.run_dir, self.token)
        self._finish_removals()
        pins = self.run_dir.pins()
        for step, names in [found for found in self._without_manifest() if _REJECTED in found[1]][:-1]:
            if step not in pins:
                self._remove(step, names)

    def _finish_removals(self) -> None:
        pins = self.run_dir.pins()
        for step, names in self._without_manifest():
            if _RETIRED in names and NAME not in names:
                self._remove_unless_pinned(step, pins)

    def _without_manifest(self) -> list[tuple[int, list[str]]]:
        """Return the steps that have files but no valid manifest, and the names of their files."""
        known = self.run_dir.manifests()
        others = [step for step in self.run_dir.checkpoint_folders() if step not in known]
        return [(step, list_folder(self.run_dir.checkpoint(step))) for step in others]

    def _remove_unless_pinned(self, step: int, pins: Collection[int]) -> None:
        if step in pins:
            self._move(step, _RETIRED, NAME)
        else:
            self._remove(step, list_folder(self.run_dir.checkpoint(step)))

    def _unfinished(self, step: int, names: Collection[str]) -> list[str]:
        """Return the names of files of a save without manifest; files of a rejected checkpoint are left out."""
        if _REJECTED not in names:
            return list(names)
        try:
            rejected = Manifest.parse(read_whole(self.run_dir.checkpoint(step) / _REJECTED).decode())
        except (FileNotFoundError, ValueError):
            # It is unknown which files belong to the rejected checkpoint.
            return []
        return [name for name in names if name not in rejected.files and name not in _MARKS]

    def _remove(self, step: int, names: Collection[str]) -> None:
        """Remove files by names that were listed before this call. Raises FencedError."""
        check_fence(self.run_dir, self.token)
        folder = self.run_dir.checkpoint(step)
        # Manifests last: until then, the step's state is known.
        for name in sorted(names, key=lambda name: (name in _MARKS, name)):
            if name != NAME:
                (folder / name).unlink(missing_ok=True)

    def _move(self, step: int, name: str, to: str) -> None:
        """Rename a manifest by copy and delete: at any time one of the two exists, and a retry is safe."""
        check_fence(self.run_dir, self.token)
        path = self.run_dir.checkpoint(step) / name
        try:
            content = read_whole(path)
        except FileNotFoundError:
            if size_of(path.with_name(to)) is not None:
                return
            raise
        path.with_name(to).write_bytes(content)
        # There is no conditional delete: this check limits the race to the time of one request.
        check_fence(self.run_dir, self.token)
        path.unlink(missing_ok=True)
