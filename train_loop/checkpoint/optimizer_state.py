"""Optimizer state in a folder of safetensors, with which a run goes on at the step of another, at any size.

Each tensor is one state of one parameter, and has the names of both. The rest is in training_state.json.
"""

import math
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field
from torch import Tensor, nn

from train_loop.data.dataset import Dataset
from train_loop.errors import UserError
from train_loop.model.load import Stored, read_headers
from train_loop.model.parts import own_parts
from train_loop.model.weight_map import some
from train_loop.plan import Origin
from train_loop.run_dir import DataPosition, Format, local_path
from train_loop.spec import DataSpec, TrainingSpec
from train_loop.system.input_files import read_input

STEM, FACTS = "optimizer", "training_state.json"
"""Names of the files of tensors, and of that with the rest."""
FORMAT = 1
_REMEDY = "make it with `trainshed export JOB STEP --with optimizer`"


class TrainingState(Format):
    """training_state.json: where the run was when it saved the optimizer state."""

    format: int = FORMAT
    optimizer: str
    step: int
    tokens: int
    schedule: int
    """Step of the learning rate schedule; skipped optimizer steps do not count."""
    position: DataPosition
    dataset: str
    """Fingerprint of the prepared data."""
    seed: int
    """Seed of the order of samples."""
    shuffle: bool
    scaler: dict[str, int | float] = Field(default_factory=dict)
    """Scaler of an fp16 run."""


class OptimizerState(NamedTuple):
    """The optimizer state in a folder; its tensors are not read yet."""

    folder: Path
    facts: TrainingState
    stored: dict[str, dict[str, Stored]]
    """Tensors by parameter, then by the name of the state."""

    def origin(self, data: DataSpec, dataset: Dataset) -> Origin:
        """Return the start of a run: its data continue if they are the same in the same order."""
        facts = self.facts
        same = (facts.dataset, facts.seed, facts.shuffle) == (dataset.fingerprint, data.seed, data.shuffle)
        consumed = facts.position.epoch * dataset.epoch_samples + facts.position.samples if same else 0
        return Origin(facts.step, facts.tokens, consumed)


def read_optimizer_state(training: TrainingSpec) -> OptimizerState | None:
    """Return the optimizer state that a spec names, from headers alone; None if it names none. Raises UserError."""
    if training.optimizer_state is None:
        return None
    try:
        folder = local_path(training.optimizer_state)
        facts = TrainingState.model_validate_json(read_input(folder / FACTS))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UserError(f"{FACTS} not found in {training.optimizer_state}; {_REMEDY}") from error
    except ValueError as error:
        raise UserError(f"{FACTS} of {training.optimizer_state} cannot be read: {error}; {_REMEDY}") from error
    if facts.format > FORMAT:
        raise UserError(
            f"{folder} has format {facts.format}, but this version of Trainshed reads format {FORMAT}; use the version "
            "that wrote it"
        )
    stored = defaultdict[str, dict[str, Stored]](dict)
    for name, one in read_headers(folder, STEM).items():
        parameter, _, key = name.rpartition(".")
        stored[parameter][key] = one
    return OptimizerState(folder, facts, dict(stored))


def check_fits(found: OptimizerState, training: TrainingSpec, parameters: Mapping[str, tuple[int, ...]]) -> None:
    """Raise UserError if a state is not that of an optimizer for these trained parameters, given by their shapes."""
    if found.facts.optimizer != training.optimizer:
        raise UserError(
            f"{found.folder} has the state of {found.facts.optimizer}, and training.optimizer is {training.optimizer}; "
            "choose the same, or remove optimizer_state"
        )
    faults = {
        "missing": sorted(parameters.keys() - found.stored.keys()),
        "unexpected": sorted(found.stored.keys() - parameters.keys()),
        "wrong shape": [
            f"{name}.{key} is {list(one.shape)}, and {name} {list(parameters[name])}"
            for name, states in found.stored.items()
            if name in parameters
            for key, one in states.items()
            if not _may_be_of(one.shape, parameters[name], factored=training.optimizer == "adafactor")
        ],
    }
    if any(faults.values()):
        raise UserError(
            f"the optimizer state in {found.folder} is not of the trained parameters: "
            f"{'; '.join(f'{kind}: {some(which)}' for kind, which in faults.items() if which)}; give that of the same "
            "model with the same freeze_module_prefix, or remove optimizer_state"
        )


def _may_be_of(shape: tuple[int, ...], parameter: tuple[int, ...], *, factored: bool) -> bool:
    """Return whether a state is a count, as large as its parameter, or has means of its rows or columns."""
    if math.prod(shape) == 1 or shape == parameter:
        return True
    means = [(*parameter[:-1], 1), (*parameter[:-2], 1, *parameter[-1:])] if len(parameter) > 1 else []
    return factored and shape in means


def fill_optimizer_state(found: OptimizerState, states: Mapping[str, Mapping[str, Any]]) -> None:
    """Read this rank's part of each tensor into the states of fresh optimizers, by parameter. Raises UserError."""
    for name, values in states.items():
        for key, value in values.items():
            if not isinstance(value, Tensor):
                continue
            one = found.stored.get(name, {}).get(key)
            if one is None or one.shape != tuple(value.shape):
                held = "missing" if one is None else f"{list(one.shape)}"
                raise UserError(
                    f"{name}.{key} in {found.folder} is {held}, expected {list(value.shape)}; give the optimizer state "
                    "of the same model and optimizer, or remove optimizer_state"
                )
            for own, box in own_parts(value):
                own.copy_(one.read(box))


def trained_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the whole shape of each trained parameter of a model, by name."""
    return {name: tuple(one.shape) for name, one in model.named_parameters() if one.requires_grad}
