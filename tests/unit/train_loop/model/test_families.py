"""Families of causal language models: accepted with published sizes, or rejected with the true reason."""

from typing import Any

import pytest

from tests.support.builders.searches import drawn
from tests.support.builders.specs import may_read, raw_spec
from tests.support.families.families import small
from train_loop.preflight.model import check_model
from train_loop.spec import parse

ENCODER = {"vocab_size": 384, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4} | {
    "intermediate_size": 48
}
LAYER_OF = {"openai-gpt": ["Block"], "roformer": ["RoFormerLayer"], "bert": ["BertLayer"]} | {
    "roberta": ["RobertaLayer"],
    "camembert": ["CamembertLayer"],
}


@pytest.mark.parametrize(
    ("config", "pointer", "message"),
    [
        ({"model_type": "bert"}, "/model/config", "set is_decoder: true in the model's config"),
        ({"model_type": "bert", "is_decoder": True}, None, ""),
        ({"model_type": "roberta"}, "/model/config", "set is_decoder: true in the model's config"),
        ({"model_type": "roberta", "is_decoder": True, "pad_token_id": 0, "max_position_embeddings": 513}, None, ""),
        ({"model_type": "roberta", "is_decoder": True}, "/model/config", "pad_token_id=1 of RobertaForCausalLM is a"),
        # One of its 512 positions is that of padding.
        (
            {"model_type": "camembert", "is_decoder": True, "pad_token_id": 0, "max_position_embeddings": 512},
            "/data/sequence_length",
            "sequence_length=512 is more than the 511 positions of CamembertForCausalLM",
        ),
        ({"model_type": "xmod", "is_decoder": True}, "/model/config", 'set default_language: "en_XX"'),
        (
            {"model_type": "gemma3_text", "head_dim": 8, "use_bidirectional_attention": True},
            "/model/config",
            "attends to later tokens",
        ),
    ],
)
def test_models_that_do_not_fit_causal_training_are_rejected(
    config: dict[str, Any], pointer: str | None, message: str
) -> None:
    layers = LAYER_OF.get(config["model_type"], [])
    strategy = {"wrap_policy": {"transformer_layer_cls_to_wrap": layers}}
    raw = raw_spec(model={"config": ENCODER | config}, data={"sequence_length": 512}, strategy=strategy)
    problems = check_model(parse(raw), may_read())[1]
    assert [problem.pointer for problem in problems] == ([pointer] if pointer else [])
    assert all(message in problem.message for problem in problems)


def test_model_that_ignores_positions_is_accepted_without_packing() -> None:
    config = small("bart")
    _, (problem,) = check_model(parse(raw_spec(model={"config": config})), may_read())
    assert (problem.pointer, "set data.packing: false" in problem.message) == ("/data/packing", True)
    assert check_model(parse(raw_spec(model={"config": config}, data={"packing": False})), may_read())[1] == []


CHUNKED = small("llama4_text") | {"moe_layers": []}


# The check compares the parts of a row of a small copy: each has attention that the registry of transformers lacks.
@pytest.mark.parametrize(
    "config", [CHUNKED, *map(small, ("bloom", "mpt", "gptj", "codegen", "gpt_neo", "xglm", "gpt_neox_japanese"))]
)
def test_own_attention_and_chunks_are_split_and_packed(config: dict[str, Any]) -> None:
    raw = raw_spec(model={"config": config}, data={"sequence_length": 32}, strategy={"ulysses_size": 4})
    assert check_model(parse(raw | {"scaling": {"num_workers": 4}}), may_read())[1] == []


def test_row_beyond_the_scale_of_llama_4_is_not_packed_or_split() -> None:
    raw = raw_spec(model={"config": CHUNKED | {"floor_scale": 16}}, strategy={"ulysses_size": 4})
    raw |= {"data": raw["data"] | {"sequence_length": 32}, "scaling": {"num_workers": 4}}
    found = check_model(parse(raw), may_read())[1]
    assert [one.pointer for one in found] == ["/data/packing", "/strategy/ulysses_size"]


