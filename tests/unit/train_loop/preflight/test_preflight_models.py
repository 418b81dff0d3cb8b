"""Preflight checks of models: supported features, positions and shared parameters."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.builders.specs import LONGROPE, TINY, may_read, raw_spec
from train_loop.errors import ModelError
from train_loop.model.families.causal.build import build_model
from train_loop.model.families.causal.family import CAUSAL
from train_loop.parallel.units import repeated_layers
from train_loop.plan import plan_job
from train_loop.preflight.model import check_model
from train_loop.spec import Problem, WrapPolicySpec, parse, parse_text

OPT = {"model_type": "opt", "vocab_size": 384, "hidden_size": 32, "ffn_dim": 48, "word_embed_proj_dim": 32} | {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}

GPT2 = {"model_type": "gpt2", "vocab_size": 384, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 48}
IDS = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0)
DYNAMIC = TINY | {"model_type": "llama", "max_position_embeddings": 48} | IDS
DYNAMIC |= {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}}


@pytest.mark.parametrize(
    ("parts", "pointer", "message"),
    [
        (
            {"strategy": {"wrap_policy": {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}}},
            "/strategy/wrap_policy/transformer_layer_cls_to_wrap",
            "matches no module of Qwen3ForCausalLM; choose among Qwen3Model, Qwen3DecoderLayer,",
        ),
        (
            {"strategy": {"wrap_policy": {"transformer_layer_cls_to_wrap": ["Qwen3ForCausalLM"]}}},
            "/strategy/wrap_policy/transformer_layer_cls_to_wrap",
            "matches no module of Qwen3ForCausalLM; choose among Qwen3Model, Qwen3DecoderLayer,",
        ),
        (
            {"strategy": {"wrap_policy": {"transformer_layer_cls_to_wrap": ["Embedding"], "wrap_embeddings": True}}},
            "/strategy/wrap_policy/transformer_layer_cls_to_wrap",
            "transformer_layer_cls_to_wrap=Embedding is not a layer; set wrap_embeddings: true instead",
        ),
        (
            {"model": {"config": OPT}, "strategy": {"apply_tiled_mlp": True}},
            "/strategy/apply_tiled_mlp",
            "OPTDecoderLayer has no child module of a class named *MLP",
        ),
    ],
)
def test_unsupported_model_features_are_rejected(parts: dict[str, Any], pointer: str, message: str) -> None:
    found = [(p.pointer, p.message) for p in check_model(parse(raw_spec(**parts)), may_read())[1]]
    assert [p for p, _ in found] == [pointer]
    assert message in found[0][1]


FALCON = {"model_type": "falcon", "vocab_size": 384, "hidden_size": 32, "num_hidden_layers": 2} | {
    "num_attention_heads": 4,
    "ffn_hidden_size": 48,
}


def test_offloaded_inputs_of_compiled_layers_are_rejected() -> None:
    job = parse(raw_spec(model={"compile": True, "gradient_checkpointing": "offload"}))
    _, (problem,) = check_model(job, may_read())
    assert problem == Problem(
        "/model/gradient_checkpointing",
        "gradient_checkpointing=offload moves the inputs of layers by hooks that torch.compile does not translate, so "
        "that compile has no effect; choose full, or remove compile",
    )


def test_model_that_bypasses_the_attention_registry_is_rejected_for_ulysses_only() -> None:
    shared = {"strategy": {"ulysses_size": 2}, "scaling": {"num_workers": 2}}
    _, (problem,) = check_model(parse(raw_spec(model={"config": FALCON}, **shared)), may_read())
    assert problem.pointer == "/strategy/ulysses_size"
    assert "which 0 of the 2 layers of FalconForCausalLM use; choose ulysses_size: 1" in problem.message
    assert check_model(parse(raw_spec(model={"config": FALCON})), may_read())[1] == []


def test_model_that_takes_no_masks_is_trained_without_packing_only() -> None:
    config = FALCON | {"alibi": True}
    _, (problem,) = check_model(parse(raw_spec(model={"config": config})), may_read())
    assert (problem.pointer, "set data.packing: false" in problem.message) == ("/data/packing", True)
    assert check_model(parse(raw_spec(model={"config": config}, data={"packing": False})), may_read())[1] == []


def test_model_without_layer_names_uses_those_of_the_spec() -> None:
    model = build_model(parse(raw_spec()).model)
    model._no_split_modules = None
    with pytest.raises(ModelError, match="transformer_layer_cls_to_wrap, for example Qwen3Model, Qwen3DecoderLayer"):
        repeated_layers(CAUSAL.anatomy(model), WrapPolicySpec())
    assert (
        len(
            repeated_layers(CAUSAL.anatomy(model), WrapPolicySpec(transformer_layer_cls_to_wrap=("Qwen3DecoderLayer",)))
        )
        == 2
    )


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (GPT2 | IDS, "sequence_length=49 is more than the 48 positions of GPT2LMHeadModel; choose at most 48"),
        # Its table has two more rows, which no position uses.
        (OPT | IDS | {"max_position_embeddings": 48}, "is more than the 48 positions of OPTForCausalLM"),
        (DYNAMIC, "is more than max_position_embeddings=48, and rope_type=dynamic of LlamaForCausalLM then depends on"),
    ],
)
def test_sequence_longer_than_the_positions_is_rejected_with_both_numbers(config: dict[str, Any], message: str) -> None:
    def problems(length: int) -> list[Problem]:
        return check_model(parse(raw_spec(model={"config": config}, data={"sequence_length": length})), may_read())[1]

    (problem,) = problems(49)
    assert problem.pointer == "/data/sequence_length"
    assert message in problem.message
    assert problems(48) == []


def test_models_with_computed_positions_accept_any_length() -> None:
    for config in (TINY, LONGROPE):
        assert (
            check_model(parse(raw_spec(model={"config": config}, data={"sequence_length": 9999})), may_read())[1] == []
        )


BERT = {
    "model_type": "bert",
    "vocab_size": 384,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
} | IDS
BERT |= {"intermediate_size": 48, "is_decoder": True}


def test_parameter_shared_by_units_is_found_on_meta_with_the_classes_to_choose() -> None:
    _, (problem,) = check_model(parse(raw_spec(model={"config": BERT})), may_read())
    assert problem.pointer == "/strategy/wrap_policy/transformer_layer_cls_to_wrap"
    assert problem.message.startswith(
        "bert.embeddings.word_embeddings.weight and cls.predictions.decoder.weight of BertLMHeadModel are one parameter"
    )
    assert problem.message.endswith("set strategy.wrap_policy.transformer_layer_cls_to_wrap: [BertLayer]")
    policy = {"wrap_policy": {"transformer_layer_cls_to_wrap": ["BertLayer"]}}
    assert check_model(parse(raw_spec(model={"config": BERT}, strategy=policy)), may_read())[1] == []


@pytest.mark.parametrize("name", ["moe", "tensor-parallel"])
def test_example_passes_the_checks_of_a_job(name: str) -> None:
    job = parse_text(Path(f"examples/{name}.yaml").read_text())
    shape, problems = check_model(job, may_read())
    assert problems == []
    assert shape is not None
    assert plan_job(job, shape).mesh.tp == job.strategy.tp_size
