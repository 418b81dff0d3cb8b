"""MLPs in tiles: which of them are, what a mixture without dense MLPs is told, and the memory that tiles save."""

from typing import Any

import pytest

from tests.support.builders.specs import may_read, raw_spec
from tests.support.families.families import small
from train_loop.model.families.causal.family import CAUSAL
from train_loop.parallel.layers import tiled_mlps
from train_loop.plan import KeptBytes
from train_loop.preflight.model import check_model
from train_loop.spec import ModelSpec, parse

FIRST_DENSE = {"mlp_only_layers": [0]}


@pytest.mark.parametrize(
    ("family", "config", "expected"),
    [
        ("qwen3", {}, ["0.mlp", "1.mlp"]),
        ("deepseek_v3", {}, ["0.mlp", "1.mlp.shared_experts"]),
        ("glm4_moe", {}, ["0.mlp", "1.mlp.shared_experts"]),
        ("qwen2_moe", {}, ["0.mlp.shared_expert", "1.mlp.shared_expert"]),
        ("granitemoeshared", {"shared_intermediate_size": 32}, ["0.shared_mlp", "1.shared_mlp"]),
        ("qwen3_moe", FIRST_DENSE, ["0.mlp"]),
    ],
)
def test_dense_mlps_are_tiled_and_routed_experts_are_not(
    family: str, config: dict[str, Any], expected: list[str]
) -> None:
    anatomy = CAUSAL.build(ModelSpec(config=small(family) | config))
    names = {module: name.removeprefix("model.layers.") for name, module in anatomy.model.named_modules()}
    assert [names[one] for one in tiled_mlps(anatomy, anatomy.layers)] == expected


@pytest.mark.parametrize(("family", "model"), [("qwen3_moe", "Qwen3MoeForCausalLM"), ("gpt_oss", "GptOssForCausalLM")])
def test_mixture_without_a_dense_mlp_is_refused_with_the_reason(family: str, model: str) -> None:
    job = parse(raw_spec(model={"config": small(family)}, strategy={"apply_tiled_mlp": True}))
    _, (problem,) = check_model(job, may_read())
    assert problem.pointer == "/strategy/apply_tiled_mlp"
    assert problem.message == (
        "apply_tiled_mlp computes dense MLPs in tiles, of layers without experts and of shared experts, and "
        f"{model} has no class named *MLP besides its routed experts; set apply_tiled_mlp: false"
    )


def kept(family: str, config: dict[str, Any], *, tiled: bool) -> KeptBytes:
    job = parse(raw_spec(model={"config": small(family) | config}, strategy={"apply_tiled_mlp": tiled}))
    shape, problems = check_model(job, may_read())
    assert problems == []
    assert shape is not None
    assert shape.kept is not None
    return shape.kept


EACH = 4 * 4
"""Bytes of a token and a value of F: outputs of both projections, their activation and their product, in fp32."""


@pytest.mark.parametrize(
    ("family", "config", "widths", "widest"),
    [
        ("olmo2", {"intermediate_size": 4096}, 2 * 4096, 4096),
        # A dense layer, and a shared expert.
        ("deepseek_v3", {"intermediate_size": 4096}, 4096 + 32, 4096),
    ],
)
def test_only_one_tile_of_dense_mlps_is_kept(family: str, config: dict[str, Any], widths: int, widest: int) -> None:
    whole, tiled = (kept(family, config, tiled=way) for way in (False, True))
    assert (tiled.inputs, tiled.outside) == (whole.inputs, whole.outside)
    assert whole.layers - tiled.layers == EACH * widths - EACH * widest // 4
    assert whole.layer - tiled.layer == EACH * widest * 3 // 4
