"""Exports of checkpoints, as the run directory tells of them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from train_loop.run_dir.durable import write_durably
from train_loop.run_dir.formats import Format
from train_loop.run_dir.remote import is_remote, read_whole

_SILENT_SECONDS, _GONE_SECONDS = 60.0, 3600.0


ExportState = Literal["running", "done", "failed"]


class ExportWish(Format):
    """What is to be made of a checkpoint."""

    dtype: Literal["bf16", "fp16", "fp32"]
    weights: Literal["model", "ema"] = "model"

    def name(self, step: int) -> str:
        """The folder that it goes to, below export/."""
        return f"step-{step:08d}-{self.weights}-{self.dtype}"

    @property
    def pinned_by(self) -> str:
        """In whose name the checkpoint is kept meanwhile."""
        return f"export-{self.weights}-{self.dtype}"


class ExportStatus(Format):
    """export/<name>.json: how far an export is; written again every few seconds while somebody works on it."""

    step: int
    wish: ExportWish
    state: ExportState
    progress: float = 0.0
    """The share of the bytes that is written."""
    time: float
    """Unix seconds of this word."""
    reason: str | None = None


@dataclass(frozen=True)
class ExportDir:
    """export/ of a run directory."""

    root: Path

    def folder(self, step: int, wish: ExportWish) -> Path:
        """Where a finished export lies."""
        return self.root / wish.name(step)

    def write(self, status: ExportStatus) -> None:
        """Say how far an export is."""
        write_durably(self.folder(status.step, status.wish).with_suffix(".json"), status.model_dump_json(indent=2))

    def status(self, step: int, wish: ExportWish, *, now: float) -> ExportStatus | None:
        """How far an export is; None where nobody asked for it. Whoever says nothing for a minute has ended."""
        folder = self.folder(step, wish)
        status = self._read(folder.name)
        if status is None:
            return None
        if status.state == "done" and not is_remote(folder) and not folder.exists():
            # Somebody has removed it.
            return None
        if status.state == "running" and now - status.time > _SILENT_SECONDS:
            reason = "the process that exported has ended; ask again"
            return status.model_copy(update={"state": "failed", "reason": reason})
        return status

    def may_be_at_work(self, name: str, *, now: float) -> bool:
        """Whether somebody may be making the export of this name: clocks differ, and storage fails for a while."""
        status = self._read(name)
        return status is not None and status.state == "running" and now - status.time < _GONE_SECONDS

    def _read(self, name: str) -> ExportStatus | None:
        try:
            return ExportStatus.model_validate_json(read_whole(self.root / f"{name}.json"))
        except (FileNotFoundError, ValueError):
            return None
