"""Choices of experts in recomputation: those of the forward pass, whatever scores the routers then compute."""

import os
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from tests.families.table import read
from tests.support.builders.specs import spec
from tests.support.families.families import small
from train_loop.model.families.anatomy import Anatomy
from train_loop.model.families.causal.family import CAUSAL
from train_loop.parallel.layers import apply_checkpointing
from train_loop.parallel.mesh import Mesh
from train_loop.parallel.passes import BuiltModel, Recompute
from train_loop.parallel.units import repeated_layers
from train_loop.spec import ModelSpec, WrapPolicySpec
from train_loop.telemetry.timers import ComputeTimer

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers, about kernels that are not installed
FAMILIES: tuple[str, ...] = ("qwen3_moe", "deepseek_v3", "phimoe", "granitemoe")
"""Routers that change the values of their choice, choose groups first, draw at random, and call a method of tensors."""
if os.environ.get("MORE"):
    named = [one for one, row in read().items() if "results" in row and any("expert" in key for key in small(one))]
    FAMILIES = tuple(one for one in named if CAUSAL.build(ModelSpec(config=small(one))).experts is not None)
CPU = torch.device("cpu")


def built(family: str) -> Anatomy:
    """Return a mixture with random weights whose routers hardly prefer an expert."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**small(family)), dtype=torch.float32)
    return CAUSAL.anatomy(model.train())


def spoil(router: nn.Module) -> None:
    """Let a router see other hidden states in recomputation, so that it prefers other experts."""
    router.forward = partial(_spoilt, router.forward)


def _spoilt(forward: Any, hidden: Tensor, *others: Any, **named: Any) -> Any:
    is_backward = torch._C._current_graph_task_id() != -1
    # The same operations in both passes, as selective checkpointing demands.
    return forward(hidden + float(is_backward) * torch.randn_like(hidden), *others, **named)


def recompute(anatomy: Anatomy, *, how: Any, keeps: bool) -> None:
    """Recompute each layer, with or without the choices of its router."""
    if keeps:
        job = spec(model={"gradient_checkpointing": how})
        Recompute().apply(BuiltModel(anatomy, job, {}, ComputeTimer(CPU)), cast(Mesh, SimpleNamespace(device=CPU)))
    else:
        layers = repeated_layers(anatomy, WrapPolicySpec())
        apply_checkpointing(layers, how)


def trained(anatomy: Anatomy) -> list[list[Tensor]]:
    """Run forward and backward; return the experts that each layer has chosen, once for each of its calls."""
    assert anatomy.experts is not None
    chosen = [list[Tensor]() for _ in anatomy.experts.modules]
    for module, its in zip(anatomy.experts.modules, chosen, strict=True):
        module.register_forward_pre_hook(partial(_note, its), with_kwargs=True)
    torch.manual_seed(1)
    ids = torch.randint(0, 300, (2, 24))
    anatomy.model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return chosen


def _note(chosen: list[Tensor], _: nn.Module, inputs: Any, named: Any) -> None:
    chosen.append((named["top_k_index"] if "top_k_index" in named else inputs[1]).clone())


@pytest.mark.parametrize("how", ["full", "offload", "selective", {"every": 1}])
@pytest.mark.parametrize("family", FAMILIES)
def test_recomputation_chooses_the_experts_of_the_forward_pass(family: str, how: str) -> None:
    anatomy = built(family)
    assert anatomy.experts is not None
    for router in anatomy.experts.routers:
        spoil(router)
    recompute(anatomy, how=how, keeps=True)
    for forward, again in trained(anatomy):
        assert torch.equal(forward, again)


def test_without_them_other_scores_choose_other_experts() -> None:
    anatomy = built("qwen3_moe")
    assert anatomy.experts is not None
    for router in anatomy.experts.routers:
        spoil(router)
    recompute(anatomy, how="full", keeps=False)
    for forward, again in trained(anatomy):
        assert not torch.equal(forward, again)


@pytest.mark.parametrize("how", ["full", "selective"])
@pytest.mark.parametrize("family", FAMILIES)
def test_kept_choices_change_no_bit(family: str, how: str) -> None:
    gradients = []
    for keeps in (True, False):
        anatomy = built(family)
        recompute(anatomy, how=how if keeps else "full", keeps=keeps)
        trained(anatomy)
        gradients.append({name: p.grad for name, p in anatomy.model.named_parameters() if p.grad is not None})
    ours, expected = gradients
    assert ours.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.equal(ours[name].view(torch.int32), gradient.view(torch.int32)), name
