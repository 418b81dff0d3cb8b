"""Jobs that train heads on texts, and the metrics of their exports by transformers alone."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

from tests.support import textbook
from tests.support.builders.folders import write_model, write_tokenizer

NAMES = ["bad", "good"]
GROUP, TEMPERATURE = 4, 0.2
EVAL_ROWS = 19
"""Not a multiple of a batch or a group."""
LENGTH = 32
"""Tokens of a sequence in the jobs of a live service."""
Parts = dict[str, dict[str, Any]]


class TextHead(NamedTuple):
    """A head that a job trains on texts."""

    write: Callable[[Path], Parts]
    """Writes a language model and texts into a folder, and returns the parts of a job."""
    metrics: Callable[[Path, Path], dict[str, float]]
    """Returns the metrics of an export on the eval texts of a folder, as a user of transformers computes them."""


def _write_labelled(folder: Path) -> Parts:
    """Write texts with the numbers of their classes, or with their names. Each class has other letters."""
    draw, rows = random.Random(0), list[dict[str, Any]]()
    for number in range(80):
        text = "".join(draw.choices(("abc ", "xyz ")[number % 2], k=draw.randint(2, 40))) + "."
        rows.append({"text": text, "label": number % 2})
    named = [json.dumps(row | {"label": NAMES[row["label"]]}) for row in rows[:30]]
    parts = _write_rows(folder, rows[30:])
    (folder / "named.jsonl").write_text("\n".join(named))
    parts["data"]["train"] = [{"path": str(folder / "named.jsonl")}, parts["data"]["train"]]
    parts["data"]["columns"] = {"text": "text", "label": "label"}
    parts["model"]["head"] = {"sequence_classification": {"labels": 2, "names": NAMES}}
    return parts


@torch.no_grad()
def _classified(export: Path, folder: Path) -> dict[str, float]:
    """Return the metrics of a classifier."""
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(export), AutoTokenizer.from_pretrained(export)
    assert model.config.id2label == dict(enumerate(NAMES))
    assert model.config.label2id == {name: number for number, name in enumerate(NAMES)}
    rows = _eval_rows(folder)
    logits = model(**_batch(tokenizer, [row["text"][:LENGTH] for row in rows])).logits
    return textbook.classes(logits, torch.tensor([row["label"] for row in rows])).metrics


def _write_pairs(folder: Path) -> Parts:
    """Write pairs, of which the better text has the first letters of the alphabet."""
    draw = random.Random(0)

    def row() -> dict[str, str]:
        letters = (("chosen", "abc"), ("rejected", "xyz"))
        return {"prompt": "Q: "} | {name: "".join(draw.choices(of, k=draw.randint(1, 20))) for name, of in letters}

    parts = _write_rows(folder, [row() for _ in range(67)])
    parts["model"]["head"] = "reward"
    parts["data"]["columns"] = {name: name for name in ("prompt", "chosen", "rejected")}
    return parts


@torch.no_grad()
def _rewarded(export: Path, folder: Path) -> dict[str, float]:
    """Return the metrics of a reward model, as TRL's RewardTrainer reads its texts."""
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(export), AutoTokenizer.from_pretrained(export)
    rows = _eval_rows(folder)
    chosen, rejected = (
        model(**_batch(tokenizer, [row["prompt"] + row[name] + tokenizer.eos_token for row in rows])).logits.squeeze(-1)
        for name in ("chosen", "rejected")
    )
    return textbook.rewards(chosen, rejected).metrics


def _write_anchors(folder: Path) -> Parts:
    """Write anchors of one letter, whose positives are of its capital; a group has anchors of several letters."""
    draw = random.Random(0)

    def text(place: int) -> str:
        return "abcdefgh"[place % 8] * draw.randint(1, 9)

    rows = [
        {"anchor": text(place), "positive": text(place).upper(), "negative": text(place + GROUP).upper()}
        for place in range(67)
    ]
    parts = _write_rows(folder, rows)
    parts["model"]["head"] = {"embedding": {"group": GROUP, "temperature": TEMPERATURE}}
    parts["data"] |= {"columns": {"anchor": "anchor", "positive": "positive", "negatives": ["negative"]}}
    parts["data"]["shuffle"] = False
    parts["training"] |= {"per_device_train_batch_size": GROUP, "global_batch_size": 2 * GROUP}
    return parts


@torch.no_grad()
def _recalled(export: Path, folder: Path) -> dict[str, float]:
    """Return the metrics of a model of embeddings, as sentence-transformers computes them."""
    model, tokenizer = AutoModel.from_pretrained(export), AutoTokenizer.from_pretrained(export)
    rows, embedded = _eval_rows(folder), list[Tensor]()
    for name in ("anchor", "positive", "negative"):
        inputs = _batch(tokenizer, [row[name] for row in rows])
        states = model(**inputs).last_hidden_state
        embedded.append(textbook.embeddings(states, inputs["attention_mask"], "last_token"))
    anchors, *texts = embedded
    return textbook.recalls(anchors, texts, group=GROUP, temperature=TEMPERATURE).metrics


def _write_rows(folder: Path, rows: list[dict[str, Any]]) -> Parts:
    """Write a language model and rows, of which some are for evaluations; return the parts of a job."""
    write_tokenizer(write_model(folder))
    for name, part in (("train", rows[:-EVAL_ROWS]), ("eval", rows[-EVAL_ROWS:])):
        pq.write_table(pa.Table.from_pylist(part), folder / f"{name}.parquet")
    return {
        "model": {"config": None, "path": folder.as_uri()},
        "data": {name: {"path": str(folder / f"{name}.parquet")} for name in ("train", "eval")},
        "training": {"max_steps": 20, "eval_steps": 10, "learning_rate": 1e-2},
        "strategy": {"ulysses_size": 1},
    }


def _eval_rows(folder: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(folder / "eval.parquet").to_pylist()
    return rows


def _batch(tokenizer: Any, texts: list[str]) -> Any:
    tokenizer.pad_token = tokenizer.eos_token
    return tokenizer(texts, return_tensors="pt", padding=True)


TEXT_HEADS = {
    "sequence_classification": TextHead(_write_labelled, _classified),
    "reward": TextHead(_write_pairs, _rewarded),
    "embedding": TextHead(_write_anchors, _recalled),
}
