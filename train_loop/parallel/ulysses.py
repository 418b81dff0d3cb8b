"""Ulysses sequence parallelism: attention sees the whole sequence and a part of the heads.

Jacobs et al., "DeepSpeed Ulysses" (2023). It wraps the attention function that transformers has registered under the
model's own implementation, so that the model's branches on that key still hold. Shapes: B batch, T sequence, H query
heads, K kv heads, D head size, P ranks in the group.
"""

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import _resolve_process_group
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from train_loop.errors import ModelError
from train_loop.telemetry.timers import ComputeTimer

Attention = Callable[..., tuple[Tensor, Tensor | None]]


class Ulysses:
    """The wrapped attention of one model, and the exchanges of its current or last forward pass."""

    def __init__(self, model: PreTrainedModel, group: dist.ProcessGroup, inner: Attention, timer: ComputeTimer) -> None:
        self.config = model.config.get_text_config()
        self.group = group
        self.ranks = dist.get_world_size(group)
        self.inner = inner
        self.timer = timer
        self.exchanged: Counter[tuple[int, ...]] = Counter()
        _LISTENING[group.group_name] = self
        model.register_forward_pre_hook(lambda _model, _inputs: self.exchanged.clear())
        model.register_forward_hook(self._check_forward, with_kwargs=True)

    def __call__(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Compute attention: q [B, H, T/P, D]; k, v [B, K, T/P, D]; mask [B, 1, T, T] or None → [B, T/P, H, D]."""
        if getattr(module, "config", None) is not self.config:
            return self.inner(module, q, k, v, mask, **kwargs)
        if k.shape[1] < self.ranks:
            k, v = (x.repeat_interleave(self.ranks // x.shape[1], dim=1) for x in (k, v))
        q, k, v = (seq_to_heads(x, self.group) for x in (q, k, v))
        out, weights = self.inner(module, q, k, v, mask, **kwargs)  # [B, T, H/P, D]
        return heads_to_seq(out.transpose(1, 2), self.group).transpose(1, 2), weights

    def check_active(self, *, sequence_length: int) -> None:
        """Raise ModelError unless every layer's attention saw [T, H/P], which requires the attention registry.

        Call it after a forward pass: in backward, frozen layers exchange nothing.
        """
        heads, layers = self.config.num_attention_heads // self.ranks, self.config.num_hidden_layers
        queries = {(shape[3] * self.ranks, shape[2]) for shape in self.exchanged}
        # Queries, keys, values and outputs of every layer.
        if (sequence_length, heads) not in queries or self.exchanged.total() != 4 * layers:
            raise ModelError(
                f"Ulysses is not active in all layers: {self.exchanged.total()} exchanges of (sequence, heads) "
                f"{sorted(queries)}; expected 4 of {(sequence_length, heads)} in each of {layers} layers; this model "
                "does not use the transformers attention registry in all layers, so choose ulysses_size: 1"
            )

    def _check_forward(self, model: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        self.check_active(sequence_length=named["input_ids"].shape[1] * self.ranks)


_LISTENING: WeakValueDictionary[str, Ulysses] = WeakValueDictionary()
"""The `Ulysses` of each group, by the group's name: compiled graphs refer to groups only by name."""


def apply_ulysses(model: PreTrainedModel, group: dist.ProcessGroup, timer: ComputeTimer) -> Ulysses | None:
    """Route the model's attention through the group; return None if the group is this rank alone.

    The timer stops while ranks wait for each other in exchanges.
    """
    ranks = dist.get_world_size(group)
    if ranks == 1:
        return None
    key = model.config._attn_implementation
    inner = ALL_ATTENTION_FUNCTIONS[key]
    ulysses = Ulysses(model, group, inner.inner if isinstance(inner, Ulysses) else inner, timer)
    ALL_ATTENTION_FUNCTIONS[key] = ulysses
    config = model.config.get_text_config()
    for module in model.modules():
        # The attention function repeats kv heads by this count. It is smaller after kv heads were repeated for P.
        if hasattr(module, "num_key_value_groups"):
            module.num_key_value_groups = config.num_attention_heads // max(config.num_key_value_heads, ranks)
    return ulysses


def seq_to_heads(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchange [B, H, T/P, D] → [B, H/P, T, D]."""
    ranks = dist.get_world_size(group)
    b, h, t, d = x.shape
    parts = x.reshape(b, ranks, h // ranks, t, d).movedim(1, 0)  # [P, B, H/P, T/P, D]
    gathered = _exchange(parts, group)  # [P, B, H/P, T/P, D], P now counts sequence slices
    return gathered.permute(1, 2, 0, 3, 4).reshape(b, h // ranks, ranks * t, d)


def heads_to_seq(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchange [B, H/P, T, D] → [B, H, T/P, D], the inverse of `seq_to_heads`."""
    ranks = dist.get_world_size(group)
    b, h, t, d = x.shape
    parts = x.reshape(b, h, ranks, t // ranks, d).movedim(2, 0)  # [P, B, H/P, T/P, D]
    gathered = _exchange(parts, group)  # P now counts groups of heads
    return gathered.movedim(0, 1).reshape(b, ranks * h, t // ranks, d)


def _exchange(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    out: Tensor = all_to_all(parts.contiguous(), group.group_name)
    return out


@torch.library.custom_op("trainshed::all_to_all", mutates_args=())
def all_to_all(x: Tensor, group: str) -> Tensor:
    """Send slice i of the first axis to rank i; an operator, so that compiled graphs do not break at it."""
    ulysses = _LISTENING.get(group)
    if ulysses is not None:
        ulysses.exchanged[tuple(x.shape)] += 1
    out = torch.empty_like(x)
    with ulysses.timer.waiting() if ulysses is not None else nullcontext():
        dist.all_to_all_single(out, x, group=_resolve_process_group(group))  # type: ignore[arg-type]  # a str, renamed
    return out


@all_to_all.register_fake
def _like(x: Tensor, group: str) -> Tensor:
    return torch.empty_like(x)


def _remember_group(ctx: Any, inputs: tuple[Tensor, str], output: Tensor) -> None:
    ctx.group = inputs[1]


def _exchange_back(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return all_to_all(grad.contiguous(), ctx.group), None


all_to_all.register_autograd(_exchange_back, setup_context=_remember_group)
