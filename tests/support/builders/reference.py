"""Qwen3 and its loss in plain float64, one document at a time: the reference for the loop."""

from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from train_loop.data.dataset import IGNORE, Rows
from train_loop.model.build import materialise
from train_loop.model.families.causal.family import CAUSAL
from train_loop.spec import JobSpec

Weights = dict[str, Tensor]


def reference(job: JobSpec, rows: Rows) -> tuple[float, Weights]:
    """Loss over all rows of a Qwen3 drawn from seed 0, and its gradients by parameter name.

    Without weights every token counts one.
    """
    counts = np.ones(rows.labels.shape) if rows.weights is None else rows.weights
    weights, config = float64_weights(job), job.model.config or {}
    total, counted = torch.zeros((), dtype=torch.float64), 0.0
    for ids, labels, positions, count in zip(rows.input_ids, rows.labels, rows.position_ids, counts, strict=True):
        bounds = [*(i for i, p in enumerate(positions) if p == 0), len(positions)]
        for start, end in pairwise(bounds):
            document, targets = (torch.tensor(x[start:end]).long() for x in (ids, labels))
            logits = forward(weights, config, document)
            losses = F.cross_entropy(logits[:-1], targets[1:], ignore_index=IGNORE, reduction="none")
            each = torch.tensor(count[start:end]).double()[1:]
            total = total + (losses * each).sum()
            counted += each[targets[1:] != IGNORE].sum().item()
    mean = total / (counted or 1.0)
    torch.autograd.backward(mean)
    return mean.item(), {name: w.grad for name, w in weights.items() if w.grad is not None}


def float64_weights(job: JobSpec) -> Weights:
    """Return the weights that every mesh draws from seed 0."""
    model = CAUSAL.build(job.model).model
    materialise(model, CAUSAL.build(job.model), seed=0, device=torch.device("cpu"))
    return {name: p.detach().double().requires_grad_() for name, p in model.named_parameters()}


def forward(weights: Weights, config: dict[str, Any], ids: Tensor) -> Tensor:
    """Return the logits [T, V] of one document [T]."""
    x = weights["model.embed_tokens.weight"][ids]
    for layer in range(config["num_hidden_layers"]):
        w = {n.split(".", 3)[3]: p for n, p in weights.items() if n.startswith(f"model.layers.{layer}.")}
        x = x + _attention(w, config, _norm(x, w["input_layernorm.weight"]))
        h = _norm(x, w["post_attention_layernorm.weight"])
        gate, up = h @ w["mlp.gate_proj.weight"].T, h @ w["mlp.up_proj.weight"].T
        x = x + (F.silu(gate) * up) @ w["mlp.down_proj.weight"].T
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    return _norm(x, weights["model.norm.weight"]) @ head.T


def _attention(w: Weights, config: dict[str, Any], x: Tensor) -> Tensor:
    heads, kv, size = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    t = len(x)
    q = _rotate(_norm((x @ w["self_attn.q_proj.weight"].T).view(t, heads, size), w["self_attn.q_norm.weight"]))
    k = _rotate(_norm((x @ w["self_attn.k_proj.weight"].T).view(t, kv, size), w["self_attn.k_norm.weight"]))
    v = (x @ w["self_attn.v_proj.weight"].T).view(t, kv, size)
    k, v = (y.repeat_interleave(heads // kv, dim=1) for y in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / size**0.5
    scores = scores.masked_fill(torch.ones(t, t).triu(1).bool(), float("-inf"))
    out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
    return out.reshape(t, -1) @ w["self_attn.o_proj.weight"].T


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight


def _rotate(x: Tensor) -> Tensor:
    """Apply rotary positions to [T, H, D], theta 10,000, with the two halves of D as pairs."""
    t, _, d = x.shape
    angles = torch.outer(torch.arange(t).double(), 10_000.0 ** (-torch.arange(0, d, 2).double() / d))
    cos, sin = (f(angles).repeat(1, 2)[:, None] for f in (torch.cos, torch.sin))
    return x * cos + torch.cat([-x[..., d // 2 :], x[..., : d // 2]], -1) * sin
