"""Comparison of a spec's model with the checkpoint or the optimizer state from which it continues."""

import os

from torch import nn

from train_loop.checkpoint.base_weights import other_quantization
from train_loop.checkpoint.export.tensors import CheckpointTensors, saved_shapes
from train_loop.checkpoint.manifest import metadata_name, verify
from train_loop.checkpoint.optimizer_state import check_fits, read_optimizer_state, trained_shapes
from train_loop.checkpoint.weights import find_weights
from train_loop.data.prepare.sources import check_plain
from train_loop.errors import CheckpointError
from train_loop.model.families.anatomy import Anatomy
from train_loop.model.lora.names import has_adapters
from train_loop.preflight.process.fork_server import set_pointer
from train_loop.run_dir import Parent, ReadPolicy, RunDir, local_path
from train_loop.spec import ModelSpec, Problem, TrainingSpec


def checkpoint_problems(anatomy: Anatomy, spec: ModelSpec, parent: Parent, pointer: str) -> list[Problem]:
    """Return the differences between the model and the parent's checkpoint."""
    model, pointer_to_step = anatomy.model, "/model/step" if spec.is_of_job else "/from_checkpoint"
    folder = RunDir.at(parent.run_dir).checkpoint(parent.manifest.step)
    which = f"the checkpoint of step {parent.manifest.step} of {parent.job}"
    try:
        faults = verify(folder, parent.manifest, [metadata_name(parent.manifest)])
        if faults:
            return [Problem(pointer_to_step, f"{which} is damaged: {faults[0]}; choose another one")]
        if spec.is_of_job:
            # It reads the weights alone, and may lack the head.
            find_weights(anatomy, CheckpointTensors(folder), "model")
            return []
        adapts, adapted = has_adapters(model), parent.manifest.base is not None
        if adapts != adapted:
            has, takes = ("adapters", "all weights") if adapted else ("all weights", "adapters")
            message = f"{which} has {has}, and this job trains {takes}; a clone must keep model.lora"
            return [Problem("/model/lora", message)]
        if (fault := other_quantization(parent.manifest, spec.quantize_base)) is not None:
            return [Problem("/model/quantize_base", fault)]
        saved = saved_shapes(folder)
        own = {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad or not adapts}
    except OSError as error:
        return [Problem(pointer_to_step, f"{which} cannot be read: {error}")]
    except CheckpointError as error:
        return [Problem(pointer, f"{which} does not fit: {error}")]
    known = {name for name, _ in model.named_parameters(remove_duplicate=False)} | dict(model.named_buffers()).keys()
    differ = [
        *(
            f"{name} is {list(of)} and was {list(saved[name]) if name in saved else 'missing'}"
            for name, of in own.items()
            if saved.get(name) != of
        ),
        *(f"{name} is missing now" for name in saved if name not in known),
    ]
    if not differ:
        return []
    more = f", and {len(differ) - 1} more" if len(differ) > 1 else ""
    return [Problem(pointer, f"the model differs from {which}: {differ[0]}{more}; a clone must keep the model's sizes")]


def has_its_tokenizer(model: ModelSpec, parent: Parent | None, policy: ReadPolicy) -> bool:
    """Return whether a tokenizer in the cache is the one that was trained on the data of the checkpoint's job."""
    folder = model.tokenizer
    if folder is None or parent is None or not policy.is_cache(os.path.realpath(local_path(folder))):
        return False
    return RunDir.at(parent.run_dir).tokenizer() == folder


def check_optimizer_state(model: nn.Module, training: TrainingSpec, policy: ReadPolicy) -> None:
    """Raise UserError or OSError if the optimizer state that a spec names is not that of its trained parameters."""
    if training.optimizer_state is None:
        return
    set_pointer("/training/optimizer_state")
    check_plain(training.optimizer_state, policy)
    found = read_optimizer_state(training)
    assert found is not None, "the spec names one"
    check_fits(found, training, trained_shapes(model))
