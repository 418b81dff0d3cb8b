"""Preflight of jobs with adapters: their counts, the plan's memory, and all refusals at their fields."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForMaskedLM

from tests.support.builders.any_size import MOE
from tests.support.builders.folders import write_model
from tests.support.builders.specs import TINY, may_read, spec
from tests.support.families.encoders import FAMILIES
from tests.support.families.families import small
from train_loop.plan import ModelShape, plan_job
from train_loop.preflight.model import check_model
from train_loop.spec import JobSpec, Problem

EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
LAYER = 2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 48)
"""Inputs and outputs of a layer's q and o, k and v, gate, up and down."""


def examined(job: JobSpec) -> tuple[ModelShape, list[Problem]]:
    shape, problems = check_model(job, may_read())
    assert shape is not None
    return shape, problems


@pytest.mark.parametrize("master", ["fp32", "bf16"])
def test_adapters_are_counted_and_planned(master: str) -> None:
    full, _ = examined(spec())
    job = spec(model={"lora": {"r": 4}, "master_dtype": master}, training={"ema_decay": 0.9})
    shape, problems = examined(job)
    assert problems == []
    assert shape.counts is not None
    adapters = 4 * LAYER * TINY["num_hidden_layers"]
    assert (shape.trained, shape.parameters) == (adapters, full.parameters + adapters)
    assert shape.trained_matrices == adapters
    plan = plan_job(job, shape)
    terms = {term.name: term.bytes for term in plan.memory}
    assert terms["frozen_parameters"] == {"fp32": 4, "bf16": 2}[master] * full.parameters
    assert [terms[name] for name in ("parameters", "gradients", "optimizer")] == [
        4 * adapters,
        4 * adapters,
        8 * adapters,
    ]
    assert plan.checkpoint_bytes == 16 * adapters
    assert shape.built is not None
    assert ".lora_A" in shape.built.tree or "lora_A" in shape.built.tree


def test_adapters_of_ranks_that_share_layers_are_counted() -> None:
    tp = {"strategy": {"tp_size": 2}, "scaling": {"num_workers": 2}}
    shape, problems = examined(spec(model={"lora": {"r": 4}}, **tp))
    assert problems == []
    assert shape.counts is not None
    assert shape.counts.of_rank is not None
    # B of q, k, v, gate and up, and A of o and down are halves.
    layer = (32 + 16) + 2 * (32 + 8) + (16 + 32) + 2 * (32 + 24) + (24 + 32)
    assert shape.counts.of_rank.trained == 4 * layer * TINY["num_hidden_layers"]
    # Its fused projections keep whole outputs.
    fused, problems = examined(spec(model={"config": small("phi3"), "lora": {"r": 4}}, **tp))
    assert problems == []
    assert fused.kept is not None


@pytest.mark.parametrize("strategy", [{"ep_size": 2}, {"ep_size": 2, "tp_size": 2}])
def test_adapters_of_ranks_that_share_experts_are_accepted(strategy: dict[str, int]) -> None:
    lora, scaling = {"r": 2, "target_modules": ["q_proj", "o_proj"]}, {"num_workers": 2}
    config = MOE | {"attention_dropout": 0.0}
    assert examined(spec(model={"config": config, "lora": lora}, strategy=strategy, scaling=scaling))[1] == []


def test_adapters_with_fewer_keys_than_ranks_are_refused() -> None:
    job = spec(model={"lora": {}}, strategy={"tp_size": 4}, scaling={"num_workers": 4})
    _, (problem,) = examined(job)
    assert problem == Problem(
        "/strategy/tp_size",
        "tp_size=4 is not proven with adapters for fewer kv heads than tp_size, and model.layers.0.self_attn has 2; "
        "choose tp_size: 2, or remove lora",
    )


