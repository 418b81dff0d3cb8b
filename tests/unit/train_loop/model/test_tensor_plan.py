"""Tensor parallelism: its mesh, its memory, and the jobs that it is refused for, each with a remedy."""

from typing import Any

import pytest

from tests.support.builders.specs import TINY, may_read, raw_spec, spec
from tests.support.families.families import small
from train_loop.errors import ModelError
from train_loop.model.families.causal.family import CAUSAL
from train_loop.model.families.causal.parallel.tensor import check_plan
from train_loop.model.families.causal.probe import probe
from train_loop.model.folder import model_shape
from train_loop.plan import KeptBytes, ModelShape, Plan, groups_across_hosts, plan_job, plan_mesh, why_split
from train_loop.preflight.model import check_model
from train_loop.spec import ScalingSpec, SpecError, parse

TWO = {"strategy": {"tp_size": 2}, "scaling": {"num_workers": 4}}


@pytest.mark.parametrize(
    ("part", "setting", "pointer", "found"),
    [
        ("training", {"optimizer": "adamw_8bit"}, "/training/optimizer", "training.optimizer=adamw_8bit, whose blocks"),
        ("training", {"reproducible": "any_size", "global_batch_size": 8}, "/strategy", "tp_size=2"),
        ("model", {"compile": True}, "/model/compile", "model.compile: true, because"),
        ("model", {"head": "masked_lm"}, "/model/head", "model.head=masked_lm, whose models"),
        (
            "strategy",
            {"reshard_after_forward": 2},
            "/strategy/reshard_after_forward",
            "reshard_after_forward=2, for which torch",
        ),
    ],
)
def test_unproven_settings_are_refused_with_the_reason(
    part: str, setting: dict[str, Any], pointer: str, found: str
) -> None:
    raw = raw_spec(**TWO)
    raw[part] = raw.get(part, {}) | setting
    with pytest.raises(SpecError) as error:
        parse(raw)
    assert any(one.pointer == pointer and found in one.message for one in error.value.problems)


@pytest.mark.parametrize(
    ("part", "setting"),
    [
        *(("training", {"optimizer": name}) for name in ("sgd", "adafactor", "muon")),
        ("model", {"dtype": "fp16"}),
        ("model", {"freeze_module_prefix": ["model.layers.0"]}),
        ("strategy", {"offload_policy": True}),
        ("strategy", {"wrap_policy": {"min_num_params": 100}}),
        ("strategy", {"norm_dtype": "fp32"}),
    ],
)
def test_proven_settings_are_accepted(part: str, setting: dict[str, Any]) -> None:
    raw = raw_spec(**TWO)
    raw[part] = raw.get(part, {}) | setting
    assert plan_job(parse(raw), model_shape(parse(raw).model)).mesh.tp == 2


def fault(config: dict[str, Any], **strategy: int) -> str:
    """Return why a model is refused; empty if it is not."""
    job = spec(model={"config": config}, strategy={"tp_size": 2} | strategy, scaling={"num_workers": 8})
    anatomy = CAUSAL.build(job.model)
    try:
        check_plan(anatomy.model, probe(anatomy), job)
    except ModelError as error:
        return str(error)
    return ""


