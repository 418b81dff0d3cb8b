"""Workload of a comparison in a folder: one model, one set of tokens and one set of initial weights."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from pydantic import BaseModel, ConfigDict
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from train_loop.model.build import materialise
from train_loop.model.families.causal.family import CAUSAL
from train_loop.model.lora.adapters import draw_adapters
from train_loop.spec import LoraSpec, parse

SMALL = {
    "model_type": "qwen3",
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
TOY = SMALL | {"vocab_size": 384, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
_EXPERTS = {"model_type": "qwen3_moe", "norm_topk_prob": True}
SMALL_MIXTURE = (
    SMALL
    | _EXPERTS
    | {
        "num_hidden_layers": 4,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 256,
    }
)
TOY_MIXTURE = TOY | _EXPERTS | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


class Workload(BaseModel):
    """A small run on CPU ranks: fp32, AdamW, cosine schedule, clipped gradients, rows of equal length."""

    model_config = ConfigDict(frozen=True)

    config: dict[str, Any] = SMALL
    world: int = 2
    strategy: dict[str, int] = {}
    """Sizes of the mesh, by the names of a spec that transformers has, too: tp_size, ep_size."""
    sequence_length: int = 512
    rows_per_rank: int = 1
    """Sequences per step of ranks that have the same samples."""
    steps: int = 24
    first_counted: int = 5
    """Number of warm-up steps that are not counted."""
    learning_rate: float = 3e-4
    max_grad_norm: float = 1.0
    lora: dict[str, Any] | None = None
    """`r` and `alpha` of adapters of all linear layers; None to train all weights."""
    seed: int = 0

    @property
    def data_ranks(self) -> int:
        """Return the number of groups of ranks with samples of their own."""
        return self.world // self.strategy.get("tp_size", 1)

    @property
    def global_batch(self) -> int:
        """Return the sequences per optimizer step."""
        return self.data_ranks * self.rows_per_rank

    def write(self, folder: Path) -> None:
        """Write random tokens and initial weights, once for all programs."""
        folder.mkdir(parents=True, exist_ok=True)
        rows = self.steps * self.global_batch
        write_tokens(folder / "tokens.parquet", rows=rows, length=self.sequence_length, config=self.config)
        model_spec = parse(self.spec(folder, model={"lora": None})).model
        model, blueprint = CAUSAL.build(model_spec).model, CAUSAL.build(model_spec)
        materialise(model, blueprint, seed=self.seed, device=torch.device("cpu"))
        save_file(
            {name: weight.contiguous() for name, weight in model.state_dict().items()}, folder / "first.safetensors"
        )
        (folder / "workload.json").write_text(self.model_dump_json(indent=2))

    @classmethod
    def read(cls, folder: Path) -> "Workload":
        """Read a workload that `write` has written."""
        return cls.model_validate_json((folder / "workload.json").read_bytes())

    def spec(self, folder: Path, **parts: dict[str, Any]) -> dict[str, Any]:
        """Return the workload as a job spec with data in file order; `parts` override sections."""
        base: dict[str, dict[str, Any]] = {
            "model": {"config": self.config, "dtype": "fp32", "gradient_checkpointing": "none", "lora": self.lora},
            "data": {
                "train": {"path": f"file://{folder}/tokens.parquet"},
                "columns": {"input_ids": "ids"},
                "sequence_length": self.sequence_length,
                "packing": False,
                "shuffle": False,
            },
            "strategy": self.strategy,
            "training": {
                "learning_rate": self.learning_rate,
                "lr_scheduler_type": "cosine",
                "per_device_train_batch_size": self.rows_per_rank,
                "max_steps": self.steps,
                "max_grad_norm": self.max_grad_norm,
                "seed": self.seed,
            },
            "checkpoint": {"every_steps": None, "save_final": False},
            "scaling": {"num_workers": self.world, "resources_per_worker": {"CPU": 0.5}},
        }
        return {"name": "benchmark"} | {name: base.get(name, {}) | parts.get(name, {}) for name in base | parts}

    def first_model(self, folder: Path) -> Any:
        """Return the unsharded model with the initial weights, and around it peft's if the workload has adapters."""
        config = AutoConfig.for_model(**self.config)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32)
        model.load_state_dict(load_file(folder / "first.safetensors"))
        if self.lora is None:
            return model
        # It takes seconds.
        from peft import LoraConfig, get_peft_model  # noqa: PLC0415

        wanted = LoraConfig(r=self.lora["r"], lora_alpha=self.lora["alpha"], target_modules="all-linear")
        adapted, cpu = get_peft_model(model, wanted), torch.device("cpu")
        draw_adapters(model, LoraSpec(**self.lora), seed=self.seed, dtype=torch.float32, device=cpu)
        return adapted

    def tokens(self, folder: Path) -> Tensor:
        """Return all rows [steps, data_ranks, rows_per_rank, T]; a step takes the next `global_batch` rows in order."""
        column = pq.read_table(folder / "tokens.parquet")["ids"].combine_chunks()
        flat = torch.from_numpy(column.flatten().to_numpy().astype(np.int64))
        return flat.view(self.steps, self.data_ranks, self.rows_per_rank, self.sequence_length)


def write_tokens(path: Path, *, rows: int, length: int, config: dict[str, Any], documents: int = 1) -> None:
    """Write a Parquet file of random token rows of one length, each with `documents` of random lengths."""
    draw = np.random.default_rng(1)
    cuts = [np.sort(draw.choice(np.arange(1, length), documents - 1, replace=False)) for _ in range(rows)]
    lengths = [np.diff(cut, prepend=0, append=length).tolist() for cut in cuts]
    drawn = np.random.default_rng(0).integers(0, config["vocab_size"], rows * length, dtype=np.int32)
    ids = pa.ListArray.from_arrays(np.arange(0, rows * length + 1, length, dtype=np.int32), pa.array(drawn))
    # Row groups of a few MB, because a read of a row reads its whole group.
    table = pa.table({"ids": ids, "documents": pa.array(lengths, pa.list_(pa.int32()))})
    pq.write_table(table, path, row_group_size=max(1, 2**20 // length))