@pytest.mark.parametrize(
    ("family", "setting", "proven"),
    [("helium", "tp_size", "cohere, gemma3_text, glm4,"), ("olmoe", "ep_size", "deepseek_v3, gpt_oss, mixtral,")],
)
def test_adapters_of_other_families_are_refused(family: str, setting: str, proven: str) -> None:
    lora = {"target_modules": ["q_proj"]}
    job = spec(model={"config": small(family), "lora": lora}, strategy={setting: 2}, scaling={"num_workers": 2})
    problem, *_ = examined(job)[1]
    assert problem.pointer == f"/strategy/{setting}"
    assert problem.message.startswith(
        f"{setting}=2 is not proven with adapters for model_type={family}; those proven are {proven} "
    )
    assert problem.message.endswith(f"; choose {setting}: 1")


def test_adapters_of_experts_are_counted(tmp_path: Path) -> None:
    lora = {"r": 2, "target_modules": [], "target_parameters": EXPERTS}
    job = spec(model={"config": MOE, "lora": lora})
    shape, problems = examined(job)
    assert problems == []
    experts, hidden, inner = MOE["num_experts"], MOE["hidden_size"], MOE["moe_intermediate_size"]
    assert shape.trained == 2 * experts * ((hidden + 2 * inner) + (inner + hidden))
    assert shape.kept is not None
    terms = {term.name: term.bytes for term in plan_job(job, shape).memory}
    # Recomputation keeps those of one layer, and their gradient.
    assert terms["adapted_experts"] == 2 * 4 * experts * 3 * inner * hidden


@pytest.mark.parametrize(
    ("lora", "pointers"),
    [
        ({"target_modules": ["q_prj"]}, ["/model/lora/target_modules"]),
        (
            {"target_modules": ["q_prj"], "target_parameters": ["w1"]},
            ["/model/lora/target_parameters", "/model/lora/target_modules"],
        ),
        ({"layers": [7], "target_modules": ["q_prj"]}, ["/model/lora/layers"]),
        ({"layers": [7], "modules_to_save": ["x"]}, ["/model/lora/layers", "/model/lora/modules_to_save"]),
    ],
)
def test_each_fault_is_reported_at_its_field(lora: dict[str, Any], pointers: list[str]) -> None:
    _, problems = examined(spec(model={"lora": lora}))
    assert [problem.pointer for problem in problems] == pointers


def test_random_layers_of_an_encoders_head_are_counted(tmp_path: Path) -> None:
    config: dict[str, Any] = {"model_type": "roberta", "vocab_size": 60} | FAMILIES["roberta"]
    AutoModelForMaskedLM.from_config(AutoConfig.for_model(**config)).save_pretrained(tmp_path)
    job = spec(
        model={
            "config": None,
            "path": str(tmp_path),
            "lora": {"r": 2},
            "head": {"sequence_classification": {"labels": 3}},
        },
        data={"columns": {"input_ids": "ids", "label": "label"}, "packing": False, "sequence_length": 16},
    )
    shape, problems = check_model(job, may_read(f"file://{tmp_path}"))
    assert problems == []
    assert shape is not None
    width, inner, layers = (config[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers"))
    adapters = 2 * layers * (4 * 2 * width + 2 * (width + inner))
    assert shape.trained == adapters + width * (width + 1) + 3 * (width + 1)
    assert shape.call is not None
    assert shape.call.problem is None


def test_adapters_of_shared_experts_alone_are_warned_of_in_the_plan() -> None:
    job = spec(model={"config": small("qwen2_moe"), "lora": {"r": 2}})
    shape, problems = examined(job)
    assert problems == []
    (note,) = shape.notes
    assert note in plan_job(job, shape).warnings
    assert "none of the 4 routed experts" in note


def test_folder_and_head_of_labels_have_adapters(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", pad_token_id=0)
    model = {"config": None, "path": folder.as_uri(), "lora": {"r": 4}, "tokenizer": None}
    job = spec(
        model=model | {"head": {"sequence_classification": {"labels": 3}}},
        data={"train": {"path": f"{tmp_path}/*.parquet"}, "columns": {"input_ids": "ids", "label": "label"}}
        | {"packing": False},
    )
    shape, problems = check_model(job, may_read(f"file://{tmp_path}"))
    assert problems == []
    assert shape is not None
    assert shape.trained == 4 * LAYER * TINY["num_hidden_layers"] + 3 * TINY["hidden_size"]
    assert shape.is_measured
