"""The job of examples/moe.yaml on a published folder of its model, and the loss of its export by transformers alone."""

from pathlib import Path

import pyarrow.parquet as pq
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from tests.support.builders.folders import write_model
from tests.support.ranks.torchrun import write_tokens
from train_loop.spec import JobSpec, override, parse_text

ROWS, BATCH = 48, 4
STEPS = ROWS // BATCH


def mixture_job(folder: Path) -> JobSpec:
    """Write the example's model into a folder, with experts one by one, and tokens; return a job of one epoch."""
    example = parse_text(Path("examples/moe.yaml").read_text())
    config = example.model.config or {}
    write_model(folder, **config)
    with safe_open(folder / "model.safetensors", "pt") as stored:
        assert "model.layers.3.mlp.experts.7.down_proj.weight" in stored.keys()  # noqa: SIM118 - it is not a mapping
    for name, rows in (("train", ROWS), ("eval", 8)):
        write_tokens(folder / f"{name}.parquet", rows=rows, length=32, vocab=config["vocab_size"])
    sources = {name: {"path": str(folder / f"{name}.parquet")} for name in ("train", "eval")}
    parts = {
        "model": {"config": None, "path": folder.as_uri()},
        "data": sources | {"columns": {"text": None, "input_ids": "ids"}, "packing": False, "sequence_length": 32},
        "training": {"max_steps": None, "num_train_epochs": 1, "eval_steps": STEPS, "audit_samples": True}
        | {"global_batch_size": BATCH, "per_device_train_batch_size": 2},
        "strategy": {"ep_size": 2},
        "checkpoint": {"every_steps": 3},
    }
    return override(example, parts)


@torch.no_grad()
def loss_of_export(export: Path, folder: Path) -> float:
    """Return the loss of an export on the eval tokens of a folder, as a user of transformers computes it."""
    model = AutoModelForCausalLM.from_pretrained(export)
    ids = torch.tensor(pq.read_table(folder / "eval.parquet")["ids"].to_pylist())
    return float(model(input_ids=ids, labels=ids).loss)
