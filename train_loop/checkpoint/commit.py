"""The commit of a checkpoint: once all its files are durable, the manifest, then its final name. Torch-free."""

import errno

from train_loop.checkpoint.manifest import NAME, has_its_files
from train_loop.errors import FencedError
from train_loop.run_dir import Manifest, RunDir, replace_durably, sync

METADATA = ".metadata"
"""DCP's own description of what lies where."""


def check_fence(run_dir: RunDir, attempt: int) -> None:
    """Raise FencedError where a newer attempt has taken over."""
    fence = run_dir.fence()
    if fence > attempt:
        raise FencedError(f"attempt {fence} has taken over from attempt {attempt}, which ends here")


def commit(run_dir: RunDir, attempt: int, draft: Manifest) -> Manifest:
    """Make a folder whose files are durable a checkpoint; repeatable. Raises FencedError, OSError.

    A newer attempt writes its fence, then removes the folders of older ones, then looks which checkpoints there are.
    So an attempt that is held up between its look at the fence and the rename finds nothing to rename.
    """
    manifest = draft.sealed()
    folder, final = run_dir.checkpoint_in_progress(manifest.step, attempt), run_dir.checkpoint(manifest.step)
    if run_dir.manifests().get(manifest.step) != manifest:
        replace_durably(folder / NAME, manifest.model_dump_json(indent=2))
        check_fence(run_dir, attempt)
        # Where this process was thought dead, those who took over may be writing the same step in the same place.
        if not has_its_files(folder, manifest):
            raise FileNotFoundError(errno.ENOENT, "files of the checkpoint have been removed", str(folder))
        # It fails where the name is taken, by whoever has trained this step meanwhile.
        folder.rename(final)
    sync(final.parent)
    return manifest
