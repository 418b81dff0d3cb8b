"""The families that every run of the tests computes: a new kind of model gets all tests of this folder by one line."""

import os
import subprocess
from pathlib import Path

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


def commit() -> str:
    """Return the commit that is checked out; an empty text outside of a repository."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


SEED = os.environ.get("MODELS_SEED") or commit()
"""Seed of the families that a run draws: each commit computes others."""
