"""Choice of a model's attention implementation, and its inputs that separate packed documents."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import (
    create_causal_mask,
    create_chunked_causal_mask,
    create_sliding_window_causal_mask,
)
from transformers.modeling_flash_attention_utils import prepare_fa_kwargs_from_position_ids
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

from train_loop.errors import ModelError
from train_loop.model.families.causal.own_attention import call_registry, own_attention
from train_loop.model.families.family import SPLIT_ATTENTION, Attention
from train_loop.model.precision import attends_in_fp32
from train_loop.plan import MASK_BYTES, mask_bytes
from train_loop.spec import JobSpec

_EAGER = "eager_attention_forward"
_FLASH = {"flash_attention_3": is_flash_attn_3_available, "flash_attention_2": is_flash_attn_2_available}
_CAPABILITIES = {"flash_attention_3": (9, 9), "flash_attention_2": (8, 99)}
"""First and last major compute capability that each implementation runs on: Hopper; Ampere and later."""

_SPECIAL = {
    "sliding_attention": create_sliding_window_causal_mask,
    "chunked_attention": create_chunked_causal_mask,
}
"""Masks of the types of layers that attend to a part of a document."""


def apply_attention(model: PreTrainedModel, spec: JobSpec, device: torch.device) -> None:
    """Set the attention implementation of the spec. Raises ModelError if it cannot run here."""
    wanted = spec.model.attn_implementation
    major, minor = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    installed = [name for name, is_available in _FLASH.items() if is_available()]
    halves = not attends_in_fp32(model, spec.strategy)
    best = best_attention(spec, device, major=major, installed=installed, halves=halves)
    chosen = best if wanted == "auto" else wanted
    if wanted == "auto" and not _is_supported(model, chosen):
        chosen = "flex_attention" if device.type == "cuda" and _is_supported(model, "flex_attention") else "eager"
    if chosen in _FLASH and chosen not in installed:
        raise ModelError(f"attn_implementation={chosen} is not installed on the workers; install it, or choose sdpa")
    if chosen in _FLASH and not _runs(chosen, major):
        raise ModelError(
            f"attn_implementation={chosen} needs a GPU of compute capability {_CAPABILITIES[chosen][0]}.x"
            f"{'' if chosen == 'flash_attention_3' else ' or later'}, but a worker has {major}.{minor}; choose sdpa"
        )
    if chosen == "flex_attention" and device.type == "cpu":
        raise ModelError("attn_implementation=flex_attention has no backward pass on CPUs; choose sdpa")
    try:
        model.set_attn_implementation(chosen)
    except (ValueError, ImportError) as error:
        other = "sdpa" if _is_supported(model, "sdpa") else "auto"
        raise ModelError(
            f"attn_implementation={chosen} is not supported by {type(model).__name__}; choose {other}"
        ) from error


def _is_supported(model: PreTrainedModel, name: str) -> bool:
    """Return whether a model's class has an implementation of attention."""
    flag = {"sdpa": "_supports_sdpa", "flex_attention": "_supports_flex_attn"}.get(name, "_supports_flash_attn")
    return bool(getattr(model, flag))


def best_attention(
    spec: JobSpec, device: torch.device, *, major: int, installed: Sequence[str], halves: bool = True
) -> str:
    """Return the implementation that `auto` selects for a device.

    `major` is its major compute capability, and `installed` lists the installed flash packages. `halves` is False if
    a layer attends in fp32 though the model computes in another dtype.
    """
    if device.type != "cuda":
        return "sdpa"
    flash = [name for name in installed if halves and spec.model.dtype != "fp32" and _runs(name, major)]
    if flash:
        return flash[0]
    return "flex_attention" if mask_bytes(spec) > MASK_BYTES else "sdpa"


def _runs(flash: str, major: int) -> bool:
    first, last = _CAPABILITIES[flash]
    return first <= major <= last


