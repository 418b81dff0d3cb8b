"""Modules that a user's own code builds."""

import copy
import inspect
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from train_loop.code.load import OwnCode
from train_loop.errors import ModelError
from train_loop.model.build import DTYPES
from train_loop.model.families.anatomy import Anatomy, is_norm, modules_of
from train_loop.model.families.family import Examination, ExportFacts, Family, SettingCheck
from train_loop.run_dir import write_durably
from train_loop.spec import BudgetSpec, JobSpec, ModelSpec

_RULES_OF_MODULES = ("reset_parameters", "_reset_parameters")
"""Methods that initialise a module, by the convention of torch.nn."""
_NUMBERS = re.compile(r"\b(int|float|bool|str|dtype|device)\b")
"""Types of arguments that are no modules."""
_SPLIT = "split_sequence"
"""Method of models whose ranks can share a sequence; it is called with a `SequencePart`."""
_RULES_OF_MODELS = ("init_weights", "_init_weights")
"""Methods that initialise all modules of a model: all at once, or their argument."""
_UNDECAYED = "_no_weight_decay"
"""Attribute of parameters that do not decay, by the convention of state-space models (Gu and Dao, "Mamba", 2023)."""


class OwnModels(Family):
    """The models of one package of users' code."""

    def __init__(self, code: OwnCode) -> None:
        self.code = code

    @property
    def source(self) -> str:
        """Return the function that builds the model."""
        return self.code.spec.model

    @property
    def remedy_for_unset(self) -> str:
        """Return the remedy for a tensor that no rule initialises."""
        return "set it in reset_parameters of its module, or in init_weights of the model"

    def build(self, spec: ModelSpec) -> Anatomy:
        """Build the module on the meta device, in the dtype of its weights. Raises ModelError."""
        with self.code.faults_of(self.source), torch.device("meta"):
            model = self.code.model(copy.deepcopy(self.code.spec.config))
        _check(model, self.source)
        with self.code.faults_of(f"a copy of the module of {self.source}"):
            # Each rank keeps one, to initialise its shards by the rules of whole modules.
            copy.deepcopy(model)
        return self.anatomy(model.to(DTYPES[spec.master_dtype]).train())

    def anatomy(self, model: nn.Module) -> Anatomy:
        """Return the parts of a module that the loop can know: its layers, if it states them, and its norms."""
        return Anatomy(
            model,
            self,
            layers=tuple(modules_of(model, getattr(model, "_no_split_modules", None) or ())),
            embeddings=None,
            head=None,
            norms=tuple(one for one in model.modules() if is_norm(one)),
            depth=0,
            attention_width=0,
            undecayed=_undecayed(model),
        )

    def examine(self, anatomy: Anatomy, spec: JobSpec) -> Examination:
        """Return that nothing is known of the module's attention and head."""

        def check() -> None:
            policy = spec.strategy.wrap_policy
            named = anatomy.layers or policy.transformer_layer_cls_to_wrap or policy.min_num_params is not None
            how = spec.model.gradient_checkpointing
            if how not in ("none", "full") and not isinstance(how, BudgetSpec) and not named:
                raise ModelError(
                    f"gradient_checkpointing={how} needs layers, and {self.source} has none; choose full, or name "
                    "layers in strategy.wrap_policy or _no_split_modules"
                )

        settings = [SettingCheck("/model/gradient_checkpointing", check)]
        if spec.strategy.ulysses_size > 1:
            settings.append(SettingCheck("/strategy/ulysses_size", partial(self._check_split, anatomy.model)))
        return Examination({}, after_head=None, settings=tuple(settings))

    def _check_split(self, model: nn.Module) -> None:
        if not callable(getattr(model, _SPLIT, None)):
            raise ModelError(
                f"{type(model).__name__} of {self.source} has no method {_SPLIT}, by which ranks share a sequence; add "
                "it, or choose ulysses_size: 1"
            )

    def split_sequence(self, model: nn.Module, part: object) -> bool:
        """Call the model's method with this rank's part of each sequence. Raises ModelError."""
        self._check_split(model)
        with self.code.faults_of(f"{_SPLIT} of {self.source}"):
            getattr(model, _SPLIT)(part)
        return True

    def initialise(self, model: nn.Module, name: str) -> None:
        """Apply a module's own rule, then those of the modules around it, which may set tensors inside of them."""
        module, parts = model.get_submodule(name), name.split(".")
        holders = dict.fromkeys(".".join(parts[:depth]) for depth in range(len(parts), -1, -1))
        with self.code.faults_of(f"the initialisation of {name or type(model).__name__}"):
            for holder in map(model.get_submodule, holders):
                for rule in _rules(holder, module):
                    rule()

    def call(self, model: nn.Module, columns: Mapping[str, Tensor], arguments: Mapping[str, Any]) -> Tensor:
        """Raise RuntimeError: the user's loss calls the module."""
        raise RuntimeError("own code is called by its loss")

    def write_configs(self, model: nn.Module, folder: Path, facts: ExportFacts) -> None:
        """Write code.json: the function, its config and the package with which the weights were trained."""
        fields = self.code.spec.model_dump(include={"package", "model", "config", "sha256"})
        write_durably(folder / "code.json", json.dumps(fields, indent=2) + "\n")


def _undecayed(model: nn.Module) -> frozenset[tuple[nn.Module, str]]:
    named = ((one, leaf, p) for one in model.modules() for leaf, p in one.named_parameters(recurse=False))
    return frozenset((one, leaf) for one, leaf, p in named if getattr(p, _UNDECAYED, False))


