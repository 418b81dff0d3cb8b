"""Selection of the ledger for a run directory's storage. Torch-free."""

from train_loop.checkpoint.store.base import Ledger
from train_loop.checkpoint.store.folder import FolderLedger
from train_loop.checkpoint.store.objects import ObjectLedger
from train_loop.run_dir import Fence, RunDir, is_remote


def ledger_of(run_dir: RunDir, token: Fence) -> Ledger:
    """Return the ledger with which a worker group commits checkpoints in a run directory."""
    return ObjectLedger(run_dir, token) if is_remote(run_dir.root) else FolderLedger(run_dir, token)
