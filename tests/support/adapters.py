"""The job of examples/lora.yaml on a folder with a model and a tokenizer, and its exports as users load them."""

from pathlib import Path

import peft
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.builders.folders import write_model, write_tokenizer
from tests.support.ranks.torchrun import write_tokens
from train_loop.spec import JobSpec, override, parse_text

STEPS, BATCH = 9, 4
ROWS = STEPS * BATCH
TEXT = "def main(arguments):\n    return 0"


def adapters_job(folder: Path) -> JobSpec:
    """Write a small Llama, a tokenizer and tokens into a folder; return the example's job on them."""
    write_model(folder, model_type="llama", vocab_size=300)
    write_tokenizer(folder)
    write_tokens(folder / "d.parquet", rows=ROWS, length=32, vocab=300)
    parts = {
        "model": {"config": None, "path": folder.as_uri(), "lora": {"modules_to_save": []}},
        "data": {"train": {"path": (folder / "d.parquet").as_uri()}, "sequence_length": 32, "packing": False}
        | {"columns": {"text": None, "input_ids": "ids"}},
        "training": {"global_batch_size": BATCH, "per_device_train_batch_size": 2, "learning_rate": 1e-2}
        | {"max_steps": None, "num_train_epochs": 1, "audit_samples": True},
        "checkpoint": {"every_steps": 2, "keep_last": 1},
    }
    return override(parse_text(Path("examples/lora.yaml").read_text()), parts)


@torch.no_grad()
def outputs(folder: Path, adapters: Path | None = None) -> Tensor:
    """Return the logits of a text, as a user of transformers and peft computes them."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    if adapters is not None:
        model = peft.PeftModel.from_pretrained(model, str(adapters))
    ids = AutoTokenizer.from_pretrained(adapters or folder)(TEXT, return_tensors="pt").input_ids
    logits: Tensor = model.eval()(input_ids=ids).logits
    return logits
