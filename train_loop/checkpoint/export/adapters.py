"""Exports of runs with adapters (`model.lora`): a folder of peft, or the model with the adapters in its weights."""

import copy
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from train_loop.checkpoint.base_weights import check_base
from train_loop.checkpoint.export.tensors import CheckpointTensors, Piece, whole
from train_loop.checkpoint.weights import Weights, find_weights, stored_buffers
from train_loop.model.build import drawn_weights
from train_loop.model.families.anatomy import Anatomy
from train_loop.model.folder import model_folder
from train_loop.model.load import Joined, Stored, match_folder, weight_files
from train_loop.model.lora.adapters import (
    check_peft_reads,
    inject_adapters,
    peft_config,
    trained_parameters,
)
from train_loop.model.lora.base import DrawnWeights, base_sha256
from train_loop.model.lora.merge import layers_with_adapters, merged_layer
from train_loop.model.lora.names import plain_name
from train_loop.model.lora.peft_config import PREFIX, task_type
from train_loop.model.lora.saved import choose
from train_loop.model.lora.stored import stored_name
from train_loop.model.lora.targets import Targets, find_targets
from train_loop.model.quantize import frozen_linears, quantise, restore
from train_loop.parallel.units import repeated_layers
from train_loop.run_dir import BaseWeights, Manifest
from train_loop.spec import JobSpec, LoraSpec


@dataclass(frozen=True)
class Adapted:
    """A checkpoint of adapters, with its model on meta."""

    spec: JobSpec
    lora: LoraSpec
    plain: Anatomy
    """The model without adapters."""
    anatomy: Anatomy
    """The model with adapters."""
    targets: Targets
    saved: CheckpointTensors
    places: Mapping[str, str]
    """Key in the checkpoint of each trained weight and saved buffer, by its name in the model with adapters."""

    @cached_property
    def trained(self) -> dict[str, str]:
        """The name in peft's file of each trained weight, and of buffers of whole modules, by its name in the model."""
        whole = tuple(f"{name}." for name in self.targets.saved)
        buffers = [name for name in stored_buffers(self.anatomy.model) if name.startswith(whole)]
        names = [*trained_parameters(self.anatomy.model), *sorted(buffers)]
        return {name: f"{PREFIX}{stored_name(name)}" for name in names}

    def write_config(self, folder: Path) -> None:
        """Write adapter_config.json for peft. Raises ModelError if peft would read it otherwise."""
        config = peft_config(self.lora, self.targets)
        config.target_modules = {*self._short_targets}
        config.modules_to_save = [*self.targets.saved] or None
        config.base_model_name_or_path = str(model_folder(self.spec.model) or "") or None
        config.task_type = task_type(self.spec.model)
        if config.task_type is None:
            kind = type(self.plain.model)
            config.auto_mapping = {"base_model_class": kind.__name__, "parent_library": kind.__module__}
        layers = [self.anatomy.model.get_submodule(name) for name in self.targets.modules]
        config.fan_in_fan_out = bool(layers) and all(getattr(layer, "fan_in_fan_out", False) for layer in layers)
        config.inference_mode = True
        check_peft_reads(config, self.plain.model)
        config.save_pretrained(str(folder))

    @property
    def _short_targets(self) -> tuple[str, ...]:
        """Last parts of the targets' names if no other module has them, which other programs expect; else the names.

        peft takes some last parts for those of experts in older versions of transformers. Models of embeddings have
        no pooler here, and have one in transformers.
        """
        if self.plain.experts or self.plain.labels == 0:
            return self.targets.modules
        last = {name.rpartition(".")[2] for name in self.targets.modules}
        same = {name for name, _ in self.plain.model.named_modules() if name.rpartition(".")[2] in last}
        return tuple(sorted(last)) if same == {*self.targets.modules} else self.targets.modules

    def check_base(self, manifest: Manifest) -> None:
        """Raise ModelError if the frozen weights differ from those to which the adapters belong."""
        model, drawn = self.spec.model, DrawnWeights()
        for name, value in drawn_weights(self.plain, self._absent, seed=self.spec.training.seed):
            drawn.add(name, value)
        sha256 = base_sha256(weight_files(model), drawn)
        check_base(BaseWeights(path=model.path, sha256=sha256, quantized=model.quantize_base), manifest)

    @cached_property
    def _absent(self) -> list[str]:
        """Names of the frozen weights that are drawn."""
        names = [name for name, _ in self.plain.model.named_parameters()]
        return [name for name in names if not self._stored.get(name)]

    @cached_property
    def _stored(self) -> Mapping[str, list[Stored | Joined]]:
        folder = model_folder(self.spec.model)
        return {} if folder is None else match_folder(self.plain, folder).homes

    def read(self, name: str) -> Tensor:
        """Return a parameter by its name in the model with adapters, in the dtype in which it is trained."""
        if name in self.places:
            return whole(self.saved.pieces(self.places[name])).values
        plain = plain_name(self.anatomy.model, name)
        kind, value = self.spec.model.quantize_base, self._read_frozen(plain)
        if kind is not None and plain in self._quantized:
            return restore(*quantise(value, kind), kind, torch.float32)
        return value.to(self.plain.model.get_parameter(plain).dtype)

    def _read_frozen(self, plain: str) -> Tensor:
        if stored := self._stored.get(plain):
            shape = self.plain.model.get_parameter(plain).shape
            value: Tensor = stored[0].read(tuple(slice(0, size) for size in shape))
            return value
        ((_, value),) = drawn_weights(self.plain, [plain], seed=self.spec.training.seed)
        return value

    @cached_property
    def _quantized(self) -> Collection[str]:
        """Names, without adapters, of the frozen weights that the run stores in few bits."""
        model, kind = self.anatomy.model, self.spec.model.quantize_base
        if kind is None:
            return ()
        layers = repeated_layers(self.anatomy, self.spec.strategy.wrap_policy)
        weights = {id(one.weight) for one in frozen_linears(self.anatomy, layers, kind)}
        return {plain_name(model, name) for name, p in model.named_parameters() if id(p) in weights}


