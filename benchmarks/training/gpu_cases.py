"""Cases of `benchmarks.training.gpu`: models, sequence lengths and spec changes."""

from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.workload import TOY, TOY_MIXTURE

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
QWEN3_30B_A3B = _QWEN3 | {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}
"""The sizes of Qwen/Qwen3-30B-A3B: 30.5 billion parameters, of which a token uses 3.3."""
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
    """A model at a sequence length on some GPUs; all sequences are full, without padding."""

    config: dict[str, Any]
    sequence_length: int
    ranks: int = 1
    """GPUs, with a rank each."""
    rows: int = 1
    """Sequences per step of ranks that have the same samples, in one micro-batch."""
    documents: int = 1
    """Documents of random lengths in a sequence; attention does not cross documents."""
    steps: int = 24
    first_counted: int = 8
    """First counted step, after compilation and the allocator's warm-up."""
    dtype: str = "bf16"
    model: dict[str, Any] = field(default_factory=dict)
    strategy: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    on_cpu: bool = False
    """True if CPUs can train it, too."""

    @property
    def rows_per_step(self) -> int:
        """Return the sequences per step of all ranks."""
        same: int = self.strategy.get("tp_size", 1) * self.strategy.get("ulysses_size", 1)
        return self.rows * self.ranks // same

    @property
    def tokens(self) -> int:
        """Return the tokens per step."""
        return self.rows_per_step * self.sequence_length

    def spec(self, data: str, **parts: dict[str, Any]) -> dict[str, Any]:
        """Return a job spec on the tokens at a path."""
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
            "scaling": {"num_workers": self.ranks},
        }
        return spec | {name: spec[name] | part for name, part in parts.items()}


_FAST: dict[str, Any] = {"compile": True, "gradient_checkpointing": "none"}
_LARGE: dict[str, Any] = {"compile": True, "gradient_checkpointing": "full"}
_8B = _LARGE | {"master_dtype": "bf16"}
_FLEX = {"attn_implementation": "flex_attention"}
_PLAIN = {"gradient_checkpointing": "full"}
"""Neither tensor parallelism nor experts are proven with compilation."""
_ADAPTERS = {"gradient_checkpointing": "none", "master_dtype": "bf16", "lora": {"r": 8, "alpha": 32}}
_MIXTURE = _PLAIN | {"master_dtype": "bf16"}
_EXPERT_UNITS = {"wrap_policy": {"moe_experts": ["Qwen3MoeExperts"]}}
_SIX_LAYERS = QWEN3_30B_A3B | {"num_hidden_layers": 6}
_TOY = Case(TOY, 64, rows=2, steps=12, first_counted=4, dtype="fp32", on_cpu=True)
_TP2 = Case(QWEN3_4B, 8192, ranks=2, rows=2, model=_PLAIN, strategy={"tp_size": 2})

CASES = {
    "qwen3-0.6b-4k": Case(QWEN3_06B, 4096, rows=8, documents=8, model=_FAST),
    "qwen3-0.6b-4k-flex": Case(QWEN3_06B, 4096, rows=8, documents=8, model=_FAST | _FLEX),
    "qwen3-1.7b-4k": Case(QWEN3_17B, 4096, rows=4, documents=8, model=_FAST),
    # Weights and moments in bf16, because they need 128 GB in fp32; batch and recomputation as in KempnerForge.
    "llama3-8b-4k": Case(LLAMA3_8B, 4096, rows=4, documents=8, model=_8B),
    "llama3-8b-4k-flex": Case(LLAMA3_8B, 4096, rows=4, documents=8, model=_8B | _FLEX),
    "llama3-8b-4k-one-document": Case(LLAMA3_8B, 4096, rows=4, model=_8B),
    # Published for adapters of Llama-3-8B at 4,096 tokens: 12,473 tokens/s on one H100 (NVIDIA NeMo AutoModel, bf16).
    "llama3-8b-4k-lora": Case(LLAMA3_8B, 4096, rows=2, model=_ADAPTERS),
    "qwen3-4b-8k": Case(QWEN3_4B, 8192, rows=2, model=_LARGE),
    "qwen3-4b-32k": Case(QWEN3_4B, 32768, steps=8, first_counted=3, model=_LARGE),
    "qwen3-4b-128k": Case(QWEN3_4B, 131072, steps=3, first_counted=1, model=_LARGE),
    # Published for Qwen3-30B-A3B: 12,040 tokens/s a GPU (NVIDIA NeMo AutoModel, eight H100, 4,096 tokens, bf16, ep 8),
    # with a gate that balances experts by force, and without clipping. These cases have the real router, and clip.
    "qwen3-30b-a3b-4k-ep8": Case(QWEN3_30B_A3B, 4096, ranks=8, rows=4, model=_MIXTURE, strategy={"ep_size": 8}),
    "qwen3-30b-a3b-4k-fsdp8": Case(QWEN3_30B_A3B, 4096, ranks=8, rows=4, model=_MIXTURE, strategy=_EXPERT_UNITS),
    # An eighth of its layers.
    "qwen3-moe-6-layers": Case(_SIX_LAYERS, 4096, rows=4, model=_MIXTURE),
    "qwen3-moe-6-layers-fsdp2": Case(_SIX_LAYERS, 4096, ranks=2, rows=4, model=_MIXTURE, strategy=_EXPERT_UNITS),
    "qwen3-moe-6-layers-ep2": Case(_SIX_LAYERS, 4096, ranks=2, rows=4, model=_MIXTURE, strategy={"ep_size": 2}),
    # One row per rank in each step.
    "qwen3-4b-8k-fsdp2": Case(QWEN3_4B, 8192, ranks=2, rows=1, model=_PLAIN),
    "qwen3-4b-8k-tp2": _TP2,
    "qwen3-4b-8k-fsdp2-tp2": Case(QWEN3_4B, 8192, ranks=4, rows=2, model=_PLAIN, strategy={"tp_size": 2}),
    "qwen3-4b-8k-tp2-split": replace(_TP2, strategy={"tp_size": 2, "sequence_parallel": True}),
    "toy": replace(_TOY, model={"gradient_checkpointing": "none"}),
    "toy-packed": replace(_TOY, documents=3),
    "toy-mixture": replace(_TOY, config=TOY_MIXTURE),
    "toy-ep2": replace(_TOY, config=TOY_MIXTURE, ranks=2, strategy={"ep_size": 2}),
    "toy-tp2": replace(_TOY, ranks=2, strategy={"tp_size": 2}),
}
