"""Cases of `benchmarks.training.gpu`: models, sequence lengths and spec changes."""

from dataclasses import dataclass, field
from typing import Any

from benchmarks.workload import TOY

_QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
}
QWEN3_06B = _QWEN3 | {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
}
QWEN3_17B = QWEN3_06B | {"hidden_size": 2048, "intermediate_size": 6144}
QWEN3_4B = _QWEN3 | {
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
}
LLAMA3_8B: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Case:
    """A model at a sequence length; all sequences are full, without padding."""

    config: dict[str, Any]
    sequence_length: int
    rows: int = 1
    """Sequences per step, in one micro-batch."""
    documents: int = 1
    """Documents of random lengths in a sequence; attention does not cross documents."""
    steps: int = 24
    first_counted: int = 8
    """First counted step, after compilation and the allocator's warm-up."""
    dtype: str = "bf16"
    model: dict[str, Any] = field(default_factory=dict)
    strategy: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Return the tokens per step."""
        return self.rows * self.sequence_length

    def spec(self, data: str, **parts: dict[str, Any]) -> dict[str, Any]:
        """Return a job spec for one rank on the tokens at a path."""
        columns = {"train": {"path": data}, "columns": {"input_ids": "ids"}, "shuffle": False}
        columns["packing"] = self.documents > 1
        training = {"learning_rate": 1e-5, "max_steps": self.steps, "per_device_train_batch_size": self.rows}
        spec: dict[str, Any] = {
            "name": "gpu-benchmark",
            "model": {"config": self.config, "dtype": self.dtype, "attn_implementation": "auto"} | self.model,
            "data": columns | {"sequence_length": self.sequence_length},
            "training": training | self.training,
            "strategy": self.strategy,
            "checkpoint": {"every_steps": None, "save_final": False},
            "scaling": {"num_workers": 1},
        }
        return spec | {name: spec[name] | part for name, part in parts.items()}


_FAST: dict[str, Any] = {"compile": True, "gradient_checkpointing": "none"}
_LARGE: dict[str, Any] = {"compile": True, "gradient_checkpointing": "full"}
_8B = _LARGE | {"master_dtype": "bf16"}
_FLEX = {"attn_implementation": "flex_attention"}

CASES = {
    "qwen3-0.6b-4k": Case(QWEN3_06B, 4096, rows=8, documents=8, model=_FAST),
    "qwen3-0.6b-4k-flex": Case(QWEN3_06B, 4096, rows=8, documents=8, model=_FAST | _FLEX),
    "qwen3-1.7b-4k": Case(QWEN3_17B, 4096, rows=4, documents=8, model=_FAST),
    # Weights and moments in bf16, because they need 128 GB in fp32; batch and recomputation as in KempnerForge.
    "llama3-8b-4k": Case(LLAMA3_8B, 4096, rows=4, documents=8, model=_8B),
    "llama3-8b-4k-flex": Case(LLAMA3_8B, 4096, rows=4, documents=8, model=_8B | _FLEX),
    "llama3-8b-4k-one-document": Case(LLAMA3_8B, 4096, rows=4, model=_8B),
    "qwen3-4b-8k": Case(QWEN3_4B, 8192, rows=2, model=_LARGE),
    "qwen3-4b-32k": Case(QWEN3_4B, 32768, steps=8, first_counted=3, model=_LARGE),
    "qwen3-4b-128k": Case(QWEN3_4B, 131072, steps=3, first_counted=1, model=_LARGE),
    "toy": Case(TOY, 64, rows=2, steps=12, first_counted=4, dtype="fp32", model={"gradient_checkpointing": "none"}),
    "toy-packed": Case(TOY, 64, rows=2, documents=3, steps=12, first_counted=4, dtype="fp32"),
}
