"""`model.lora` of a spec, and the settings that it does not go with."""

from typing import Any

import pytest

from tests.support.builders.specs import TINY, raw_spec, spec
from train_loop.model.folder import model_shape
from train_loop.plan import plan_job
from train_loop.spec import LoraSpec, SpecError, dump, load, parse

EXPERTS = {"target_parameters": ["experts.down_proj"]}


def problems(lora: dict[str, Any] | None, **parts: dict[str, Any]) -> dict[str, str]:
    parts["model"] = parts.get("model", {}) | {"lora": lora}
    with pytest.raises(SpecError) as raised:
        parse(raw_spec(**parts))
    return {problem.pointer: problem.message for problem in raised.value.problems}


def test_empty_mapping_adapts_all_linear_layers() -> None:
    job = spec(model={"lora": {}})
    assert job.model.lora == LoraSpec(r=16, alpha=32.0, target_modules="all-linear")
    assert job.model.lora.scale == 2.0
    assert spec(model={"lora": {"use_rslora": True}}).model.lora.scale == 8.0  # type: ignore[union-attr]
    assert load(dump(job)) == job


@pytest.mark.parametrize(
    ("lora", "field", "message"),
    [
        ({"target_modules": "q_proj"}, "/target_modules", "q_proj is not a list; write [q_proj], or all-linear"),
        ({"target_modules": []}, "", "target_modules and target_parameters are both empty, which leaves no adapters; "),
        ({"layers": []}, "", "layers names no layer, which leaves no adapters; name one, or remove layers"),
        (EXPERTS | {"dropout": 0.1}, "", "dropout=0.1 needs the inputs of adapters, and those of target_parameters "),
        ({"init": "pissa"}, "/init", '"pissa" is not supported yet; choose "kaiming" or "gaussian"'),
        (EXPERTS | {"use_dora": True}, "", "use_dora is for linear layers, and peft has none for target_parameters; "),
        ({"r": 0}, "/r", "input should be greater than 0"),
    ],
)
def test_invalid_adapters_are_refused(lora: dict[str, Any], field: str, message: str) -> None:
    ((pointer, found),) = problems(lora).items()
    assert pointer == f"/model/lora{field}"
    assert found.startswith(message)


@pytest.mark.parametrize(
    ("lora", "place", "value", "message"),
    [
        (
            {"use_dora": True},
            "strategy.tp_size",
            2,
            "tp_size=2 with use_dora is not supported, because a rank has parts ",
        ),
        (
            {"dropout": 0.1},
            "strategy.tp_size",
            2,
            "tp_size=2 with dropout=0.1 is not supported, because ranks that share",
        ),
        (EXPERTS, "strategy.ep_size", 2, "ep_size=2 with target_parameters is not supported, because an adapter of "),
        ({}, "strategy.ignored_params", ["model.norm"], "ignored_params is not proven"),
        ({}, "model.freeze_module_prefix", ["model.norm"], "freeze_module_prefix=model.norm has no effect, because "),
        ({"use_dora": True}, "model.compile", True, "compile with use_dora is not supported, because graphs break in "),
        (EXPERTS, "training.optimizer", "muon", "optimizer=muon with target_parameters is not supported, because an "),
        (EXPERTS, "strategy.wrap_policy", {"moe_experts": ["Qwen3MoeExperts"]}, "moe_experts with target_parameters "),
    ],
)
def test_settings_that_do_not_go_with_adapters_are_refused(
    lora: dict[str, Any], place: str, value: Any, message: str
) -> None:
    part, _, name = place.partition(".")
    found = problems(lora, **{part: {name: value}, "scaling": {"num_workers": 2}})
    pointer = "/strategy/wrap_policy/moe_experts" if name == "wrap_policy" else f"/{part}/{name}"
    assert found[pointer].startswith(message)
    assert found[pointer].endswith("with model.lora; change it, or remove lora")


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        (
            {"model": {"quantize_base": "nf4", "compile": True}},
            {"/model/compile": "compile with quantize_base=nf4 is not proven"},
        ),
        (
            {"model": {"quantize_base": "int8"}, "strategy": {"tp_size": 2}},
            {"/strategy/tp_size": "tp_size=2 with quantize_base=int8 is not proven"},
        ),
        (
            {"strategy": {"tp_size": 2, "sequence_parallel": True}},
            {"/strategy/sequence_parallel": "sequence_parallel is not proven"},
        ),
    ],
)
def test_two_settings_that_do_not_go_with_adapters_are_refused(
    parts: dict[str, dict[str, Any]], expected: dict[str, str]
) -> None:
    rest = " with model.lora; change it, or remove lora"
    found = problems({}, scaling={"num_workers": 2}, **parts)
    assert found == {pointer: f"{message}{rest}" for pointer, message in expected.items()}


def test_muon_does_not_go_with_adapters_of_experts() -> None:
    found = problems(EXPERTS, training={"optimizer": "muon"})
    assert found == {
        "/training/optimizer": "optimizer=muon with target_parameters is not supported, because an adapter has the "
        "matrices of all experts in one with model.lora; change it, or remove lora"
    }
    assert spec(model={"lora": {}}, training={"optimizer": "muon"}).training.optimizer == "muon"


def test_plan_counts_adapters_before_the_model_is_built() -> None:
    job = spec(model={"lora": {"r": 2}, "master_dtype": "bf16"}, training={"ema_decay": 0.9})
    shape, full = model_shape(job.model), model_shape(spec().model)
    # q and o, k and v, gate, up and down of two layers.
    each = 2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 48)
    assert shape.trained == 2 * each * TINY["num_hidden_layers"]
    assert shape.parameters == full.parameters + shape.trained
    terms = {term.name: term.bytes for term in plan_job(job, shape).memory}
    assert terms["frozen_parameters"] == 2 * full.parameters
    assert [terms[name] / shape.trained for name in ("parameters", "gradients", "optimizer", "ema")] == [4, 4, 8, 4]
    assert plan_job(job, shape).checkpoint_bytes == 16 * shape.trained
    some = model_shape(spec(model={"lora": {"r": 2, "target_modules": ["q_proj"], "layers": [1]}}).model)
    assert some.trained == 2 * (32 + 32)
