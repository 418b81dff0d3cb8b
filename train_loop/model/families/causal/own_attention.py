"""Attention of families that do not call the registry of transformers: they are made to, so that Ulysses can split it.

Their numbers stay: the registered function calls the family's own, or repeats its operations.
"""

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from train_loop.model.families.family import HEAD_BIAS, Attention

_OWN = "own_attention"
"""Attribute of a module with the `Attention` that the registered function calls."""
_METHOD, _INPUTS = "_attn", ["query", "key", "value", "attention_mask"]
"""Method of modules that computes attention (GPT-J and its kind), and its parameters."""


def own_attention(module: nn.Module) -> Attention | None:
    """Return the attention of a module without one in its file; None for other modules."""
    return getattr(module, _OWN, None)


def call_registry(model: nn.Module, registered: Attention) -> None:
    """Make modules outside the registry call `registered`, and BLOOM accept a mask [B, 1, T, T], in place."""
    for module in model.modules():
        method, kind = getattr(type(module), _METHOD, None), type(module).__name__
        if method is not None and list(inspect.signature(method).parameters)[1:] == _INPUTS:
            setattr(module, _OWN, _of_method)
            setattr(module, _METHOD, functools.partial(_attn, registered, module))
        elif kind in _BY_CLASS and not getattr(module, "slow_but_exact", False):
            own, forward = _BY_CLASS[kind]
            setattr(module, _OWN, own)
            module.forward = functools.partial(forward, registered, module)
        if (build := getattr(module, "build_alibi_tensor", None)) is not None:
            module.build_alibi_tensor = functools.partial(_alibi_of_row, build)  # type: ignore[assignment]


def _attn(
    registered: Attention, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    out, weights = registered(module, query, key, value, mask)
    return out.transpose(1, 2), weights


def _of_method(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **_: Any
) -> tuple[Tensor, Tensor]:
    out, weights = module.__class__._attn(module, query, key, value, attention_mask)
    return out.transpose(1, 2), weights


def _alibi_of_row(build: Callable[..., Tensor], mask: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
    """Return the biases [B * H, 1, T] of a row, whatever documents its mask separates.

    A document that begins later adds the same number to all scores of a token, which softmax ignores.
    """
    if mask.dim() == 4:
        mask = torch.ones(mask.shape[0], mask.shape[-1], dtype=torch.int64, device=mask.device)
    return build(mask, heads, dtype)


def _bloom(
    registered: Attention, module: Any, hidden_states: Tensor, residual: Tensor, *, alibi: Tensor, **named: Any
) -> tuple[Tensor, None]:
    """Return the output [B, T, H * D] of BLOOM's attention, which is not `slow_but_exact`."""
    query, key, value = module._reshape(module.query_key_value(hidden_states))
    # All rows have the same biases.
    bias = alibi[: module.num_heads]
    out = registered(module, query, key, value, named["attention_mask"], **{HEAD_BIAS: bias})[0]
    projected = module.dense(out.flatten(2))
    return F.dropout(projected, p=module.hidden_dropout, training=module.training) + residual, None


def _bloom_scores(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, head_bias: Tensor
) -> tuple[Tensor, Tensor]:
    rows, heads, length, _ = query.shape
    q, k, v = (one.flatten(0, 1) for one in (query, key, value))
    bias = head_bias.repeat(rows, 1, 1)
    scores = bias.baddbmm(q, k.transpose(-1, -2), beta=module.beta, alpha=module.inv_norm_factor)
    scores = scores.view(rows, heads, length, -1)
    scores = scores if mask is None else scores + mask
    weights = module.attention_dropout(F.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype))
    return torch.bmm(weights.flatten(0, 1), v).view(rows, heads, length, -1).transpose(1, 2), weights


def _mpt(registered: Attention, module: Any, hidden_states: Tensor, *, position_bias: Tensor, **named: Any) -> Any:
    """Return the output [B, T, H * D] of MPT's attention."""
    mixed = module.Wqkv(hidden_states)
    if module.clip_qkv:
        mixed = mixed.clamp(min=-module.clip_qkv, max=module.clip_qkv)
    shape = (*hidden_states.shape[:2], module.n_heads, module.head_dim)
    query, key, value = (one.reshape(shape).transpose(1, 2) for one in mixed.chunk(3, dim=2))
    out, weights = registered(module, query, key, value, named["attention_mask"], **{HEAD_BIAS: position_bias})
    return module.out_proj(out.flatten(2)), weights


def _mpt_scores(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, head_bias: Tensor
) -> tuple[Tensor, Tensor]:
    scores = torch.matmul(query, key.transpose(-1, -2)) * module.softmax_scale
    scores = scores + head_bias[:, :, -key.shape[-2] :]
    if mask is not None:
        scores = scores.masked_fill(mask, torch.finfo(query.dtype).min)
    weights = F.softmax(scores.float(), dim=-1).to(value.dtype)
    weights = F.dropout(weights, p=module.attn_dropout_p, training=module.training)
    return torch.matmul(weights, value).transpose(1, 2), weights


def _bert(
    registered: Attention, module: Any, states: Tensor, attention_mask: Tensor | None = None, *_: Any, **__: Any
) -> Any:
    """Return the output [B, T, H * D] of RemBERT's attention and its kind, before the projection."""
    shape = (*states.shape[:2], -1, module.attention_head_size)
    query, key, value = (part(states).view(shape).transpose(1, 2) for part in (module.query, module.key, module.value))
    out, weights = registered(module, query, key, value, attention_mask)
    return out.flatten(2), weights


def _bert_scores(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **_: Any
) -> tuple[Tensor, Tensor]:
    scores = torch.matmul(query, key.transpose(-1, -2)) / math.sqrt(module.attention_head_size)
    weights = module.dropout(F.softmax(scores if mask is None else scores + mask, dim=-1))
    return torch.matmul(weights, value).transpose(1, 2), weights


def _xglm(registered: Attention, module: Any, hidden_states: Tensor, *, attention_mask: Tensor, **_: Any) -> Any:
    """Return the output [B, T, H * D] of XGLM's attention."""
    shape = (*hidden_states.shape[:2], -1, module.head_dim)
    parts = (module.q_proj(hidden_states) * module.scaling, module.k_proj(hidden_states), module.v_proj(hidden_states))
    heads = (one.view(shape).transpose(1, 2) for one in parts)
    out, weights = registered(module, *heads, attention_mask)
    return module.out_proj(out.flatten(2)), weights


def _xglm_scores(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **_: Any
) -> tuple[Tensor, Tensor]:
    q, k, v = (one.flatten(0, 1) for one in (query, key, value))
    scores = torch.bmm(q, k.transpose(1, 2)).view(*query.shape[:3], -1) + mask
    scores = torch.max(scores, torch.full((), torch.finfo(scores.dtype).min, device=scores.device))
    is_half = scores.dtype == torch.float16
    weights = F.softmax(scores, dim=-1, dtype=torch.float32 if is_half else None).to(scores.dtype)
    weights = F.dropout(weights, p=module.dropout, training=module.training)
    return torch.bmm(weights.flatten(0, 1), v).view(query.shape).transpose(1, 2), weights


_BY_CLASS: dict[str, tuple[Attention, Callable[..., Any]]] = {
    "BloomAttention": (_bloom_scores, _bloom),
    "MptAttention": (_mpt_scores, _mpt),
    "XGLMAttention": (_xglm_scores, _xglm),
} | dict.fromkeys(("RemBertSelfAttention", "MegatronBertSelfAttention", "GitSelfAttention"), (_bert_scores, _bert))
"""Attention of classes that compute it in their forward function, and one that calls the registry."""
