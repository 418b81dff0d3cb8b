"""Selection of the ledger for a run directory's storage. Torch-free."""

from train_loop.checkpoint.store.base import CheckpointStore
from train_loop.checkpoint.store.folder import FolderStore
from train_loop.checkpoint.store.objects import ObjectStore
from train_loop.run_dir import Fence, RunDir, is_remote


def open_store(run_dir: RunDir, token: Fence) -> CheckpointStore:
    """Return the ledger with which a worker group commits checkpoints in a run directory."""
    return ObjectStore(run_dir, token) if is_remote(run_dir.root) else FolderStore(run_dir, token)