# They count positions themselves: from a table, from a buffer, and as sines.
@pytest.mark.parametrize("family", ["bart", "openai-gpt", "roformer"])
def test_sequence_is_not_longer_than_the_positions_of_a_model_that_takes_none(family: str) -> None:
    decoder = {"is_decoder": True} if family != "openai-gpt" else {}
    raw = raw_spec(model={"config": small(family) | decoder}, data={"packing": False})
    raw["strategy"] = {"wrap_policy": {"transformer_layer_cls_to_wrap": LAYER_OF.get(family, [])}}

    def problems(length: int) -> list[str]:
        raw["data"]["sequence_length"] = length
        return [one.message for one in check_model(parse(raw), may_read())[1]]

    assert problems(64) == []
    assert "sequence_length=65 is more than the 64 positions" in problems(65)[0]


@pytest.mark.parametrize(
    ("family", "dtype", "reason"),
    [
        ("mixtral", "bf16", None),
        ("gpt_oss", "bf16", None),
        ("dbrx", "bf16", "not supported yet: model_type=dbrx, whose experts do not have transformers' common form"),
        ("minimax", "bf16", "dtype=bf16 is not supported for model_type=minimax"),
        ("minimax", "fp32", None),
    ],
)
def test_mixture_of_experts_is_checked_in_the_dtype_of_training(family: str, dtype: str, reason: str | None) -> None:
    raw = raw_spec(model={"config": small(family), "dtype": dtype}, data={"packing": False})
    messages = [problem.message for problem in check_model(parse(raw), may_read())[1]]
    assert len(messages) == (reason is not None)
    assert all(message.startswith(str(reason)) for message in messages)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_dense_model_is_probed_in_the_dtype_of_training(dtype: str) -> None:
    raw = raw_spec(model={"config": small("gpt2"), "dtype": dtype})
    assert check_model(parse(raw), may_read())[1] == []


INDEXED = small("glm_moe_dsa")
GEMMA_3 = {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "hidden_size": 32}}
BYTES = {"model_type": "blt", "vocab_size": 260}


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (
            GEMMA_3,
            "one of its parts, with others such as vision or audio; train that part alone: model_type=gemma3_text",
        ),
        # Its defaults break rules of its class.
        ({"model_type": "dots3_note"}, "has a language model as one of its parts, with others such as vision or audio"),
        (BYTES, "not supported yet: model_type=blt, whose layers see patches of bytes"),
        (
            small("bart") | {"decoder_layerdrop": 0.1},
            "ranks would wait for each other; set decoder_layerdrop: 0.0 in the",
        ),
        (small("llama") | {"attention_dropout": 1.5}, "attention_dropout=1.5 is not a probability"),
        (
            small("llama") | {"return_dict": False},
            "return_dict=False does not fit this loop's call of LlamaForCausalLM",
        ),
        (small("bert") | {"chunk_size_feed_forward": 8}, "chunk_size_feed_forward=8 does not fit this loop's call"),
        (
            small("llama") | {"attn_implementation": "eager"},
            "has no field attn_implementation; set model.attn_implem",
        ),
        (
            small("llama") | {"rope_parameters": {"rope_type": "default", "rope_theta": 0.0}},
            "computes values that are not finite with this config; correct its numbers",
        ),
        (
            small("opt") | {"layerdrop": 0.1},
            "skips a layer with probability 0.1 in training, and each rank skips others",
        ),
        (
            small("rwkv") | {"num_hidden_layers": 7},
            "divides its weights before an evaluation (rescale_every=6), so that a checkpoint after it",
        ),
        (small("xlnet"), 'attends to later tokens, so it is not a causal model; set attn_type: "uni" in the model\'s'),
        ({"model_type": "t5"}, "has no causal language model for model_type=t5; choose a decoder of text"),
        (ENCODER | {"model_type": "bert", "add_cross_attention": True}, "add_cross_attention: true needs the output"),
        (
            small("doge") | {"is_moe": True},
            "not supported yet: mixture of experts (DogeCDMoE in DogeForCausalLM); choose",
        ),
        (small("marian") | {"decoder_vocab_size": 100}, "has embeddings for 100 tokens, and its config says vocab_siz"),
        (small("qwen4_exp"), "not supported yet: qwen4_exp_text has layers of type indexed_attention; choose a model"),
        (INDEXED, "not supported yet: glm_moe_dsa has layers of type indexed_attention; choose a model whose layers"),
    ],
)
def test_kind_of_model_that_is_not_trained_is_rejected_with_the_true_reason(
    config: dict[str, Any], reason: str
) -> None:
    _, problems = check_model(parse(raw_spec(model={"config": config})), may_read())
    assert reason in problems[0].message


