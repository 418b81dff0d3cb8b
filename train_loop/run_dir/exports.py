"""Exports of checkpoints: their requests, folders and status files in a run directory."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from train_loop.run_dir.files.durable import write_durably
from train_loop.run_dir.formats import Format
from train_loop.run_dir.remote import create_object, is_remote, read_whole
from train_loop.spec import WITHOUT_FOLDER, JobSpec, ModelSpec

_SILENT_SECONDS, _GONE_SECONDS = 60.0, 3600.0


ExportState = Literal["running", "done", "failed"]


ExportForm = Literal["adapter", "merged", "dequantized"]


class ExportWish(Format):
    """Options of a requested export: the dtype and the kind of weights, and the form of those of adapters."""

    dtype: Literal["bf16", "fp16", "fp32"]
    weights: Literal["model", "ema"] = "model"
    form: ExportForm | None = None
    """A folder of peft, or the model with the adapters added, to restored weights if those of the run are quantised.

    None for a run without adapters.
    """
    include: Literal["optimizer"] | None = None
    """The optimizer state and the position of the run, with which another run continues."""

    def fault(self, model: ModelSpec) -> str | None:
        """Return the reason why weights of a run cannot have this form; None if they can."""
        if model.lora is None:
            return "the run trains no adapters (model.lora); export without form" if self.form else None
        if self.form is None:
            return "the run trains adapters (model.lora); export with form adapter, for peft, or merged"
        kind = model.quantize_base
        if self.form == "merged" and kind is not None:
            return (
                f"the adapters were trained with weights in {kind} (model.quantize_base), and those at model.path "
                "are others; choose form dequantized, which adds them to the restored weights, or adapter"
            )
        if self.form == "dequantized" and kind is None:
            return "the run has no quantised weights (model.quantize_base) to restore; choose form merged"
        return None

    def fault_of_states(self, spec: JobSpec) -> str | None:
        """Return the reason why an export of a run cannot include its optimizer state; None if it can or does not."""
        optimizer, master = spec.training.optimizer, spec.model.master_dtype
        if self.include is None:
            return None
        if spec.model.lora is not None:
            return "the optimizer state of adapters (model.lora) is not exported; clone the job instead"
        if optimizer in WITHOUT_FOLDER:
            return f"the states of {optimizer} are not read from a folder; clone the job instead"
        if self.weights == "ema":
            return "the optimizer state belongs to the trained weights, and not to their average; export weights: model"
        if self.dtype != master:
            return f"dtype={self.dtype} rounds the weights to which the optimizer state belongs; choose {master}"
        return None

    def name(self, step: int) -> str:
        """Return the name of the export's folder below export/."""
        return f"step-{step:08d}-{self._options}"

    @property
    def pinned_by(self) -> str:
        """The owner of the pin that keeps the checkpoint during the export."""
        return f"export-{self._options}"

    @property
    def _options(self) -> str:
        return "-".join([self.weights, self.dtype, *filter(None, (self.form, self.include))])


def wish_of(
    model: ModelSpec,
    *,
    dtype: Literal["bf16", "fp16", "fp32"] | None,
    weights: Literal["model", "ema"],
    form: ExportForm | None,
    include: Literal["optimizer"] | None,
) -> ExportWish:
    """Return a wish for an export of a run with this model, with the form and the dtype that follow from the others."""
    form = form or ("adapter" if model.lora is not None else None)
    exact = "fp32" if form == "adapter" else model.master_dtype if include else model.dtype
    return ExportWish(dtype=dtype or exact, weights=weights, form=form, include=include)


class ExportStatus(Format):
    """export/<name>.json: the progress of an export, rewritten every few seconds while the export runs."""

    step: int
    wish: ExportWish
    state: ExportState
    progress: float = 0.0
    """Fraction of the bytes that are written."""
    time: float
    """Time of this status in Unix seconds."""
    reason: str | None = None
    difference: float | None = None
    """Largest difference of the merged model's outputs from those with adapters; None if it was not measured."""
    completed: float | None = None
    """Time in Unix seconds at which all files were written; its event has it too, so that it is written once."""


@dataclass(frozen=True)
class ExportDir:
    """The export/ folder of a run directory."""

    root: Path

    def folder(self, step: int, wish: ExportWish) -> Path:
        """Return the folder of a finished export."""
        return self.root / wish.name(step)

    def write(self, status: ExportStatus) -> None:
        """Write the status of an export durably."""
        path = self.folder(status.step, status.wish).with_suffix(".json")
        write_durably(path, status.model_dump_json(indent=2), below=self.root.parent)

    def status(self, step: int, wish: ExportWish, *, now: float) -> ExportStatus | None:
        """Return the status of an export; None if it was not requested, or its finished folder was deleted.

        Reports a running export as failed if its last status is older than a minute.
        """
        folder = self.folder(step, wish)
        status = self._read(folder.name)
        if status is None:
            return None
        if status.state == "done" and not is_remote(folder) and not folder.exists():
            # The finished export was deleted.
            return None
        if status.state == "running" and now - status.time > _SILENT_SECONDS:
            reason = "the export process has exited; request the export again"
            return status.model_copy(update={"state": "failed", "reason": reason})
        return status

    def claim(self, step: int, wish: ExportWish, completed: float) -> float:
        """Claim the event of an export on object storage, which has no locks. Return the time of the first claim."""
        path = self.folder(step, wish).with_suffix(".completed")
        try:
            create_object(path, repr(completed).encode())
        except FileExistsError:
            return float(read_whole(path, below=self.root.parent))
        return completed

    def may_be_at_work(self, name: str, *, now: float) -> bool:
        """Return whether an export of this name may still run: its last status is less than an hour old.

        The limit is this high because clocks differ and storage can fail for a while.
        """
        status = self._read(name)
        return status is not None and status.state == "running" and now - status.time < _GONE_SECONDS

    def _read(self, name: str) -> ExportStatus | None:
        try:
            return ExportStatus.model_validate_json(read_whole(self.root / f"{name}.json", below=self.root.parent))
        except (FileNotFoundError, ValueError):
            return None
