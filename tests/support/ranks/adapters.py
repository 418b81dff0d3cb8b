"""A step of adapters with values in B, on the existing ranks and by peft itself."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from tests.support.ranks.gradients import Gradients, build, divisor, forget_meshes, my_share
from train_loop.conformance.measure import accumulate_plainly, whole
from train_loop.data.dataset import IGNORE, Rows
from train_loop.loop.batch import micro_batches
from train_loop.model.lora.adapters import trained_parameters
from train_loop.model.lora.names import by_plain_name
from train_loop.model.parts import own_parts
from train_loop.model.quantize import Kind, quantise, restore
from train_loop.spec import JobSpec

Step = tuple[float, Gradients, Gradients]
"""Loss, gradients of trained weights, and these weights, by name."""


def fill(named: Iterator[tuple[str, Tensor]]) -> None:
    """Give each B values of its name: with B = 0 the gradient of A would be 0."""
    for name, parameter in named:
        if "lora_B" in name:
            values = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))) / 8
            with torch.no_grad():
                for own, box in own_parts(parameter):
                    own.copy_(values[box])


def adapter_step(job: JobSpec, rows: Rows, *, filled: bool = True) -> Step:
    """Return the results of a step of all ranks."""
    forget_meshes()
    model, loss, mesh = build(job)
    if filled:
        fill(model.named_parameters())
    batch = my_share(rows, mesh)
    micro = micro_batches(batch, job.training.micro_batch, loss.anatomy, mesh)
    mean = accumulate_plainly(loss, micro, divisor(batch, mesh), mesh)
    trained = trained_parameters(model)
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad and p.grad is not None]
    assert not frozen, "frozen weights have no gradients"
    return (
        mean.item(),
        {name: whole(p.grad) for name, p in trained.items()},
        {name: whole(p.detach()) for name, p in trained.items()},
    )


def frozen_weights(model: nn.Module) -> Gradients:
    """Return all frozen weights of a sharded model by the names that they have in a folder. A collective call."""
    frozen = ((name, p) for name, p in model.named_parameters() if not p.requires_grad)
    return {name: whole(p.detach()) for name, p in by_plain_name(model, frozen).items()}


def peft_step(folder: Path, rows: Rows, weights: Gradients, **config: Any) -> tuple[float, Gradients]:
    """Return loss and gradients of plain peft on a folder, one row after another, from the given trained weights."""
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft reads a deprecated property
        model = peft.get_peft_model(base, peft.LoraConfig(**config))
    plain = model.base_model.model
    missing = plain.load_state_dict(weights, strict=False)
    assert not missing.unexpected_keys
    ids, labels = (torch.from_numpy(values).long() for values in (rows.input_ids, rows.labels))
    count = (labels[:, 1:] != IGNORE).sum()
    total = torch.zeros(())
    for row, wanted in zip(ids, labels, strict=True):
        logits = model(input_ids=row[None], use_cache=False).logits[0, :-1]
        total = total + cross_entropy(logits, wanted[1:], ignore_index=IGNORE, reduction="sum") / count
    torch.autograd.backward(total)
    return total.item(), {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}


def round_weights(layers: nn.Module, kind: Kind) -> None:
    """Replace the weights of linear layers by those that their codes give."""
    for module in layers.modules():
        if isinstance(module, nn.Linear):
            module.weight.data = restore(*quantise(module.weight.data, kind), kind, torch.float32)
