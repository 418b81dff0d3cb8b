"""Sizes of a decoder, read from a Hugging Face config without torch."""

from typing import Any

from train_loop.plan.model.shape import ModelShape

# Defaults of transformers' config classes; a test compares them with transformers itself. None means as many as
# attention heads, or hidden_size / num_attention_heads for head_dim.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": None,
        "head_dim": None,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
    },
    "qwen2": {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": None,
        "tie_word_embeddings": False,
    },
    "qwen3": {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "tie_word_embeddings": False,
        "attention_bias": False,
    },
}
_OTHER_NAMES = {
    "hidden_size": ("n_embd", "d_model", "emb_dim", "dim"),
    "intermediate_size": ("n_inner", "ffn_dim", "decoder_ffn_dim", "ffn_hidden_size", "hidden_dim"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers", "decoder_layers", "num_decoder_layers"),
    "num_attention_heads": (
        *("n_head", "n_heads", "num_heads", "attention_heads", "decoder_attention_heads"),
        "num_decoder_attention_heads",
    ),
    "num_key_value_heads": ("num_kv_heads",),
}
"""Names of these sizes in GPT-2, BART and other families, the preferred one first."""

NEEDED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
"""Required sizes. Without the others, each attention head has its own kv head, and F is 4 H."""
WITHOUT_ATTENTION = ("mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm")
"""Families with a recurrent state and no attention; they count as one head."""


def read_shape(config: dict[str, Any]) -> ModelShape:
    """Read the sizes of a config, with its family's defaults. Raises ValueError for a missing or invalid size."""
    model_type = config["model_type"]
    renamed = {
        name: config[other] for name, others in _OTHER_NAMES.items() for other in reversed(others) if other in config
    }
    if isinstance(kinds := config.get("layers_block_type"), list):
        renamed.setdefault("num_hidden_layers", len(kinds))
    if config.get("multi_query"):
        renamed["num_key_value_heads"] = 1
    if model_type in WITHOUT_ATTENTION:
        renamed["num_attention_heads"] = 1
    sizes = {**_DEFAULTS.get(model_type, {}), **renamed, **config}
    missing = [name for name in NEEDED if name not in sizes]
    if missing:
        raise ValueError(
            f"the sizes of model_type={model_type} must be given; add {', '.join(missing)} to the model's config (only "
            f"{', '.join(_DEFAULTS)} have default sizes here)"
        )
    heads = _positive(sizes, "num_attention_heads")
    hidden = _positive(sizes, "hidden_size")
    bias = bool(sizes.get("attention_bias", False))
    return ModelShape(
        model_type=model_type,
        vocab=_positive(sizes, "vocab_size"),
        hidden=hidden,
        intermediate=_positive(sizes, "intermediate_size", 4 * hidden),
        layers=_positive(sizes, "num_hidden_layers"),
        heads=heads,
        kv_heads=_positive(sizes, "num_key_value_heads", heads),
        head_dim=_positive(sizes, "head_dim", hidden // heads),
        tied=bool(sizes.get("tie_word_embeddings", False)),
        qkv_bias=bias or model_type == "qwen2",
        output_bias=bias,
        mlp_bias=bool(sizes.get("mlp_bias", False)),
        qk_norm=model_type == "qwen3",
        known=model_type in _DEFAULTS,
    )


def _positive(sizes: dict[str, Any], name: str, default: int | None = None) -> int:
    value = default if sizes.get(name) is None else sizes[name]
    if isinstance(value, list) and value and all(type(one) is int for one in value):
        value = max(value)  # a size for each layer
    if type(value) is not int or value < 1:
        raise ValueError(f"{name}={value!r} is not a positive whole number; correct it in the model's config")
    return value
