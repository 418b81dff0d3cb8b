"""What each unit gathers ahead of itself."""

from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from tests.support.gradients import build
from tests.support.ranks import on_ranks
from tests.support.specs import spec

LAYERS = [f"model.layers.{n}" for n in range(2)]
HALVES = [f"{layer}.{half}" for layer in LAYERS for half in ("self_attn", "mlp")]


def ahead(classes: list[str]) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Names of units → names of those that they gather ahead, forward and backward."""
    strategy: dict[str, Any] = {"forward_prefetch": 2, "backward_prefetch": 2}
    strategy["wrap_policy"] = {"transformer_layer_cls_to_wrap": classes}
    model, *_ = build(spec(strategy=strategy, scaling={"num_workers": dist.get_world_size()}))
    # FSDP2 has no public way to ask.
    states = {n: m._get_fsdp_state() for n, m in model.named_modules() if n and isinstance(m, FSDPModule)}
    names = {state: name for name, state in states.items()}
    forward = {name: [names[s] for s in state._states_to_forward_prefetch] for name, state in states.items()}
    backward = {name: [names[s] for s in state._states_to_backward_prefetch] for name, state in states.items()}
    return forward, backward


@pytest.mark.parametrize(("classes", "units"), [([], LAYERS), (["Qwen3Attention", "Qwen3MLP"], HALVES)])
def test_each_unit_gathers_the_next_two_ahead_whatever_the_units_are(classes: list[str], units: list[str]) -> None:
    forward, backward = on_ranks(2, ahead, classes)[0]
    assert forward == {name: units[place + 1 : place + 3] for place, name in enumerate(units)}
    assert backward == {name: units[max(place - 2, 0) : place][::-1] for place, name in enumerate(units)}
