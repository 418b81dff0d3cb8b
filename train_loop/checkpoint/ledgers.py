"""The ledger for where a run directory lies. Torch-free."""

from train_loop.checkpoint.folder_ledger import FolderLedger
from train_loop.checkpoint.ledger import Ledger
from train_loop.checkpoint.object_ledger import ObjectLedger
from train_loop.run_dir import RunDir, is_remote


def ledger_of(run_dir: RunDir, attempt: int) -> Ledger:
    """How an attempt commits checkpoints in a run directory."""
    return ObjectLedger(run_dir, attempt) if is_remote(run_dir.root) else FolderLedger(run_dir, attempt)
