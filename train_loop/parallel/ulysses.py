"""Ulysses sequence parallelism: attention sees the whole sequence and a part of the heads.

Jacobs et al., "DeepSpeed Ulysses" (2023), around the attention function that transformers has registered under the
model's own implementation, so that the model's branches on that key still hold.
B batch, T sequence, H query heads, K kv heads, D head size, P ranks in the group.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from train_loop.errors import ModelError

Attention = Callable[..., tuple[Tensor, Tensor | None]]


class Ulysses:
    """The wrapped attention of one model, and what it has seen."""

    def __init__(self, model: PreTrainedModel, group: dist.ProcessGroup, inner: Attention) -> None:
        self.group = group
        self.inner = inner
        self.heads: int = model.config.get_text_config().num_attention_heads
        self.members = weakref.WeakSet(model.modules())
        self.seen: dict[int, tuple[int, int]] = {}
        self.layers: int = model.config.get_text_config().num_hidden_layers

    def __call__(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """q [B, H, T/P, D] and k, v [B, K, T/P, D] → output [B, T/P, H, D]; the mask is [B, 1, T, T] or None."""
        if module not in self.members:
            return self.inner(module, q, k, v, mask, **kwargs)
        ranks = dist.get_world_size(self.group)
        if k.shape[1] < ranks:
            k, v = (x.repeat_interleave(ranks // x.shape[1], dim=1) for x in (k, v))
        q, k, v = (seq_to_heads(x, self.group) for x in (q, k, v))
        self.seen[id(module)] = (q.shape[2], q.shape[1])
        out, weights = self.inner(module, q, k, v, mask, **kwargs)  # [B, T, H/P, D]
        return heads_to_seq(out.transpose(1, 2), self.group).transpose(1, 2), weights

    def check_active(self, *, sequence_length: int) -> None:
        """Raise ModelError unless every layer's attention saw [T, H/P]: one that bypasses the registry does not."""
        expected = (sequence_length, self.heads // dist.get_world_size(self.group))
        if len(self.seen) != self.layers or set(self.seen.values()) != {expected}:
            raise ModelError(
                f"Ulysses is not in force: the attention of {len(self.seen)} of {self.layers} layers came through it, "
                f"with (sequence, heads) {sorted(set(self.seen.values()))} where {expected} is right; this model does "
                "not use the transformers attention registry in all layers, so choose ulysses_size: 1"
            )


def apply_ulysses(model: PreTrainedModel, group: dist.ProcessGroup) -> Ulysses | None:
    """Route the model's attention through the group; None where the group is this rank alone."""
    ranks = dist.get_world_size(group)
    if ranks == 1:
        return None
    key = model.config._attn_implementation
    inner = ALL_ATTENTION_FUNCTIONS[key]
    ulysses = Ulysses(model, group, inner.inner if isinstance(inner, Ulysses) else inner)
    ALL_ATTENTION_FUNCTIONS[key] = ulysses
    config = model.config.get_text_config()
    for module in model.modules():
        # The attention function repeats kv heads by this count, which is smaller once kv heads were repeated for P.
        if hasattr(module, "num_key_value_groups"):
            module.num_key_value_groups = config.num_attention_heads // max(config.num_key_value_heads, ranks)
    return ulysses


def seq_to_heads(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[B, H, T/P, D] → [B, H/P, T, D]."""
    ranks = dist.get_world_size(group)
    b, h, t, d = x.shape
    parts = x.reshape(b, ranks, h // ranks, t, d).movedim(1, 0)  # [P, B, H/P, T/P, D]
    gathered = _exchange(parts, group)  # [P, B, H/P, T/P, D], P now counts sequence slices
    return gathered.permute(1, 2, 0, 3, 4).reshape(b, h // ranks, ranks * t, d)


def heads_to_seq(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[B, H/P, T, D] → [B, H, T/P, D]: the inverse of `seq_to_heads`."""
    ranks = dist.get_world_size(group)
    b, h, t, d = x.shape
    parts = x.reshape(b, h, ranks, t // ranks, d).movedim(2, 0)  # [P, B, H/P, T/P, D]
    gathered = _exchange(parts, group)  # P now counts groups of heads
    return gathered.movedim(0, 1).reshape(b, ranks * h, t // ranks, d)


def _exchange(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    out: Tensor = _AllToAll.apply(parts.contiguous(), group)  # type: ignore[no-untyped-call]
    return out


class _AllToAll(torch.autograd.Function):
    """Slice i of the first axis goes to rank i; the same exchange brings gradients back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        out = torch.empty_like(grad, memory_format=torch.contiguous_format)
        dist.all_to_all_single(out, grad.contiguous(), group=ctx.group)
        return out, None
