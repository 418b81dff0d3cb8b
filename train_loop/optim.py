"""Optimizer and schedule of a sharded model."""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers import get_scheduler

from train_loop.spec import TrainingSpec


def build_optimizer(model: nn.Module, training: TrainingSpec) -> Optimizer:
    """AdamW (Loshchilov and Hutter, 2019); weight decay for matrices only, not for norms and biases."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": training.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return AdamW([group for group in groups if group["params"]], lr=training.learning_rate, fused=True)


def build_scheduler(optimizer: Optimizer, training: TrainingSpec, *, steps: int) -> LRScheduler:
    """Hugging Face's schedule of that name, counted in optimizer steps."""
    scheduler: LambdaLR = get_scheduler(
        training.lr_scheduler_type, optimizer, num_warmup_steps=training.warmup_steps, num_training_steps=steps
    )
    # A run that ends by tokens may outlast the estimate `steps`, and a cosine would rise again.
    scheduler.lr_lambdas = [partial(_held, rule, steps) for rule in scheduler.lr_lambdas]
    return scheduler


def _held(rule: Callable[[int], float], last: int, step: int) -> float:
    return rule(min(step, last))


def clip_gradients(model: nn.Module, max_norm: float | None) -> torch.Tensor:
    """Scale all gradients so that their common norm is at most `max_norm`; the norm before, over all ranks."""
    parameters = [p for p in model.parameters() if p.grad is not None]
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    whole = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    if max_norm is not None:
        nn.utils.clip_grads_with_norm_(parameters, max_norm, whole)
    return whole
