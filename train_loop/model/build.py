"""A Hugging Face model without memory, and its random weights, the same at every world size."""

import copy
import difflib
import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from train_loop.errors import ModelError
from train_loop.spec import ModelSpec

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

_UNDECLARED = ("head_dim", "rope_theta", "rope_type", "partial_rotary_factor")
"""Fields that transformers reads although not every config class declares them."""


def build_model(spec: ModelSpec) -> PreTrainedModel:
    """Build the model on the meta device: no memory, no weights. Raises ModelError."""
    try:
        hf_config = _hf_config(spec.config or {})
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                hf_config, attn_implementation="sdpa", dtype=DTYPES[spec.master_dtype]
            )
    except ModelError:
        raise
    except Exception as error:  # what a config can make transformers raise has no common class
        raise ModelError(f"model.config builds no causal language model: {' '.join(str(error).split())}") from error
    _check_layers(model)
    model.train()
    return model


def _hf_config(config: dict[str, Any]) -> PretrainedConfig:
    """The config, held against its class: transformers itself keeps a misspelled field and trains the default."""
    hf_config = AutoConfig.for_model(**config)
    known = {*dir(type(hf_config)), *_UNDECLARED}
    for name in sorted(config.keys() - known):
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}?" if near else "remove it"
        raise ModelError(f"{type(hf_config).__name__} has no field {name}; {hint}")
    return hf_config


def _check_layers(model: PreTrainedModel) -> None:
    """Raise ModelError for layers whose documents this loop would not keep apart."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    strange = sorted(kinds - {"full_attention", "sliding_attention"})
    if strange:
        raise ModelError(f"{model.config.model_type} has layers of kind {', '.join(strange)}, not supported yet")


def materialise(model: PreTrainedModel, blueprint: PreTrainedModel, *, seed: int, device: torch.device) -> None:
    """Give a sharded model memory and random weights; `blueprint` is the same model on meta, before it was sharded.

    Each module's full weights come from (seed, module name) and every rank keeps its own slice, so that the weights do
    not depend on the mesh; the largest single module is what it costs in memory.
    """
    model.to_empty(device=device)
    model.tie_weights()
    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    done: set[int] = set()
    for name, module in blueprint.named_modules():
        if not set(map(id, _own(module))) - done:
            continue
        done |= set(map(id, _own(module)))
        full = _initialised(blueprint, module, f"{seed}/{name}")
        for leaf, weight in full.named_parameters(recurse=False):
            _keep_slice(parameters[_join(name, leaf)], weight.detach())
        for leaf, buffer in full.named_buffers(recurse=False):
            buffers[_join(name, leaf)].copy_(buffer)


def _own(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)


def _initialised(model: PreTrainedModel, module: nn.Module, seed: str) -> nn.Module:
    """A copy of one module, without its children, with the weights that the model's own rule gives it."""
    alone = copy.copy(module)
    alone._modules = {}
    alone = copy.deepcopy(alone).to_empty(device="cpu")
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(int.from_bytes(hashlib.sha256(seed.encode()).digest()[:8], "little", signed=True))
        model._init_weights(alone)
    return alone


def _keep_slice(target: Tensor, full: Tensor) -> None:
    with torch.no_grad():
        if isinstance(target, DTensor):
            # No communication: every rank has drawn the same full tensor.
            full = distribute_tensor(full.to(target.device), target.device_mesh, target.placements, src_data_rank=None)
        target.copy_(full)


def _join(name: str, leaf: str) -> str:
    return f"{name}.{leaf}" if name else leaf