def attention_inputs(model: PreTrainedModel, position_ids: Tensor) -> dict[str, Any]:
    """Return the model's arguments that separate documents in the full sequence [B, T], by transformers' rules.

    Flash attention gets the bounds of documents, every other implementation gets masks. Call it once per micro-batch,
    before the sequence is split: under Ulysses the model has only its slice and cannot build them.
    """
    if model.config._attn_implementation in _FLASH:
        (bounds, _), (longest, _) = prepare_fa_kwargs_from_position_ids(position_ids)
        lengths = {"max_length_q": int(longest), "max_length_k": int(longest)}
        return {"attention_mask": None, "cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, **lengths}
    return {"attention_mask": _masks(model, position_ids)}


def _masks(model: PreTrainedModel, position_ids: Tensor) -> Any:
    """Return the mask [B, 1, T, T]; None if plain causal attention is right; a dict if layers differ."""
    config = model.config.get_text_config()
    arguments = {
        "config": config,
        "inputs_embeds": torch.empty((*position_ids.shape, 1), dtype=torch.float32, device=position_ids.device),
        "attention_mask": None,
        "past_key_values": None,
        "position_ids": position_ids,
    }
    kinds = getattr(config, "layer_types", None)
    if kinds is None and getattr(config, "sliding_window", None) is not None:
        return create_sliding_window_causal_mask(**arguments)
    full = create_causal_mask(**arguments)
    special = {kind: build for kind, build in _SPECIAL.items() if kind in (kinds or ())}
    if not special:
        return full
    # Layers without attention, such as convolutions, would only get padding from a mask.
    masks = dict.fromkeys(kinds or ()) | {"full_attention": full}
    return masks | {kind: build(**arguments) for kind, build in special.items()}


def eager_attention(module: nn.Module, *inputs: Any, **named: Any) -> tuple[Tensor, Tensor | None]:
    """Compute attention with whole matrices of scores, by the function in the file of a module's class.

    Families without SDPA have their own: scores with a cap, or sinks.
    """
    own = own_attention(module)
    if own is not None:
        return own(module, *inputs, **named)
    # A module that is an FSDP unit has a class of FSDP2's before its own.
    files = (vars(sys.modules[kind.__module__]) for kind in module.__class__.__mro__)
    function: Attention = next(file[_EAGER] for file in files if _EAGER in file)
    return function(module, *inputs, **named)


# transformers registers none, and would call the same function.
ALL_ATTENTION_FUNCTIONS.register("eager", eager_attention)


def register_attention(model: nn.Module) -> None:
    """Make modules that compute attention themselves call the registry, in place; other models stay."""
    call_registry(model, _registered_eager)


def _registered_eager(module: nn.Module, *inputs: Any, **named: Any) -> tuple[Tensor, Tensor | None]:
    found: tuple[Tensor, Tensor | None] = ALL_ATTENTION_FUNCTIONS["eager"](module, *inputs, **named)
    return found


class ModuleAttention:
    """A registered attention function without state: it computes by the calling module's `SPLIT_ATTENTION`, if any."""

    def __init__(self, plain: Attention) -> None:
        self.plain = plain

    def __call__(self, module: nn.Module, *inputs: Any, **named: Any) -> tuple[Tensor, Tensor | None]:
        """Compute the attention of a module."""
        attention: Attention | None = getattr(module, SPLIT_ATTENTION, None)
        return self.plain(module, *inputs, **named) if attention is None else attention(module, *inputs, **named)


def divert_attention(model: PreTrainedModel) -> Attention:
    """Return the registered function of a model's attention, whose place a `ModuleAttention` takes.

    All models of a process share the registry. The key stays the same, so that the model's branches on it still hold.
    """
    found = registered_attention(model)
    if not isinstance(found, ModuleAttention):
        found = ALL_ATTENTION_FUNCTIONS[model.config._attn_implementation] = ModuleAttention(found)
    return found.plain


def registered_attention(model: PreTrainedModel) -> Attention:
    """Return the function in the transformers registry that a model's attention layers call."""
    found: Attention = ALL_ATTENTION_FUNCTIONS[model.config._attn_implementation]
    return found


@contextmanager
def attention_replaced(model: PreTrainedModel, function: Attention) -> Iterator[None]:
    """Let a model's attention layers call `function`. All models of the process share the registry."""
    key, registered = model.config._attn_implementation, registered_attention(model)
    ALL_ATTENTION_FUNCTIONS[key] = function
    try:
        yield
    finally:
        ALL_ATTENTION_FUNCTIONS[key] = registered
