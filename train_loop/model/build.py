"""Hugging Face models on the meta device, and random weights that are the same at every world size."""

import difflib
import hashlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from train_loop.errors import ModelError
from train_loop.model.config_faults import stated, with_values
from train_loop.model.folder import model_config
from train_loop.model.supported import check_attends, check_dense, check_kind, check_layers, check_sparse
from train_loop.model.unset import is_unset, set_own, unset_like
from train_loop.spec import ModelSpec

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

_UNDECLARED = ("head_dim", "rope_theta", "rope_type", "partial_rotary_factor")
"""Fields that transformers reads although not every config class declares them."""

_FEW_ELEMENTS = 2**20
"""Maximum elements of a module that is initialised before a run: a larger one takes memory and seconds."""


def build_model(spec: ModelSpec) -> PreTrainedModel:
    """Build the model on the meta device, without memory and weights. Raises ModelError."""

    def build() -> PreTrainedModel:
        hf_config = _hf_config(spec.config) if spec.config is not None else _folder_config(spec)
        check_kind(hf_config)
        return _on_meta(hf_config, DTYPES[spec.master_dtype])

    try:
        model = build()
    except ModelError:
        raise
    except Exception as error:  # transformers' errors for a config have no common class
        reason = stated(error) or f"transformers {transformers.__version__} cannot build it {with_values(error, build)}"
        raise ModelError(
            f"{spec.path or 'model.config'} is not a valid causal language model: {reason}; correct the config"
        ) from error
    check_layers(model)
    model.train()
    return model


def _on_meta(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Build the model of a config. Raises ModelError for a model without scaled dot product attention."""

    def build(attention: str) -> PreTrainedModel:
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                config, attn_implementation=attention, dtype=dtype
            )
        return model

    try:
        return build("sdpa")
    except Exception as error:  # transformers' errors for a config have no common class
        if stated(error) is None:
            check_sparse(config)
        if not isinstance(error, ValueError) or "scaled_dot_product_attention" not in str(error):
            raise
    model = build("eager")
    check_dense(model)
    check_attends(model)
    raise ModelError(
        f"{type(model).__name__} is not supported: transformers {transformers.__version__} computes its attention only "
        "with whole matrices of scores, and this loop needs scaled_dot_product_attention; choose another model"
    )


def _hf_config(config: dict[str, Any]) -> PretrainedConfig:
    """Return the config in its transformers class. Raises ModelError for a field that the class does not have.

    transformers itself keeps a misspelled field and trains with the default.
    """
    hf_config = _config_of_type(config)
    known = {*dir(type(hf_config)), *_UNDECLARED}
    for name in sorted(config.keys() - known):
        raise ModelError(f"{type(hf_config).__name__} has no field {name}; {_near(name, known) or 'remove it'}")
    return hf_config


def _config_of_type(config: dict[str, Any]) -> PretrainedConfig:
    kind = config["model_type"]
    if kind not in CONFIG_MAPPING:
        remedy = _near(kind, CONFIG_MAPPING) or "choose a supported one, for example qwen3 or llama"
        raise ModelError(f"transformers {transformers.__version__} does not support model_type={kind}; {remedy}")
    return AutoConfig.for_model(**config)


def _near(name: str, known: Iterable[str]) -> str | None:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    return f"did you mean {near[0]}?" if near else None


def _folder_config(spec: ModelSpec) -> PretrainedConfig:
    """Return the config of a folder.

    It may have any field, because transformers writes more fields than its classes declare.
    """
    config = model_config(spec)
    if config.get("quantization_config"):
        raise ModelError(f"{spec.path} holds quantised weights, which cannot be trained; give the original model")
    # Code that comes with a model is never run. Many folders contain code although transformers has the model too.
    if config.pop("auto_map", None) and config["model_type"] not in CONFIG_MAPPING:
        raise ModelError(
            f"{spec.path} needs custom code (auto_map), and the code in a model's folder is not run; choose a model "
            "that transformers supports"
        )
    return _config_of_type(config)


def materialise(model: PreTrainedModel, blueprint: PreTrainedModel, *, seed: int, device: torch.device) -> None:
    """Allocate a sharded model with random weights; `blueprint` is the same model on meta, before sharding."""
    allocate(model, blueprint, device=device)
    draw_weights(model, blueprint, dict(blueprint.named_parameters()), seed=seed)


def allocate(
    model: PreTrainedModel, blueprint: PreTrainedModel, *, device: torch.device, stored: Collection[str] = ()
) -> None:
    """Allocate a sharded model and initialise its buffers by the model's own rules; its weights stay uninitialised.

    `stored` names the buffers that a folder holds. Raises ModelError for another buffer that no rule initialises.
    """
    model.to_empty(device=device)
    model.tie_weights()
    buffers = dict(model.named_buffers(remove_duplicate=False))
    for name, module in blueprint.named_modules():
        own = [leaf for leaf, _ in module.named_buffers(recurse=False) if _join(name, leaf) not in stored]
        if own:
            with _initialised(blueprint, name, seed=name):
                for leaf in own:
                    buffers[_join(name, leaf)].copy_(_set_by_a_rule(module, name, leaf))


def draw_weights(model: PreTrainedModel, blueprint: PreTrainedModel, names: Collection[str], *, seed: int) -> None:
    """Initialise the named parameters with random values by the model's own rules.

    Each module's full weights come from (seed, module name), and every rank keeps its slice. The weights therefore do
    not depend on the mesh, and the memory cost is the largest single module. Raises ModelError for a parameter that no
    rule initialises.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, module in blueprint.named_modules():
        leaves = [leaf for leaf, _ in module.named_parameters(recurse=False) if _join(name, leaf) in names]
        if leaves:
            with _initialised(blueprint, name, seed=f"{seed}/{name}"):
                for leaf in leaves:
                    mine, part = own_part(parameters[_join(name, leaf)])
                    mine.copy_(_set_by_a_rule(module, name, leaf)[part])


def check_rules(model: PreTrainedModel, stored: Collection[str] = ()) -> None:
    """Raise ModelError for a parameter or buffer of a model on meta that no rule initialises, before the run.

    `stored` names the tensors that a folder holds. Checks the first of several modules of a kind, and leaves large
    modules to the run.
    """
    checked = set[tuple[object, ...]]()
    for name, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False)) | dict(module.named_buffers(recurse=False))
        leaves = [leaf for leaf in own if _join(name, leaf) not in stored]
        alike = (type(module), *leaves)
        if not leaves or alike in checked or sum(tensor.numel() for tensor in own.values()) > _FEW_ELEMENTS:
            continue
        checked.add(alike)
        with _initialised(model, name, seed=name):
            for leaf in leaves:
                _set_by_a_rule(module, name, leaf)


