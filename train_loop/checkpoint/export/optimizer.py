"""The optimizer state of a checkpoint, for files next to its weights: another run starts from both."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.amp import GradScaler
from torch.distributed.checkpoint.state_dict_loader import load

from train_loop.checkpoint.export.safetensors import Kind, ShardFile, file_names, plan_shards, write_index
from train_loop.checkpoint.export.status import Progress
from train_loop.checkpoint.export.tensors import CheckpointTensors
from train_loop.checkpoint.files.reader import CheckpointReader
from train_loop.checkpoint.optimizer_state import FACTS, STEM, TrainingState, trained_shapes
from train_loop.errors import UserError
from train_loop.model.freeze import freeze
from train_loop.model.weight_map import some
from train_loop.run_dir import Manifest, write_durably
from train_loop.spec import JobSpec


@dataclass(frozen=True)
class SavedStates:
    """The optimizer state in a checkpoint, and the position of its run."""

    saved: CheckpointTensors
    keys: Mapping[str, str]
    """Key in the checkpoint of each state, by its name in the files: those of its parameter and of the state."""
    facts: TrainingState

    @property
    def values(self) -> int:
        """Number of values of all states."""
        return sum(self.saved.shape(key).numel() for key in self.keys.values())

    def write(self, folder: Path, progress: Progress, *, shard_bytes: int) -> None:
        """Write the files that `training.optimizer_state` reads, some megabytes at a time."""
        kinds = {name: Kind(self.saved.shape(key), self.saved.dtype(key)) for name, key in self.keys.items()}
        shards = plan_shards(kinds, limit=shard_bytes)
        for name, shard in zip(file_names(shards, STEM), shards, strict=True):
            file = ShardFile(folder / name, shard)
            for state in shard:
                file.put(state, progress.counted(self.saved.pieces(self.keys[state])))
            file.close()
        write_index(folder, shards, STEM)
        write_durably(folder / FACTS, self.facts.model_dump_json(indent=2))


def find_states(spec: JobSpec, model: nn.Module, manifest: Manifest, folder: Path) -> SavedStates:
    """Return the optimizer state in the checkpoint in `folder`; `model` is on meta.

    Raises UserError if a trained parameter has none yet.
    """
    saved = CheckpointTensors(folder)
    states = {key: path[2:] for key, path in saved.paths.items() if path[:2] == ("optimizer", "state")}
    keys = {".".join(path): key for key, path in states.items() if saved.has(key)}
    freeze(model, spec.model.freeze_module_prefix)
    if missing := sorted(trained_shapes(model).keys() - {path[0] for path in states.values()}):
        raise UserError(
            f"the checkpoint of step {manifest.step} has no optimizer state of {some(missing)}: no gradient has "
            "reached it yet; export without the optimizer state, or use train_loop.checkpoint.export.full"
        )
    scaler = GradScaler("cpu", enabled=spec.model.dtype == "fp16").state_dict()
    wanted = {"scheduler": {"0": {"last_epoch": 0}}, "scaler": scaler}
    with warnings.catch_warnings():
        # DCP warns of loads in a single process.
        warnings.simplefilter("ignore", UserWarning)
        load(wanted, storage_reader=CheckpointReader(folder), no_dist=True)
    return SavedStates(saved, keys, training_state(spec, manifest, wanted))


def training_state(spec: JobSpec, manifest: Manifest, read: Mapping[str, Any]) -> TrainingState:
    """Return where a run was at a checkpoint; `read` has the checkpoint's `scheduler` and `scaler`."""
    return TrainingState(
        optimizer=spec.training.optimizer,
        step=manifest.step,
        tokens=manifest.tokens,
        schedule=read["scheduler"]["0"]["last_epoch"],
        position=manifest.position,
        dataset=manifest.dataset,
        seed=spec.data.seed,
        shuffle=spec.data.shuffle,
        scaler=read["scaler"],
    )