def open_adapters(
    spec: JobSpec, plain: Anatomy, saved: CheckpointTensors, manifest: Manifest, weights: Weights
) -> Adapted:
    """Return a checkpoint of adapters, given its model without them. Raises ModelError, CheckpointError.

    The frozen weights must be those to which the adapters belong.
    """
    assert spec.model.lora is not None, "the caller has checked"
    # It also prepares the model for calls.
    plain.family.examine(plain, spec)
    anatomy, lora = plain.family.anatomy(copy.deepcopy(plain.model)), spec.model.lora
    targets = find_targets(choose(plain, spec.model))
    inject_adapters(anatomy, spec.model)
    adapted = Adapted(spec, lora, plain, anatomy, targets, saved, find_weights(anatomy, saved, weights))
    adapted.check_base(manifest)
    return adapted


class MergedTensors:
    """The tensors of a model with the adapters in its weights, by the names of the model without adapters.

    Weights are sums in fp32. One layer with adapters is in memory at a time, or one other tensor.
    """

    def __init__(self, adapted: Adapted) -> None:
        self._adapted = adapted
        self._layer_of = layers_with_adapters(adapted.anatomy.model)
        self._layer, self._merged = "", dict[str, Tensor]()
        model = adapted.anatomy.model
        named = chain(model.named_parameters(), model.named_buffers())
        self._names = {plain_name(model, name): name for name, _ in named}

    @property
    def names(self) -> list[str]:
        """Names of all weights, and of buffers that are saved."""
        weights = [name for name, _ in self._adapted.plain.model.named_parameters()]
        return weights + sorted(stored_buffers(self._adapted.plain.model))

    def shape(self, name: str) -> torch.Size:
        """Return the shape of a tensor."""
        tensor: Tensor = self._adapted.plain.model.state_dict(keep_vars=True)[name]
        return tensor.shape

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a saved buffer, or that of merged weights."""
        key = self._adapted.places.get(self._names[name])
        return torch.float32 if key is None else self._adapted.saved.dtype(key)

    def pieces(self, name: str) -> Iterator[Piece]:
        """Yield a whole tensor."""
        value = self._value(name)
        yield Piece((0,) * value.ndim, value)

    def _value(self, name: str) -> Tensor:
        layer = self._layer_of.get(name)
        if layer is None:
            return self._adapted.read(self._names[name])
        if layer != self._layer:
            self._layer, self._merged = layer, merged_layer(self._adapted.anatomy.model, layer, self._adapted.read)
        return self._merged[name]