@contextmanager
def _initialised(blueprint: PreTrainedModel, name: str, *, seed: str) -> Iterator[None]:
    """Fill one module of a model on meta with initialised tensors within the context.

    Applies the module's own rule first, then the rules of its parents: GPT-2's redraw some weights of their children.
    """
    module, parts = blueprint.get_submodule(name), name.split(".")
    parameters, buffers = dict(module._parameters), dict(module._buffers)
    real = {leaf: unset_like(t) for leaf, t in (parameters | buffers).items() if t is not None}
    module._parameters.update({leaf: nn.Parameter(real[leaf]) for leaf in parameters.keys() & real.keys()})
    module._buffers.update({leaf: real[leaf] for leaf in buffers.keys() & real.keys()})
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(int.from_bytes(hashlib.sha256(seed.encode()).digest()[:8], "little", signed=True))
            holders = list(dict.fromkeys(".".join(parts[:depth]) for depth in range(len(parts), -1, -1)))
            for place, holder in enumerate(holders):
                _apply_rule(blueprint, holder, holders[place:])
            set_own(module)
        yield
    finally:
        module._parameters.update(parameters)
        module._buffers.update(buffers)


def _apply_rule(blueprint: PreTrainedModel, holder: str, parents: Sequence[str]) -> None:
    """Initialise a module by the rule of the innermost model among itself and its parents, as transformers does."""
    models = (blueprint.get_submodule(parent) for parent in parents)
    model = next(one for one in models if isinstance(one, PreTrainedModel))
    try:
        model._init_weights(blueprint.get_submodule(holder))
    except Exception as error:  # rules have no common error class
        raise ModelError(
            f"transformers {transformers.__version__} cannot initialise {holder or type(blueprint).__name__}"
            f"{f': {said}' if (said := stated(error)) else ''}; correct the config, or choose another model"
        ) from error


def _set_by_a_rule(module: nn.Module, name: str, leaf: str) -> Tensor:
    """Return an initialised parameter or buffer of a module. Raises ModelError if no rule has set all of it."""
    tensor: Tensor = getattr(module, leaf).detach()
    if is_unset(tensor):
        raise ModelError(
            f"transformers {transformers.__version__} does not initialise {_join(name, leaf)} "
            f"({type(module).__name__}), so its values would be random memory; give a folder with weights in "
            "model.path, or choose another model"
        )
    return tensor


def own_part(tensor: Tensor) -> tuple[Tensor, tuple[slice, ...]]:
    """Return this rank's writable shard of a tensor, and the slices of the whole tensor that it covers."""
    if not isinstance(tensor, DTensor):
        return tensor.detach(), tuple(slice(0, size) for size in tensor.shape)
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    part = tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
    return tensor.to_local().detach(), part


def _join(name: str, leaf: str) -> str:
    return f"{name}.{leaf}" if name else leaf
