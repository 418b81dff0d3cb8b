"""Small specs for tests."""

from typing import Any

from train_loop.run_dir import ReadPolicy
from train_loop.spec import JobSpec, parse

TINY: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 384,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "tie_word_embeddings": False,
}


def raw_spec(**parts: dict[str, Any]) -> dict[str, Any]:
    """Return a valid spec as plain data, with fields overridden: raw_spec(strategy={"ulysses_size": 2})."""
    base: dict[str, dict[str, Any]] = {
        "model": {"config": TINY, "dtype": "fp32"},
        "data": {"train": {"path": "stdlib://*.py"}, "sequence_length": 32},
        "training": {"learning_rate": 1e-3, "max_steps": 4},
        "scaling": {"num_workers": 1},
    }
    merged = {name: base.get(name, {}) | parts.get(name, {}) for name in base.keys() | parts.keys()}
    return {"name": "tiny", **merged}


def infer_spec(**parts: dict[str, Any]) -> dict[str, Any]:
    """Return the spec of an inference job as plain data, with fields overridden."""
    base: dict[str, dict[str, Any]] = {
        "model": {"config": TINY, "dtype": "fp32"},
        "data": {"train": {"path": "/data/*.parquet"}, "columns": {"input_ids": "ids"}, "sequence_length": 32},
        "scaling": {"num_workers": 1},
    }
    merged = {name: base.get(name, {}) | parts.get(name, {}) for name in base.keys() | parts.keys()}
    return {"name": "tiny", "kind": "infer", **merged}


def code_spec(**parts: dict[str, Any]) -> dict[str, Any]:
    """Return a valid spec with own code as plain data, with fields overridden."""
    base: dict[str, dict[str, Any]] = {
        "code": {
            "package": "/code/mymodel",
            "model": "mymodel:build",
            "loss": "mymodel:loss",
            "batch": "mymodel:batch",
        },
        "model": {"dtype": "fp32"},
        "data": {"train": {"path": "/data/*.parquet"}, "columns": {"own": ["x", "y"]}},
        "training": {"learning_rate": 1e-3, "max_steps": 4},
        "scaling": {"num_workers": 1},
    }
    merged = {name: base.get(name, {}) | parts.get(name, {}) for name in base.keys() | parts.keys()}
    return {"name": "own", **merged}


def spec(**parts: dict[str, Any]) -> JobSpec:
    """Return a valid spec, with fields overridden."""
    return parse(raw_spec(**parts))


LONGROPE: dict[str, Any] = {
    **{name: value for name, value in TINY.items() if name not in ("head_dim", "tie_word_embeddings")},
    "model_type": "phi3",
    "max_position_embeddings": 64,
    "original_max_position_embeddings": 16,
    "rope_parameters": {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 16}
    | {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4},
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0),
}
"""Phi-3's positions: from position 16 on, all angles differ."""


def may_read(*roots: str, project: str = "default") -> ReadPolicy:
    """Return the read policy of a project with these storage roots."""
    return ReadPolicy(project=project, roots=roots)