def test_models_that_cannot_be_split_are_refused_with_numbers_and_remedy() -> None:
    assert fault(TINY) == ""
    assert "that of model_type=gpt2 is missing; choose tp_size: 1" in fault(small("gpt2"))
    assert "tp_size=2 is not proven for model_type=apertus" in fault(small("apertus"))
    assert fault(TINY, tp_size=4) == "", "two ranks share each kv head"
    three = TINY | {"num_attention_heads": 12, "num_key_value_heads": 3}
    assert "tp_size=2 must divide the 3 kv heads of model.layers.0.self_attn, or be a multiple" in fault(three)
    assert "choose tp_size=1, 3, 6 or 12" in fault(three)
    assert "tp_size x ulysses_size=8 must divide its 4 heads" in fault(TINY, ulysses_size=4)
    assert "choose another ulysses_size" in fault(TINY, ulysses_size=3)
    heads = {"num_attention_heads": 24, "num_key_value_heads": 6}
    assert "choose tp_size=1, 3, 6 or 12" in fault(TINY | heads, ulysses_size=2)
    assert "attention_dropout: 0.1; set it to 0.0" in fault(TINY | {"attention_dropout": 0.1})
    noisy = small("mixtral") | {"router_jitter_noise": 0.1}
    assert "noise on inputs of routers, and the model's config has router_jitter_noise: 0.1" in fault(noisy, ep_size=2)
    assert fault(small("gpt_neox")) == "", "its classifier_dropout belongs to a head of labels"
    assert "tp_size=8 leaves a worker without a part of model.layers.0.mlp." in fault(
        TINY | {"num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 12}, tp_size=8
    )
    # Their plan gathers queries and keys, so that each rank has all heads.
    assert fault(small("phi3"), tp_size=4) == ""


@pytest.mark.parametrize(
    ("family", "setting", "reason"),
    [
        ("phi", {"qk_layernorm": True}, "has none for model.layers.0.self_attn.q_layernorm.weight"),
        ("cohere", {"use_qk_norm": True}, "has none for model.layers.0.self_attn.q_norm.weight"),
        ("llama", {"hidden_act": "xielu"}, "has none for model.layers.0.mlp.act_fn.alpha_p"),
        ("olmo", {"clip_qkv": 8.0}, "the model's config has clip_qkv: 8.0"),
    ],
)
def test_settings_with_other_gradients_are_refused(family: str, setting: dict[str, Any], reason: str) -> None:
    assert fault(small(family)) == ""
    assert reason in fault(small(family) | setting)


@pytest.mark.parametrize("family", ["diffllama", "hunyuan_v1_dense"])
def test_plans_that_split_no_layer_are_refused(family: str) -> None:
    assert f"that of model_type={family} splits none of its layers" in fault(small(family))


def test_mesh_has_the_ranks_that_share_layers_innermost() -> None:
    mesh = plan_mesh(world=8, fsdp_size=2, ulysses_size=2, tp_size=2)
    assert mesh.axes == {"ddp": 2, "fsdp": 2, "tp": 2, "sp": 2}
    assert (mesh.dp, mesh.peers) == (2, 4)
    assert [mesh.data_rank(rank) for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [mesh.sequence_rank(rank) for rank in range(8)] == [0, 0, 1, 1] * 2
    assert [rank for rank in range(8) if mesh.leads(rank)] == [0, 4]
    assert [axis.role for axis in mesh.parameters] == ["replicate", "shard", "tensor"]
    assert groups_across_hosts(mesh, [*"aaabbbbb"], "tensor") == {range(2, 4): ("a", "b")}
    with pytest.raises(ValueError, match="tp_size=3 does not divide the 8 workers; choose 1, 2, 4 or 8"):
        plan_mesh(world=8, fsdp_size=0, ulysses_size=1, tp_size=3)
    with pytest.raises(ValueError, match="fsdp_size=3 does not divide the 4 groups of tp_size=2 workers"):
        plan_mesh(world=8, fsdp_size=3, ulysses_size=1, tp_size=2)


def test_nodes_that_cannot_hold_a_group_get_a_warning() -> None:
    scaling = ScalingSpec(num_workers=4)
    nodes = [{"CPU": 2.0}, {"CPU": 1.0}, {"CPU": 1.0}]
    reason = why_split(scaling, nodes, group=2, name="tp_size")
    assert reason is not None
    assert "1 of 2 tensor parallel groups cross nodes" in reason
    assert "choose tp_size=1 or 2 workers, or add" in reason


def test_plan_divides_memory_by_the_ranks_that_share_layers() -> None:
    def plan(tp: int) -> Plan:
        job = spec(strategy={"tp_size": tp}, scaling={"num_workers": 4}, training={"global_batch_size": 8})
        return plan_job(job, model_shape(job.model))

    whole, shared = ({term.name: term.bytes for term in plan(tp).memory} for tp in (1, 2))
    assert plan(2).checkpoint_bytes == pytest.approx(plan(1).checkpoint_bytes, rel=0.02)
    assert [term.name for term in plan(2).memory if not term.formula.endswith(": / tp")] == ["attention_mask"]
    # Four shards of whole layers, and two of halves.
    assert shared["parameters"] == pytest.approx(whole["parameters"], rel=0.02)
    assert shared["gathered_parameters"] < 0.65 * whole["gathered_parameters"]


def shape_of(config: dict[str, Any], tp: int) -> ModelShape:
    job = spec(model={"config": config}, strategy={"tp_size": tp}, scaling={"num_workers": 4})
    shape, problems = check_model(job, may_read())
    assert problems == []
    assert shape is not None
    return shape


def test_activations_are_those_that_a_rank_keeps() -> None:
    def saved(family: str, tp: int) -> int:
        (whole, own) = (shape_of(small(family) | {"hidden_size": 64}, size).kept for size in (1, tp))
        assert whole is not None
        assert own is not None
        assert (whole.inputs, whole.outside) == (own.inputs, own.outside)
        return whole.layer - own.layer

    states = 4 * 64  # bytes of a token's states; heads have 16 values, and F is 64, too
    assert saved("phi3", 2) == 0, "its plan gathers what it splits"
    assert saved("olmo2", 2) == states * 4 // 2, "half of four tensors of the MLP"
    # Three of four queries and outputs, and one of two keys and values, which two ranks use.
    assert saved("mistral", 4) == states * 4 * 3 // 4 + states * 2 * 3 // 4 + states * 2 // 4


def test_keys_that_each_rank_has_whole_are_planned() -> None:
    counts = shape_of(TINY, 4).counts
    assert counts is not None
    assert counts.of_rank is not None
    whole = TINY["num_hidden_layers"] * (2 * 16 * 32 + 2 * 32 + 2 * 8) + 32  # keys, values and norms
    assert counts.of_rank.total == (counts.total - whole) // 4 + whole
    job = spec(strategy={"tp_size": 4}, scaling={"num_workers": 4})
    memory = {term.name: term.bytes for term in plan_job(job, shape_of(TINY, 4)).memory}
    assert memory["parameters"] == 4 * counts.of_rank.total


def test_names_of_other_tools_lead_to_the_field() -> None:
    raw = raw_spec(strategy={"tensor_model_parallel_size": 2})
    with pytest.raises(SpecError, match=r"use strategy\.tp_size"):
        parse(raw)


SPLIT = {"tp_size": 2, "sequence_parallel": True}


def test_sequence_parallel_without_its_ranks_is_refused() -> None:
    with pytest.raises(SpecError) as error:
        parse(raw_spec(strategy={"sequence_parallel": True}, scaling={"num_workers": 4}))
    found = "tp_size=1 shares none; set tp_size, or remove sequence_parallel"
    assert any(found in one.message for one in error.value.problems)


def test_sequences_that_ranks_cannot_split_evenly_are_refused_with_numbers() -> None:
    job = spec(strategy=SPLIT | {"ulysses_size": 2}, scaling={"num_workers": 4}, data={"sequence_length": 30})
    with pytest.raises(SpecError) as error:
        plan_job(job, model_shape(job.model))
    assert [(one.pointer, one.message) for one in error.value.problems] == [
        (
            "/strategy/sequence_parallel",
            "sequence_parallel splits sequence_length=30 into tp_size x ulysses_size=4 parts, and they do not "
            "divide it; choose a multiple of 4, for example 32",
        )
    ]


def test_sequence_parallel_of_a_family_that_is_not_proven_is_refused() -> None:
    job = spec(model={"config": small("apertus")}, strategy=SPLIT, scaling={"num_workers": 4})
    _, problems = check_model(job, may_read())
    assert [one.pointer for one in problems] == ["/strategy/tp_size"]
    assert "tp_size=2 is not proven for model_type=apertus" in problems[0].message


@pytest.mark.parametrize(("family", "ep"), [("gemma2", 1), ("mixtral", 2)])
def test_parts_of_the_tokens_are_planned(family: str, ep: int) -> None:
    def kept(**strategy: Any) -> KeptBytes:
        job = spec(model={"config": small(family)}, strategy={"tp_size": 2, "ep_size": ep} | strategy)
        shape, problems = check_model(job.at(4), may_read())
        assert problems == []
        assert shape is not None
        assert shape.kept is not None
        return shape.kept

    whole, split = kept(), kept(sequence_parallel=True)
    assert split.inputs * 2 == whole.inputs
    assert split.layer < whole.layer
