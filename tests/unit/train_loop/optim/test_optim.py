"""Optimizers per parameter group, checked against reference implementations."""

import sys
import weakref
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.optimization import Adafactor as WholeAdafactor

from tests.support.builders.searches import drawn
from tests.support.builders.specs import TINY, may_read, raw_spec, spec
from tests.support.families.families import small
from train_loop.errors import UserError
from train_loop.model.families.causal.build import build_model
from train_loop.model.families.causal.family import CAUSAL
from train_loop.model.folder import model_shape
from train_loop.model.freeze import freeze
from train_loop.optim import Ema, build_optimizers, describe_groups
from train_loop.optim.adafactor import Adafactor
from train_loop.optim.build import muon_matrices
from train_loop.optim.muon import Muon
from train_loop.plan import certain_needs, plan_job
from train_loop.preflight.model import check_model
from train_loop.spec import ModelSpec, SpecError, parse

GPT2 = {"model_type": "gpt2", "vocab_size": 384, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 48}
GPT2 |= {"bos_token_id": 0, "eos_token_id": 0}


def groups(frozen: tuple[str, ...] = (), **training: Any) -> list[tuple[Any, ...]]:
    """Return optimizer, weight decay and tensors of every group of the tiny model."""
    job = spec(model={"config": TINY | {"attention_bias": True}}, training={"weight_decay": 0.1} | training)
    model = build_model(job.model)
    freeze(model, frozen)
    described = describe_groups(build_optimizers(CAUSAL.anatomy(model), job.training))
    return [(group["optimizer"], group["weight_decay"], group["tensors"]) for group in described]


# Per layer: 7 matrices, 4 norms, 4 biases; also the embedding, the head and the last norm.
@pytest.mark.parametrize(("name", "shown"), [("adamw", "AdamW"), ("sgd", "SGD"), ("adafactor", "Adafactor")])
def test_norms_and_biases_do_not_decay(name: str, shown: str) -> None:
    assert groups(optimizer=name) == [(shown, 0.1, 16), (shown, 0.0, 17)]


def test_muon_trains_layer_matrices_and_adamw_the_rest() -> None:
    assert groups(optimizer="muon") == [("Muon", 0.1, 14), ("AdamW", 0.1, 2), ("AdamW", 0.0, 17)]
    assert groups(("model.layers",), optimizer="muon") == [("AdamW", 0.1, 2), ("AdamW", 0.0, 1)]


def test_muon_trains_matrices_of_experts_and_adamw_their_biases() -> None:
    job = spec(training={"optimizer": "muon", "weight_decay": 0.1})
    anatomy = CAUSAL.build(ModelSpec(config=small("gpt_oss")))
    matrices = {name for name, p in anatomy.model.named_parameters() if id(p) in muon_matrices(anatomy)}
    within = ["self_attn.k_proj", "self_attn.o_proj", "self_attn.q_proj", "self_attn.v_proj", "mlp.router"]
    tensors = [*(f"{one}.weight" for one in within), "mlp.experts.down_proj", "mlp.experts.gate_up_proj"]
    assert matrices == {f"model.layers.{layer}.{name}" for layer in range(2) for name in tensors}
    described = describe_groups(build_optimizers(anatomy, job.training))
    assert [(one["optimizer"], one["weight_decay"]) for one in described] == [
        ("Muon", 0.1),
        ("AdamW", 0.1),
        ("AdamW", 0.0),
    ]
    assert (described[0]["tensors"], described[1]["tensors"]) == (14, 2)


@pytest.mark.parametrize("shape", [(8, 4), (4, 8), (6, 6)])
def test_step_of_muon_has_the_factor_that_the_guide_states(shape: tuple[int, int]) -> None:
    steps = []
    # The guide: a rate for torch's default factor becomes rate x 5 / sqrt(N).
    for kind, rate in ((Muon, 0.02 * 5 / shape[1] ** 0.5), (torch.optim.Muon, 0.02)):
        parameter = nn.Parameter(torch.zeros(shape))
        parameter.grad = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        options: dict[str, Any] = {"adjust_lr_fn": "match_rms_adamw"} if kind is Muon else {}
        kind([parameter], lr=rate, weight_decay=0.0, **options).step()
        steps.append(parameter.detach())
    ours, torchs = steps
    assert torch.allclose(ours, torchs, rtol=1e-6)


