"""A probe of a model's forward pass without weights: one call on the meta device, which computes nothing.

It shows whether the attention comes from the registry, and whether the head is the last operation.
"""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from train_loop.errors import ModelError
from train_loop.model.positions import PositionLimits, TableWatch, fix_dynamic
from train_loop.spec import JobSpec

_LENGTH = 8


@dataclass(frozen=True)
class ModelProbe:
    """Properties of a model that its forward pass on the meta device shows."""

    model: str
    """Name of the model's class."""
    attention_layers: int
    """Number of modules whose attention came from the transformers registry."""
    layers: int
    head_is_last: bool
    """True if the logits are the output of the output embeddings, neither scaled nor capped."""
    positions: PositionLimits


def probe(model: PreTrainedModel) -> ModelProbe:
    """Call a copy of a model on the meta device once. Raises ModelError if it does not accept this loop's call."""
    # A model may keep tensors of its first call, which are on meta here.
    model = copy.deepcopy(model)
    dynamic = fix_dynamic(model)
    key, modules, heads = model.config._attn_implementation, set[nn.Module](), list[Tensor]()

    def attention(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        modules.add(module)
        return q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3]), None

    registered = ALL_ATTENTION_FUNCTIONS[key]
    hook = model.get_output_embeddings().register_forward_hook(lambda _, __, out: heads.append(out))
    ALL_ATTENTION_FUNCTIONS[key] = attention
    try:
        tokens = torch.zeros(1, _LENGTH, dtype=torch.int64, device="meta")
        mask = torch.ones(1, 1, _LENGTH, _LENGTH, dtype=torch.bool, device="meta")
        positions = torch.zeros_like(tokens)
        with torch.no_grad(), TableWatch(positions) as tables:
            logits = model(input_ids=tokens, position_ids=positions, attention_mask=mask, use_cache=False).logits
    except Exception as error:  # errors of a forward pass have no common class
        raise ModelError(
            f"{type(model).__name__} cannot be called with input_ids, position_ids and an attention mask of "
            f"[1, 1, T, T], as this loop does: {' '.join(str(error).split())}; choose another model or config"
        ) from error
    finally:
        ALL_ATTENTION_FUNCTIONS[key] = registered
        hook.remove()
    layers: int = model.config.get_text_config().num_hidden_layers
    limits = PositionLimits(min(tables.rows, default=None), dynamic)
    head_is_last = any(logits is out for out in heads)
    return ModelProbe(type(model).__name__, len(modules), layers, head_is_last=head_is_last, positions=limits)


def check_positions(seen: ModelProbe, spec: JobSpec) -> None:
    """Raise ModelError if a sequence has positions without values, or with values that a restart cannot repeat."""
    length, limits = spec.data.sequence_length, seen.positions
    if limits.table is not None and length > limits.table:
        raise ModelError(
            f"sequence_length={length} is more than the {limits.table} positions of {seen.model}; choose at most "
            f"{limits.table}, or a model with more"
        )
    if limits.dynamic is not None and length > limits.dynamic:
        raise ModelError(
            f"sequence_length={length} is more than max_position_embeddings={limits.dynamic}, and rope_type=dynamic of "
            f"{seen.model} then depends on the longest sequence so far, which a resumed run has not seen; choose at "
            f"most {limits.dynamic}, or rope_type: yarn"
        )


def check_attention(seen: ModelProbe, spec: JobSpec) -> None:
    """Raise ModelError if Ulysses would not reach the attention of every layer."""
    if spec.strategy.ulysses_size > 1 and seen.attention_layers != seen.layers:
        raise ModelError(
            f"ulysses_size={spec.strategy.ulysses_size} needs attention through the transformers registry, which "
            f"{seen.attention_layers} of the {seen.layers} layers of {seen.model} use; choose ulysses_size: 1"
        )


def check_head(seen: ModelProbe, spec: JobSpec) -> None:
    """Raise ModelError for a chunked loss of a model that changes its logits after the head."""
    if spec.training.chunked_loss and not seen.head_is_last:
        raise ModelError(
            f"chunked_loss needs logits as the head returns them, and {seen.model} changes them; remove chunked_loss"
        )
