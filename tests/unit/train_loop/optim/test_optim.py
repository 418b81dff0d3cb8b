"""Optimizers per parameter group, checked against reference implementations."""

import sys
from typing import Any

import pytest
import torch
from torch import nn
from transformers.optimization import Adafactor as WholeAdafactor

from tests.support.builders.specs import TINY, raw_spec, spec
from train_loop.errors import UserError
from train_loop.model.build import build_model
from train_loop.model.freeze import freeze
from train_loop.optim import Ema, build_optimizers, describe_groups
from train_loop.optim.adafactor import Adafactor
from train_loop.spec import SpecError, parse


def groups(frozen: tuple[str, ...] = (), **training: Any) -> list[tuple[Any, ...]]:
    """Return optimizer, weight decay and tensors of every group of the tiny model."""
    job = spec(model={"config": TINY | {"attention_bias": True}}, training={"weight_decay": 0.1} | training)
    model = build_model(job.model)
    freeze(model, frozen)
    described = describe_groups(build_optimizers(model, job.training))
    return [(group["optimizer"], group["weight_decay"], group["tensors"]) for group in described]


# Per layer: 7 matrices, 4 norms, 4 biases; also the embedding, the head and the last norm.
@pytest.mark.parametrize(("name", "shown"), [("adamw", "AdamW"), ("sgd", "SGD"), ("adafactor", "Adafactor")])
def test_norms_and_biases_do_not_decay(name: str, shown: str) -> None:
    assert groups(optimizer=name) == [(shown, 0.1, 16), (shown, 0.0, 17)]


def test_muon_trains_layer_matrices_and_adamw_the_rest() -> None:
    assert groups(optimizer="muon") == [("Muon", 0.1, 14), ("AdamW", 0.1, 2), ("AdamW", 0.0, 17)]
    assert groups(("model.layers",), optimizer="muon") == [("AdamW", 0.1, 2), ("AdamW", 0.0, 1)]


def test_describe_groups_returns_size_and_rate() -> None:
    job = spec(training={"learning_rate": 0.25})
    (matrices, rest) = describe_groups(build_optimizers(build_model(job.model), job.training))
    assert matrices | rest == {
        "optimizer": "AdamW",
        "lr": 0.25,
        "weight_decay": 0.0,
        "tensors": 9,
        "parameters": 2 * (2 * 32 + 2 * 8) + 32,
    }


def test_eight_bit_moments_need_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(UserError, match=r"needs torchao, which cannot be imported here .*; install torchao on "):
        groups(optimizer="adamw_8bit")


@pytest.mark.parametrize(
    ("training", "message"),
    [
        ({"optimizer": "sgd", "adam_beta1": 0.8}, "adam_beta1=0.8 has no effect with optimizer=sgd, whose options"),
        ({"optimizer": "adamw", "momentum": 0.9}, "options are adam_beta1, adam_beta2, adam_epsilon; remove it, or"),
        ({"optimizer": "adafactor", "adam_epsilon": 1e-6}, "with optimizer=adafactor, whose options are none"),
    ],
)
def test_unused_optimizer_option_is_rejected(training: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        parse(raw_spec(training=training))


def test_adafactor_equals_that_of_transformers() -> None:
    torch.manual_seed(0)
    start = [torch.randn(6, 5), torch.randn(7), torch.randn(3, 4)]
    mine, theirs = ([nn.Parameter(p.clone()) for p in start] for _ in range(2))
    optimizers = (
        Adafactor(mine, 0.1, weight_decay=0.1),
        WholeAdafactor(theirs, lr=0.1, scale_parameter=False, relative_step=False, weight_decay=0.1),
    )
    for _ in range(4):
        for a, b in zip(mine, theirs, strict=True):
            a.grad = torch.randn(a.shape)
            b.grad = a.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_weight_average_follows_the_trained_weights() -> None:
    trained = nn.Linear(2, 2)
    model = nn.Sequential(nn.Linear(2, 2).requires_grad_(False), trained)
    start = trained.weight.detach().clone()
    ema = Ema(model, 0.75)
    with torch.no_grad():
        trained.weight.add_(1)
    ema.update()
    torch.testing.assert_close(ema.averages["1.weight"], start + 0.25)
    assert ema.averages.keys() == {"1.weight", "1.bias"}