def _rules(holder: nn.Module, module: nn.Module) -> Iterator[Callable[[], object]]:
    """Yield the calls by which a module, or one around it, initialises a module."""
    if (rule := _method(holder, _RULES_OF_MODULES)) is not None:
        yield rule
    if (rule := _method(holder, _RULES_OF_MODELS)) is not None:
        yield from _of_model(rule, module)


def _of_model(rule: Callable[..., object], module: nn.Module) -> Iterator[Callable[[], object]]:
    """Yield the call of a model's rule: for each module, as by nn.Module.apply, or once for all.

    One that needs other arguments, as those of torchtitan's layers do, is left to the rule that calls it.
    """
    needed = [one for one in inspect.signature(rule).parameters.values() if one.default is one.empty]
    needed = [one for one in needed if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    if not needed:
        yield rule
    elif len(needed) == 1 and not _NUMBERS.search(str(needed[0].annotation)):
        yield partial(rule, module)


def _method(module: nn.Module, names: tuple[str, ...]) -> Callable[..., object] | None:
    return next((method for name in names if callable(method := getattr(module, name, None))), None)


def _check(model: object, entry: str) -> None:
    """Raise ModelError for a model that is not a module on meta, or whose result depends on the number of ranks."""
    if not isinstance(model, nn.Module):
        raise ModelError(f"{entry} returned a {type(model).__name__}; return a torch.nn.Module")
    if not any(True for _ in model.parameters()):
        raise ModelError(f"{entry} returned a module without parameters, so that there is nothing to train; add some")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ModelError(f"{entry} returned a module whose parameters are all frozen; leave some of them trainable")
    known = {id(part) for part in (*model.modules(), *model.parameters(), *model.buffers())}
    for name, module in model.named_modules():
        _check_attributes(f"{name} of {entry}" if name else entry, module, known)
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm):
            raise ModelError(
                f"{name} of {entry} is a {type(module).__name__}, whose result depends on the rows that a rank has; "
                "choose a norm of single samples, such as LayerNorm or GroupNorm"
            )
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            _check_embedding(f"{name} of {entry}" if name else entry, module)
    _check_tensors(model, entry)
    _check_layers(model, entry)


def _check_layers(model: nn.Module, entry: str) -> None:
    """Raise ModelError for names of layers that are no classes of the module's parts."""
    named = getattr(model, "_no_split_modules", None)
    if named in (None, [], ()):
        return
    if not isinstance(named, list | tuple) or not all(isinstance(one, str) for one in named):
        raise ModelError(f"_no_split_modules of {entry} is {named!r}; expected a list of names of classes")
    if not modules_of(model, named):
        classes = dict.fromkeys(type(one).__name__ for one in model.modules() if one is not model)
        raise ModelError(
            f"_no_split_modules of {entry} names {', '.join(named)}, and no part of the module has such a class; "
            f"choose among {', '.join(classes)}"
        )


def _check_embedding(shown: str, module: nn.Embedding | nn.EmbeddingBag) -> None:
    if module.sparse:
        raise ModelError(f"{shown} has sparse gradients, which FSDP cannot sum; create it with sparse=False")
    if module.max_norm is not None:
        raise ModelError(
            f"{shown} has max_norm, which changes gathered weights in the forward pass; create it without max_norm, "
            "and normalise what it returns"
        )


def _check_tensors(model: nn.Module, entry: str) -> None:
    """Raise ModelError for a parameter or buffer that cannot be allocated, initialised and sharded."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise ModelError(f"{name} of {entry} is lazy: its size is known only after a call; give it a size")
        if tensor.device.type != "meta":
            raise ModelError(
                f"{entry} creates {name} on the device {tensor.device}; create all tensors without a device, and set "
                "their values in reset_parameters or init_weights"
            )
        if tensor.is_complex():
            raise ModelError(f"{name} of {entry} is complex, which is not supported; use pairs of real numbers")
    for name, parameter in model.named_parameters():
        if not parameter.ndim:
            raise ModelError(
                f"{name} of {entry} is a parameter without dimensions, which FSDP cannot shard; give it the shape [1]"
            )


def _check_attributes(shown: str, module: nn.Module, known: Collection[int]) -> None:
    """Raise ModelError for tensors and modules that torch does not know as parts of a module, and would not fill.

    `known` has the ids of the model's parts: a list of registered ones is valid, as in nn.LSTM.
    """
    for name, value in vars(module).items():
        if name in _OF_TORCH:
            continue
        parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
        for part in parts:
            if id(part) in known:
                continue
            if isinstance(part, nn.Module):
                raise ModelError(f"{shown} holds modules in {name}, a {type(value).__name__}; use {_LISTS[0]}")
            if isinstance(part, nn.Parameter):
                raise ModelError(f"{shown} holds parameters in {name}, a {type(value).__name__}; use {_LISTS[1]}")
            if isinstance(part, Tensor) and part.is_meta:
                raise ModelError(
                    f"{shown} keeps the tensor {name} as an attribute, whose values are lost, because modules are "
                    "built without memory; register it with register_buffer, and set it in reset_parameters"
                )


_OF_TORCH = frozenset(vars(nn.Module()))
"""Attributes of every module: its parameters, buffers, children and hooks."""
_LISTS = ("nn.ModuleList or nn.ModuleDict", "nn.ParameterList or nn.ParameterDict")
