"""Comparison of a spec's model with the checkpoint or the optimizer state from which it continues."""

from torch import nn

from train_loop.checkpoint.export.tensors import saved_shapes
from train_loop.checkpoint.manifest import metadata_name, verify
from train_loop.checkpoint.optimizer_state import check_fits, read_optimizer_state, trained_shapes
from train_loop.data.prepare.sources import check_plain
from train_loop.preflight.fork_server import set_pointer
from train_loop.run_dir import Parent, ReadPolicy, RunDir
from train_loop.spec import Problem, TrainingSpec


def checkpoint_problems(model: nn.Module, parent: Parent, pointer: str) -> list[Problem]:
    """Return the differences between the model and the parent's checkpoint."""
    folder = RunDir.at(parent.run_dir).checkpoint(parent.manifest.step)
    which = f"the checkpoint of step {parent.manifest.step} of {parent.job}"
    try:
        faults = verify(folder, parent.manifest, [metadata_name(parent.manifest)])
        if faults:
            return [Problem("/from_checkpoint", f"{which} is damaged: {faults[0]}; choose another one")]
        saved, own = saved_shapes(folder), {name: tuple(p.shape) for name, p in model.named_parameters()}
    except OSError as error:
        return [Problem("/from_checkpoint", f"{which} cannot be read: {error}")]
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


def check_optimizer_state(model: nn.Module, training: TrainingSpec, policy: ReadPolicy) -> None:
    """Raise UserError or OSError if the optimizer state that a spec names is not that of its trained parameters."""
    if training.optimizer_state is None:
        return
    set_pointer("/training/optimizer_state")
    check_plain(training.optimizer_state, policy)
    found = read_optimizer_state(training)
    assert found is not None, "the spec names one"
    check_fits(found, training, trained_shapes(model))
