"""Adapters in a folder that a spec names (`model.adapter`): their settings, and their tensors against the model."""

from dataclasses import dataclass

from torch import nn

from train_loop.data.prepare.sources import check_plain
from train_loop.errors import ModelError
from train_loop.model.folder import adapter_folder
from train_loop.model.lora.peft_config import other_base, read_adapter, with_adapter
from train_loop.model.lora.stored import match_adapters
from train_loop.preflight.process.fork_server import set_pointer
from train_loop.run_dir import Parent, ReadPolicy, StorageUnavailable
from train_loop.spec import AnyJobSpec, LoraSpec, ModelSpec, Problem, SpecError

_POINTER = "/model/adapter"


@dataclass(frozen=True)
class AdaptedSpec:
    """A spec with the settings of the adapters that it names."""

    spec: AnyJobSpec
    problems: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()
    """Warnings about the folder."""

    @property
    def lora(self) -> LoraSpec | None:
        """Return these settings; None if the spec names no folder, or has problems."""
        model = self.spec.model
        return None if model.adapter is None or self.problems else model.lora


def read_settings(spec: AnyJobSpec, policy: ReadPolicy, parent: Parent | None) -> AdaptedSpec:
    """Return a spec with the settings of the adapters that it names, or their problems.

    A clone with such settings continues from the adapters in its parent's checkpoint, and reads no folder.
    """
    if spec.model.adapter is None or (parent is not None and spec.model.lora is not None):
        return AdaptedSpec(spec)
    set_pointer(_POINTER)
    try:
        check_plain(spec.model.adapter, policy)
        found, warning = with_adapter(spec), other_base(spec.model)
    except StorageUnavailable:
        raise
    except SpecError as error:
        return AdaptedSpec(spec, tuple(error.problems))
    except (ValueError, OSError) as error:
        return AdaptedSpec(spec, (Problem(_POINTER, str(error)),))
    return AdaptedSpec(found, notes=() if warning is None else (warning,))


def stored_problems(model: nn.Module, spec: ModelSpec) -> list[Problem]:
    """Return the differences between a model with adapters and the folder that a spec names."""
    try:
        folder = adapter_folder(spec)
        if folder is not None:
            set_pointer(_POINTER)
            match_adapters(model, read_adapter(folder))
    except ModelError as error:
        return [Problem(_POINTER, str(error))]
    return []
