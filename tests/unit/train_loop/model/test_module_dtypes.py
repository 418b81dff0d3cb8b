"""`strategy.precision`: patterns of modules, the units that follow from them, and rejected patterns."""

from typing import Any

import pytest
import torch

from tests.support.builders.specs import TINY, code_spec, may_read, raw_spec
from train_loop.model.families.anatomy import Anatomy
from train_loop.model.families.causal.attention import best_attention
from train_loop.model.families.causal.build import build_model
from train_loop.model.families.causal.family import CAUSAL
from train_loop.model.precision import find_precision
from train_loop.parallel.units import find_units, join_units
from train_loop.plan import plan_job
from train_loop.preflight.model import check_model
from train_loop.spec import JobSpec, SpecError, parse

TIED = TINY | {"tie_word_embeddings": True}
MOE = {
    "model_type": "qwen3_moe",
    **{name: value for name, value in TINY.items() if name != "model_type"},
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "decoder_sparse_step": 1,
}


def job(precision: dict[str, str], config: dict[str, Any] = TINY, **parts: Any) -> JobSpec:
    model = {"config": config, "dtype": "bf16"} | parts.pop("model", {})
    strategy = {"precision": precision} | parts.pop("strategy", {})
    return parse(raw_spec(model=model, strategy=strategy, **parts))


def anatomy_of(spec: JobSpec) -> Anatomy:
    return CAUSAL.anatomy(build_model(spec.model))


def units_of(spec: JobSpec) -> list[list[str]]:
    anatomy = anatomy_of(spec)
    names = {module: name for name, module in anatomy.model.named_modules()}
    units = find_units(anatomy, spec.strategy.wrap_policy)
    return [[names[m] for m in unit] for unit in join_units(anatomy, units, find_precision(anatomy, spec.strategy))]


@pytest.mark.parametrize(
    ("precision", "dtypes"),
    [
        (
            {"model.layers.0": "fp32"},
            {"model.layers.0": "fp32", "model.layers.0.mlp": "fp32", "model.layers.1": "bf16"},
        ),
        ({"model.layers.*": "fp32", "model.layers.1": "bf16"}, {"model.layers.0": "fp32", "model.layers.1": "bf16"}),
        ({"model.layers.1": "bf16", "model.layers.*": "fp32"}, {"model.layers.1": "fp32"}),
        ({"model.layers.0": "fp32", "*.mlp": "bf16"}, {"model.layers.0.mlp.up_proj": "bf16", "model.layers.0": "fp32"}),
        ({"model.layers": "fp32"}, {"model.layers.1.self_attn": "fp32", "model.norm": "bf16"}),
    ],
)
def test_last_pattern_that_covers_a_module_counts(precision: dict[str, str], dtypes: dict[str, str]) -> None:
    spec = job(precision)
    anatomy = anatomy_of(spec)
    found = find_precision(anatomy, spec.strategy).dtypes
    assert {name: found[anatomy.model.get_submodule(name)] for name in dtypes} == dtypes