def test_describe_groups_returns_size_and_rate() -> None:
    job = spec(training={"learning_rate": 0.25})
    (matrices, rest) = describe_groups(build_optimizers(CAUSAL.anatomy(build_model(job.model)), job.training))
    assert matrices | rest == {
        "optimizer": "AdamW",
        "lr": 0.25,
        "weight_decay": 0.0,
        "beta1": 0.9,
        "beta2": 0.999,
        "tensors": 9,
        "parameters": 2 * (2 * 32 + 2 * 8) + 32,
    }


def test_eight_bit_moments_need_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(UserError, match=r"needs torchao, which cannot be imported here .*\[torchao\]' in .* on the "):
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


CONFIGS = {
    "qwen3": TINY,
    "gpt2": GPT2,
    "tied": TINY | {"tie_word_embeddings": True},
    "moe": small("qwen3_moe"),
}


@pytest.mark.parametrize(
    ("name", "optimizer", "master"),
    drawn(list(product(CONFIGS, ["adamw", "adam", "sgd", "muon", "lion", "schedule_free_adamw"], ["fp32", "bf16"])), 9),
)
def test_planned_bytes_equal_those_of_a_real_step(name: str, optimizer: str, master: str) -> None:
    config = CONFIGS[name]
    frozen = ["transformer.h.0"] if config is GPT2 else ["model.layers.0"]
    model_spec = {"config": config, "master_dtype": master, "freeze_module_prefix": frozen}
    if optimizer == "schedule_free_adamw":
        # Its average needs fp32.
        model_spec["master_dtype"] = "fp32"
    job = spec(model=model_spec, training={"optimizer": optimizer, "lr_scheduler_type": "constant"})
    shape, problems = check_model(job, may_read())
    assert shape is not None, problems
    planned = {term.name: term.bytes for term in plan_job(job, shape).memory}
    model = build_model(job.model)
    model.to_empty(device="cpu")
    model.tie_weights()
    freeze(model, frozen)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    optimizers = build_optimizers(CAUSAL.anatomy(model), job.training)
    for one in optimizers:
        one.step()
    states = [t for one in optimizers for state in one.state.values() for t in state.values()]
    real = {
        "parameters": list(model.parameters()),
        "gradients": [p.grad for p in model.parameters() if p.grad is not None],
        "optimizer": [t for t in states if isinstance(t, torch.Tensor) and t.ndim],
    }
    for name, tensors in real.items():
        assert planned[name] == sum(tensor.nbytes for tensor in tensors), name


class LargestCopies(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The peak bytes of tensors that operations make, while they exist."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = self.peak = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        result, given = function(*arguments, **(options or {})), tree_leaves((arguments, options))
        known = {one.untyped_storage()._cdata for one in given if isinstance(one, Tensor)}
        for made in tree_leaves(result):
            if isinstance(made, Tensor) and made.untyped_storage()._cdata not in known:
                self.bytes += made.untyped_storage().nbytes()
                weakref.finalize(made.untyped_storage(), self._freed, made.untyped_storage().nbytes())
        self.peak = max(self.peak, self.bytes)
        return result

    def _freed(self, count: int) -> None:
        self.bytes -= count


@pytest.mark.parametrize("reproducible", ["same_size", "any_size"])
@pytest.mark.parametrize(
    "training",
    [
        {"optimizer": "adamw"},
        {"optimizer": "sgd"},
        {"optimizer": "sgd", "weight_decay": 0.1},
        {"optimizer": "lion", "weight_decay": 0.1},
        {"optimizer": "schedule_free_adamw", "lr_scheduler_type": "constant", "weight_decay": 0.1},
    ],
    ids=str,
)
def test_planned_bytes_hold_the_copies_of_a_real_update(training: dict[str, Any], reproducible: str) -> None:
    config = TINY | {"num_hidden_layers": 8}
    job = spec(model={"config": config}, training={"global_batch_size": 8, "reproducible": reproducible} | training)
    model = build_model(job.model).to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
        parameter.grad = torch.ones_like(parameter)
    (optimizer,) = build_optimizers(CAUSAL.anatomy(model), job.training)
    optimizer.step()
    with LargestCopies() as copies:
        optimizer.step()
    _, update, _ = certain_needs(job, plan_job(job, model_shape(job.model)))
    planned = sum(term.bytes for term in update.host if term.name == "optimizer_step")
    assert planned == pytest.approx(copies.peak, rel=0.1, abs=20_000)
