"""The families that every run of the tests computes: a new kind of model gets all tests of this folder by one line."""

from tests.support.builders.searches import SEED

__all__ = ["KINDS", "SEED"]
KINDS = (
    "qwen3",  # grouped kv heads, normalised queries and keys
    "gpt2",  # learned positions, and a config without num_key_value_heads
    "gpt_bigcode",  # one kv head for all
    "diffllama",  # differences of attention
    "minicpm3",  # latent attention
    "gemma2",  # capped scores and logits, without SDPA
    "gemma3n_text",  # layers that share keys and values, windows, and tables in each layer
    "granite_swa",  # sinks, and scaled logits
    "bloom",  # ALiBi
    "falcon_h1",  # attention and a recurrent state
    "mamba2",  # no attention
    "qwen3_moe",  # a mixture of experts
    "roberta",  # an encoder as a decoder, whose positions begin behind padding
    "bart",  # no positions as an argument
)
