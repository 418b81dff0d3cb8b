"""Optimizers whose state is on the host: the bits of plain ones, in parts and after a load."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

import train_loop.optim.host_state
from train_loop.optim.host_state import HostState

SHAPES = [(5, 7), (3,), (40, 4), (2, 2)]


class HostAdamW(HostState, AdamW):
    """AdamW, with its state on the host."""


class HostSGD(HostState, SGD):
    """SGD, with its state on the host."""


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def train(optimizer: Optimizer, *, first: int, last: int) -> None:
    for step in range(first, last):
        for group in optimizer.param_groups:
            for number, parameter in enumerate(group["params"]):
                parameter.grad = torch.full_like(parameter, (-1.0) ** number / (step + 1))
        optimizer.step()


def groups(of: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": of[:3], "weight_decay": 0.1}, {"params": of[3:], "weight_decay": 0.0}]


@pytest.mark.parametrize(
    ("plain", "host", "settings"),
    [(AdamW, HostAdamW, {"lr": 0.1, "fused": True}), (SGD, HostSGD, {"lr": 0.1, "momentum": 0.9, "foreach": True})],
)
def test_steps_in_parts_and_after_a_load_have_the_bits_of_the_plain_optimizer(
    plain: Any, host: Any, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_loop.optim.host_state, "PART_BYTES", 200)  # one to three parameters
    expected, found = parameters(), parameters()
    whole, parted = plain(groups(expected), **settings), host(groups(found), **settings)
    train(whole, first=0, last=3)
    train(parted, first=0, last=2)
    assert [len(group["params"]) for group in parted.param_groups] == [3, 1]
    loaded = host(groups(found), **settings)
    loaded.load_state_dict(copy.deepcopy(parted.state_dict()))
    train(loaded, first=2, last=3)
    assert [number for number, pair in enumerate(zip(expected, found, strict=True)) if not torch.equal(*pair)] == []
    assert loaded.state_dict()["param_groups"] == whole.state_dict()["param_groups"]
