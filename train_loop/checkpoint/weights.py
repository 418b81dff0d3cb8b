"""Weights of a checkpoint, or their average, without the rest of a run's state: for exports and for inference."""

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load

from train_loop.checkpoint.access import RunAccess
from train_loop.checkpoint.export.tensors import CheckpointTensors
from train_loop.checkpoint.files.reader import CheckpointReader
from train_loop.checkpoint.parts import described
from train_loop.checkpoint.select import prove_parent
from train_loop.errors import CheckpointError
from train_loop.model.families.anatomy import Anatomy
from train_loop.model.lora.names import has_adapters
from train_loop.run_dir import Parent, storage_failed
from train_loop.system.retry import patiently

Weights = Literal["model", "ema"]


def stored_buffers(model: nn.Module) -> set[str]:
    """Return the names of a model's buffers that are saved with its weights."""
    return {name for name, _ in model.named_buffers()} & set(model.state_dict())


def find_weights(anatomy: Anatomy, saved: CheckpointTensors, weights: Weights) -> dict[str, str]:
    """Return the key in a checkpoint of each weight and saved buffer of a model, by the model's names.

    Tied weights appear once; of a model with adapters, only the trained ones. A model without the head of tokens may
    read the checkpoint of one that has it. Raises CheckpointError if the checkpoint lacks a tensor, has it in another
    shape, or has no average.
    """
    model, known = anatomy.model, set(saved.names)
    if weights == "ema" and not any(key.startswith("ema.") for key in known):
        raise CheckpointError("the checkpoint has no average of its weights, as training.ema_decay was not set")
    frozen = has_adapters(model)
    names = [name for name, p in model.named_parameters() if p.requires_grad or not frozen]
    names += sorted(stored_buffers(model))
    shapes = {key.removeprefix("model."): tuple(saved.shape(key)) for key in known if key.startswith("model.")}
    own = anatomy.family.stored_names(model, shapes).own if not shapes.keys() >= set(names) else {}
    renamed = {of: name for name, of in own.items()}
    keys, values = dict[str, str](), dict(model.state_dict(keep_vars=True))
    for name in names:
        place = name if name in shapes else renamed.get(name, name)
        # Weights that are not trained have no average: their own values are used.
        prefixes = ("ema.", "model.") if weights == "ema" else ("model.",)
        found = next((prefix + place for prefix in prefixes if prefix + place in known), None)
        if found is None:
            raise CheckpointError(f"the checkpoint has no weight {name}; it was saved for another model")
        if saved.shape(found) != values[name].shape:
            raise CheckpointError(
                f"{name} is {list(values[name].shape)} and was {list(saved.shape(found))} in the checkpoint; it was "
                "saved for another model"
            )
        keys[name] = found
    return keys


def load_weights(anatomy: Anatomy, access: RunAccess, parent: Parent, weights: Weights) -> None:
    """Read the weights of another run's checkpoint into a sharded model, in its dtype. A collective call.

    Raises UserError if the checkpoint is damaged or missing, CheckpointError as `find_weights`.
    """
    folder = prove_parent(access, parent)
    saved = patiently(partial(CheckpointTensors, folder), seconds=access.patience, may_pass=storage_failed)
    keys = find_weights(anatomy, saved, weights)
    tensors: Mapping[str, Tensor] = dict(anatomy.model.named_parameters()) | dict(anatomy.model.named_buffers())
    wanted: dict[str, Any] = described({key: tensors[name].detach() for name, key in keys.items()})
    try:
        load(wanted, storage_reader=CheckpointReader(folder, patience=access.patience))
    except CheckpointException as error:  # a BaseException, which callers would not log
        step = parent.manifest.step
        raise RuntimeError(f"the checkpoint of step {step} verifies but does not load: {error}") from error
