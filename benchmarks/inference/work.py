"""Workload of a comparison of inference, for all of its programs; it imports no more than a plain loop."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from pydantic import BaseModel, ConfigDict
from transformers import AutoConfig, AutoModelForCausalLM

LOGPROBS, GENERATE = "logprobs", "generate"


class Work(BaseModel):
    """The rows of a comparison, and the output for each."""

    model_config = ConfigDict(frozen=True)

    output: str
    config: dict[str, Any]
    rows: int = 128
    longest: int = 256
    batch: int = 8
    new_tokens: int = 16
    per_shard: int = 32

    def write(self, folder: Path) -> None:
        """Write a model, rows of uneven lengths, and this workload."""
        folder.mkdir()
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(AutoConfig.for_model(**self.config)).save_pretrained(folder / "model")
        draw = np.random.default_rng(0)
        lengths = draw.integers(self.longest // 4, self.longest, self.rows, endpoint=True)
        ids = [draw.integers(0, self.config["vocab_size"], size).tolist() for size in lengths]
        pq.write_table(pa.table({"ids": pa.array(ids, pa.list_(pa.int32()))}), folder / "rows.parquet")
        (folder / "work.json").write_text(self.model_dump_json())

    def spec(self, folder: Path) -> dict[str, Any]:
        """Return the workload as a job of one worker."""
        generation = {"max_new_tokens": self.new_tokens, "stop_tokens": []}
        return {
            "name": "benchmark",
            "kind": "infer",
            "model": {"path": str(folder / "model"), "dtype": "fp32"},
            "data": {
                "train": {"path": str(folder / "rows.parquet")},
                "columns": {"input_ids": "ids"},
                "sequence_length": self.longest,
            },
            "infer": {"output": self.output, "batch_size": self.batch, "rows_per_shard": self.per_shard}
            | ({"generation": generation} if self.output == GENERATE else {}),
            "scaling": {"num_workers": 1},
        }
