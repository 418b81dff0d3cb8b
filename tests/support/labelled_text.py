"""A job that classifies texts, and the metrics of its export by transformers alone."""

import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch.nn import functional as F
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tests.support.builders.folders import write_model, write_tokenizer

NAMES = ["bad", "good"]


def labelled_text(folder: Path) -> dict[str, dict[str, Any]]:
    """Write a language model and texts into a folder, and return the parts of a job that classifies them.

    Some rows have numbers of classes, others their names. A text of the first class has other letters than one of the
    second.
    """
    write_tokenizer(write_model(folder))
    draw = random.Random(0)
    rows = [("".join(draw.choices(("abc ", "xyz ")[n % 2], k=draw.randint(2, 40))) + ".", n % 2) for n in range(80)]
    named = [json.dumps({"text": text, "label": NAMES[label]}) for text, label in rows[:30]]
    (folder / "named.jsonl").write_text("\n".join(named))
    for name, part in (("train", rows[30:60]), ("eval", rows[60:])):
        texts, labels = zip(*part, strict=True)
        pq.write_table(pa.table({"text": texts, "label": labels}), folder / f"{name}.parquet")
    train = [{"path": str(folder / name)} for name in ("named.jsonl", "train.parquet")]
    return {
        "model": {
            "config": None,
            "path": folder.as_uri(),
            "head": {"sequence_classification": {"labels": 2, "names": NAMES}},
        },
        "data": {
            "train": train,
            "eval": {"path": str(folder / "eval.parquet")},
            "columns": {"text": "text", "label": "label"},
        },
        "training": {"max_steps": 20, "eval_steps": 10, "learning_rate": 1e-2},
        "strategy": {"ulysses_size": 1},
    }


def classified(export: Path, folder: Path) -> dict[str, float]:
    """Return the metrics of an export on the eval texts, as a user of transformers computes them."""
    table = pq.read_table(folder / "eval.parquet").to_pydict()
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(export), AutoTokenizer.from_pretrained(export)
    assert model.config.id2label == dict(enumerate(NAMES))
    assert model.config.label2id == {name: number for number, name in enumerate(NAMES)}
    tokenizer.pad_token = tokenizer.eos_token
    inputs = tokenizer([text[:32] for text in table["text"]], return_tensors="pt", padding=True)
    with torch.no_grad():
        logits, labels = model(**inputs).logits, torch.tensor(table["label"])
    found = logits.argmax(-1)
    f1 = [
        2 * int(((labels == one) & (found == one)).sum()) / int((labels == one).sum() + (found == one).sum())
        for one in sorted({*labels.tolist(), *found.tolist()})
    ]
    return {
        "eval_loss": F.cross_entropy(logits, labels).item(),
        "eval_accuracy": (found == labels).float().mean().item(),
        "eval_f1": sum(f1) / len(f1),
        "eval_labels": len(labels),
    }
