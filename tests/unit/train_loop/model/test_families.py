"""Every causal language model of transformers: initialised weights, or a rejected spec with a reason."""

from typing import Any

import pytest
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import train_loop.model.build as module
from tests.support.builders.specs import spec
from train_loop.errors import ModelError
from train_loop.model.build import build_model, check_rules

_SIZES = {
    8: "state_size d_state",
    16: "head_dim kv_lora_rank q_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim",
    32: "moe_intermediate_size shared_expert_intermediate_size qk_head_dim",
    64: "hidden_size intermediate_size n_embd n_positions n_inner d_model d_ff ffn_dim decoder_ffn_dim encoder_ffn_dim "
    "word_embed_proj_dim max_position_embeddings embedding_size ffn_hidden_size",
    384: "vocab_size",
    4: "num_attention_heads n_head decoder_attention_heads encoder_attention_heads num_experts num_local_experts "
    "n_routed_experts",
    2: "num_hidden_layers num_key_value_heads n_layer num_layers decoder_layers encoder_layers num_experts_per_tok",
    1: "first_k_dense_replace n_group topk_group",
    0: "pad_token_id bos_token_id eos_token_id",
}
"""Config fields, by the small number that each gets."""
_WITHOUT_RULE = {"gemma3": "position_ids", "phi4_multimodal": "probe"}
"""Families with a tensor in their vision tower that transformers leaves uninitialised."""


def small(family: str) -> dict[str, Any]:
    """Return a small config of a family."""
    known = AutoConfig.for_model(family).to_dict()
    fields = {name: size for size, names in _SIZES.items() for name in names.split()}
    return {"model_type": family} | {
        name: size for name, size in fields.items() if name in known and not isinstance(known[name], list | dict)
    }


def fault(family: str) -> str | None:
    """Return the reason why a family's spec is rejected, or None if all its weights are initialised."""
    try:
        config = spec(model={"config": small(family)}).model
        model = build_model(config)
    except Exception as error:  # the error types of config validation
        return f"not built: {error}"
    try:
        check_rules(model)
    except ModelError as error:
        return str(error)
    return None


@pytest.mark.slow
def test_weights_of_every_family_are_initialised_or_named(monkeypatch: pytest.MonkeyPatch) -> None:
    # This covers modules that are large in real models and small here.
    monkeypatch.setattr(module, "_FEW_ELEMENTS", 50_000_000)
    found = {family: fault(family) for family in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)}
    lacking = {family: why for family, why in found.items() if why is not None and not why.startswith("not built")}
    assert lacking.keys() == _WITHOUT_RULE.keys()
    assert all(_WITHOUT_RULE[family] in why for family, why in lacking.items())
    assert sum(why is None for why in found.values()) >= 100