# Sizes of published models, with head counts, windows and rotary parameters that a small copy must survive. Only one
# has all of its layers, because each takes time.
PUBLISHED: dict[str, dict[str, Any]] = {
    "llama": {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 4}
    | {"num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072}
    | {
        "rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0}
        | {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    },
    "qwen2": {"vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 4}
    | {"num_attention_heads": 14, "num_key_value_heads": 2},
    "qwen3": {"vocab_size": 151936, "hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64}
    | {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128},
    "smollm3": {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 4}
    | {"num_attention_heads": 9, "num_key_value_heads": 3, "pad_token_id": 0},
    # Granite 4.0 350M: neither experts nor recurrent layers; its config has an infinite number.
    "granitemoehybrid": {"vocab_size": 100352, "hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 16}
    | {"num_key_value_heads": 4, "intermediate_size": 2048, "shared_intermediate_size": 2048, "num_local_experts": 0}
    | {"num_experts_per_tok": 0, "layer_types": ["attention"] * 4, "mamba_n_heads": 128, "mamba_d_head": 16},
    # Rotary embeddings whose type differs by layer.
    "olmo3": {"vocab_size": 100278, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 8}
    | {"num_attention_heads": 32, "layer_types": ["sliding_attention", "full_attention"] * 4, "sliding_window": 4096}
    | {"max_position_embeddings": 65536}
    | {
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0},
            "full_attention": {"rope_type": "longrope", "rope_theta": 500000.0}
            | {"original_max_position_embeddings": 8192, "short_factor": [1.0] * 64, "long_factor": [4.0] * 64},
        }
    },
    # Codestral Mamba 7B and Nemotron Nano 9B v2: heads that share projections in groups.
    "mamba2": {"vocab_size": 32768, "hidden_size": 4096, "num_hidden_layers": 4, "num_heads": 128, "n_groups": 8},
    "nemotron_h": {"vocab_size": 131072, "hidden_size": 4480, "intermediate_size": 15680, "num_attention_heads": 40}
    | {"num_key_value_heads": 8, "head_dim": 128, "layers_block_type": ["mamba", "mlp", "mamba", "attention"]}
    | {"mamba_num_heads": 128, "mamba_head_dim": 80, "n_groups": 8},
    "rwkv": {"vocab_size": 50277, "hidden_size": 4096, "num_hidden_layers": 4, "rescale_every": 0},
    "falcon": {"vocab_size": 65024, "hidden_size": 4544, "num_hidden_layers": 4, "num_attention_heads": 71},
    "gemma3_text": {"vocab_size": 262208, "hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 12}
    | {"num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128, "sliding_window": 1024},
    "phi3": {"vocab_size": 200064, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 4}
    | {"num_attention_heads": 24, "num_key_value_heads": 8, "partial_rotary_factor": 0.75, "sliding_window": 262144}
    | {"max_position_embeddings": 131072, "original_max_position_embeddings": 4096}
    | {
        "rope_parameters": {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 4096}
        | {"short_factor": [1.0] * 48, "long_factor": [4.0] * 48, "partial_rotary_factor": 0.75}
    },
}


STATEFUL = ("mamba2", "nemotron_h", "rwkv")
"""Families that do not keep packed documents apart."""


@pytest.mark.parametrize("family", drawn(list(PUBLISHED), 4))
def test_published_sizes_are_accepted(family: str) -> None:
    config = {"model_type": family} | PUBLISHED[family]
    raw = raw_spec(model={"config": config, "dtype": "bf16"}, data={"packing": family not in STATEFUL})
    assert check_model(parse(raw), may_read())[1] == []
