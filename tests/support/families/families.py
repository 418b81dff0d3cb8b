"""Small configs of every causal language model of transformers."""

import math
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from train_loop.model.families.causal.small_copy import shrink

FAMILIES = tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
_SIZES = {
    8: "chunk_size mamba_chunk_size state_size d_state mamba_d_state sliding_window rotary_dim",
    16: "hidden_size_per_layer_input laurel_rank head_dim d_head kv_lora_rank q_lora_rank qk_nope_head_dim "
    "qk_rope_head_dim v_head_dim",
    32: "moe_intermediate_size shared_expert_intermediate_size qk_head_dim",
    64: "hidden_size intermediate_size n_embd n_positions n_inner d_model d_ff ffn_dim decoder_ffn_dim encoder_ffn_dim "
    "word_embed_proj_dim max_position_embeddings embedding_size embedding_dim ffn_hidden_size global_head_dim",
    384: "vocab_size vocab_size_per_layer_input",
    4: "num_attention_heads n_head decoder_attention_heads encoder_attention_heads num_experts num_local_experts "
    "n_routed_experts",
    2: "num_key_value_heads num_experts_per_tok",
    1: "first_k_dense_replace n_group topk_group num_blocks",
    0: "pad_token_id bos_token_id eos_token_id",
}
"""Config fields, by the small number that each gets."""
_OWN: dict[str, dict[str, Any]] = {
    # Compressed keys and values have as many heads as queries.
    "minicpm3": {"num_key_value_heads": 4},
    "youtu": {"num_key_value_heads": 4},
    "dots3_note_text": {"num_key_value_heads": 4, "head_dim": 32},
    "axk1": {"num_key_value_heads": 4},
    "bailing_hybrid": {"num_key_value_heads": 4},
    "deepseek_v2": {"num_key_value_heads": 4},
    "deepseek_v3": {"num_key_value_heads": 4},
    "glm4_moe_lite": {"num_key_value_heads": 4},
    "kimi_linear": {"num_key_value_heads": 4, "num_local_experts": 8},
    "longcat_flash": {"num_key_value_heads": 4},
    "qwen3_moe": {"num_experts": 8},
    "zaya": {"num_experts_per_tok": 1},
    "dots1": {"n_routed_experts": 4, "first_k_dense_replace": 0, "n_shared_experts": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"], "full_attn_idxs": [1]},
    "lfm2_moe": {"layer_types": ["full_attention", "full_attention"], "num_dense_layers": 1},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0}},
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": [32, 32], "axial_pos_shape": [8, 8]},
    "granitemoehybrid": {"mamba_d_head": 8},
    "bamba": {"mamba_d_head": 8},
    "falcon_h1": {"mamba_d_head": 8, "mamba_d_ssm": 128},
    "mamba2": {"num_heads": 8, "n_groups": 1},
    "esmc": {"num_key_value_heads": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "hrm_text": {"num_layers_per_stack": 1},
    # transformers' own mask has no window for plain rows.
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "moshi": {"sliding_window": 64},
    # From this position on, queries have another scale, also in packed rows.
    "llama4_text": {"floor_scale": 64, "attention_chunk_size": 12},
}


def small(family: str) -> dict[str, Any]:
    """Return a small config of a family."""
    try:
        default = AutoConfig.for_model(family)
    except StrictDataclassError:  # the defaults of some families break their own rules
        return {"model_type": family}
    return {"model_type": family} | _reduced(default.to_dict(), set(dir(type(default)))) | _OWN.get(family, {})


def _reduced(config: dict[str, Any], known: set[str]) -> dict[str, Any]:
    sizes = {name: size for size, names in _SIZES.items() for name in names.split()}
    reduced = {}
    for name, value in shrink(config, heads=4).items():
        if name not in known or _is_infinite(value):
            continue
        is_number = value is None or type(value) is int
        reduced[name] = sizes[name] if name in sizes and is_number else value
        if isinstance(value, dict) and value.get("model_type") in CONFIG_MAPPING:
            known_within = set(dir(type(AutoConfig.for_model(value["model_type"])))) | {"model_type"}
            reduced[name] = _reduced(value, known_within) | _OWN.get(value["model_type"], {})
    return reduced


def _is_infinite(value: Any) -> bool:
    """Return whether a value is, or contains, a number that JSON does not have."""
    return any(
        isinstance(one, float) and math.isinf(one) for one in (value if isinstance(value, list | tuple) else [value])
    )