@pytest.mark.parametrize(
    ("precision", "config", "units"),
    [
        ({}, TINY, [["model.layers.1"], ["model.layers.0"]]),
        ({"model.layers.0": "fp32"}, TINY, [["model.layers.1"], ["model.layers.0"]]),
        ({"model.layers.0": "bf16"}, TINY, [["model.layers.1"], ["model.layers.0"]]),
        ({"lm_head": "fp32"}, TINY, [["lm_head"], ["model.layers.1"], ["model.layers.0"]]),
        ({"lm_head": "fp32"}, TIED, [["model.embed_tokens", "lm_head"], ["model.layers.1"], ["model.layers.0"]]),
        (
            {"model": "fp32", "model.layers.1.mlp": "bf16"},
            TINY,
            [["model.layers.1.mlp"], ["model.layers.1"], ["model.layers.0"], ["model"]],
        ),
    ],
)
def test_modules_of_another_dtype_are_units_and_inner_ones_come_first(
    precision: dict[str, str], config: dict[str, Any], units: list[list[str]]
) -> None:
    in_root = {"wrap_embeddings": False, "wrap_lm_output": False}
    assert units_of(job(precision, config, strategy={"wrap_policy": in_root})) == units


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            job({"model.layers.00": "fp32"}),
            "precision model.layers.00 matches no module with parameters; choose for example model.layers.0, ",
        ),
        (
            job({"*.rotary_emb": "fp32"}),
            "precision *.rotary_emb matches no module with parameters; choose for example ",
        ),
        (
            job({"*.mlp": "fp32"}, model={"compile": True}),
            "model.compile translates model.layers.0 as a whole, and the unit model.layers.0.mlp with another dtype "
            "inside of it breaks its graph; name model.layers.0 in precision, or remove one of the two",
        ),
        (
            job({"*.up_proj": "fp32"}, strategy={"apply_tiled_mlp": True}),
            "apply_tiled_mlp gathers model.layers.0.mlp as a whole, and the unit model.layers.0.mlp.up_proj "
            "with another "
            "dtype inside of it would be gathered for each tile; name model.layers.0.mlp in precision, or "
            "remove one of "
            "the two",
        ),
        (
            job({"model.layers.1": "fp32"}, model={"attn_implementation": "flash_attention_2"}),
            "attn_implementation=flash_attention_2 computes in bf16 or fp16, and precision gives attention "
            "fp32; choose "
            "sdpa, or name other modules",
        ),
        (
            job({"model.layers.0": "fp32"}, MOE),
            "precision is not proven for model.layers.0.mlp.experts, a part of a mixture of experts; name other "
            "modules",
        ),
    ],
)
def test_patterns_that_do_not_fit_the_model_are_refused_at_submission(spec: JobSpec, message: str) -> None:
    _, problems = check_model(spec, may_read())
    (problem,) = problems
    assert problem.pointer == "/strategy/precision"
    assert problem.message.startswith(message)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (
            raw_spec(strategy={"precision": {"lm_head": "fp16"}}),
            "precision names fp16, which needs the gradient scaler of model.dtype=fp16, and model.dtype is "
            "fp32; choose "
            "bf16 or fp32",
        ),
        (
            raw_spec(
                strategy={"precision": {"lm_head": "bf16"}},
                training={"reproducible": "any_size", "global_batch_size": 4},
            ),
            "strategy.precision is not proven to give the same bits at every size; change it, or choose "
            "training.reproducible=same_size",
        ),
        (
            raw_spec(strategy={"precision": {"lm_head": "bf16"}, "tp_size": 2}, scaling={"num_workers": 2}),
            "tp_size=2 does not support strategy.precision, whose units are not proven for shared layers; "
            "change it, or "
            "choose tp_size=1",
        ),
        (
            raw_spec(strategy={"precision": {"lm_head": "bf16"}, "ep_size": 2}, scaling={"num_workers": 2}),
            "strategy.precision is not proven with ep_size=2; change it, or choose ep_size=1",
        ),
        (
            code_spec(strategy={"precision": {"head": "bf16"}}),
            "precision is not proven for own code (code), whose loss may use modules in any way; cast in your module, "
            "and remove precision",
        ),
    ],
)
def test_settings_that_precision_does_not_go_with_are_refused(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse(raw)
    ((pointer, found),) = [(problem.pointer, problem.message) for problem in caught.value.problems]
    assert pointer in ("/strategy", "/strategy/precision")
    assert found == message


def test_automatic_attention_is_not_flash_if_a_layer_attends_in_fp32() -> None:
    gpu, installed = torch.device("cuda"), ["flash_attention_2"]
    spec = job({"lm_head": "fp32"}, data={"packing": False})
    assert best_attention(spec, gpu, major=9, installed=installed) == "flash_attention_2"
    assert best_attention(spec, gpu, major=9, installed=installed, halves=False) == "sdpa"


def test_plan_counts_the_bytes_of_other_dtypes() -> None:
    found = list[dict[str, int]]()
    for precision in ({}, {"model.layers.*": "fp32"}, {"lm_head": "fp32"}):
        config = TINY | {"vocab_size": 48, "num_hidden_layers": 4}
        spec = job(precision, config, scaling={"num_workers": 2}, training={"chunked_loss": False})
        shape, problems = check_model(spec, may_read())
        assert problems == []
        assert shape is not None
        found.append({term.name: term.bytes for term in plan_job(spec, shape).memory})
    plain, layers, head = found
    assert layers["activations"] == 2 * plain["activations"]
    assert layers["gathered_parameters"] > plain["gathered_parameters"]
    # A logit is computed in fp32, copied for the loss, and has a gradient.
    assert head["logits"] == plain["logits"] * 12 // 10
    # A layer that backward recomputes takes the place of logits.
    assert sum(head[name] for name in ("activations", "logits")) == sum(
        plain[name] for name in ("activations", "logits")
    )
