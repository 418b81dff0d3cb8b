"""The objectives with which the tests of this folder train the families: a new one gets all tests by one line."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from tests.families.parity import KINDS, LENGTH, VOCAB
from tests.support.own_code import write_package
from train_loop.data.dataset import IGNORE

CLASSES = 3
OWN = "own module"
"""The family of a user's package, which transformers does not have."""


OWN_MODEL = """
import torch
from torch import nn
from torch.nn import functional as F

class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))

class Model(nn.Module):
    _no_split_modules = ("Layer",)
    def __init__(self, width):
        super().__init__()
        self.first, self.last = nn.Linear(2, width).requires_grad_(False), nn.Linear(width, 2)
        self.layers = nn.ModuleList(Layer(width) for _ in range(2))
    def forward(self, x):
        x = self.first(x)[:, None] * torch.linspace(0, 1, 64, device=x.device)[:, None]
        for layer in self.layers:
            x = layer(x)
        return self.last(x.mean(1))

def build(config):
    return Model(**config)

def batch(columns):
    return {"x": columns["x"], "y": columns["y"]}

def loss(model, batch):
    return F.mse_loss(model(batch["x"]).sum(-1), batch["y"], reduction="sum"), len(batch["y"])
"""
"""The module of the package: it has a frozen part, and a sequence of 64 states for each row.

Two ranks divide its sizes evenly, as the plan does.
"""


class Objective(NamedTuple):
    """Parts of a spec that choose an objective, and the class with which transformers loads its export."""

    families: tuple[str, ...]
    """Kinds of models that are trained with it."""
    columns: Mapping[str, Any]
    head: Mapping[str, Any] | None = None
    exported: Any = None
    """None if the export is of own code."""
    config: Mapping[str, Any] = {}
    """Further fields: of encoders, and those without which a step depends on the number of ranks."""
    rows: int = 1
    """Samples of a micro-batch."""


_IDS = {"input_ids": "ids"}
_LABELLED = {"labels": CLASSES}
_ENCODER = {"is_decoder": False, "classifier_dropout": 0.0}
_CLASSES_OF_ROWS = Objective(
    ("qwen3", "minicpm3"),
    _IDS | {"label": "class"},
    {"sequence_classification": _LABELLED},
    AutoModelForSequenceClassification,
)
_NUMBERS = Objective(("qwen3",), _IDS | {"label": "number"}, {"regression": {}}, AutoModelForSequenceClassification)
_CLASSES_OF_TOKENS = Objective(
    ("qwen3", "gemma2"),
    _IDS | {"labels": "tags"},
    {"token_classification": _LABELLED},
    AutoModelForTokenClassification,
    {"classifier_dropout": 0.0},
)
_EMBEDDINGS = Objective(
    ("qwen3", "gpt2"),
    {"anchor": "prompt", "positive": "chosen", "negatives": ["rejected"], "token_ids": True},
    {"embedding": {"group": 2, "temperature": 0.5}},
    AutoModel,
    rows=2,
)
OBJECTIVES = {
    "token cross entropy": Objective(KINDS, _IDS, exported=AutoModelForCausalLM),
    "classes of rows": _CLASSES_OF_ROWS,
    "classes of rows, encoder": _CLASSES_OF_ROWS._replace(families=("bert",), config=_ENCODER),
    "numbers": _NUMBERS,
    "numbers, encoder": _NUMBERS._replace(families=("bert",), config=_ENCODER),
    "classes of tokens": _CLASSES_OF_TOKENS,
    "classes of tokens, encoder": _CLASSES_OF_TOKENS._replace(families=("bert",), config=_ENCODER),
    "rewards": Objective(
        ("qwen3", "gpt2"),
        {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected", "margin": "number", "token_ids": True},
        {"reward": {"center_rewards_coefficient": 0.05}},
        AutoModelForSequenceClassification,
    ),
    "embeddings": _EMBEDDINGS,
    "embeddings, encoder": _EMBEDDINGS._replace(
        families=("bert",), head={"embedding": {"group": 2, "pooling": "cls"}}, config=_ENCODER
    ),
    "masked tokens": Objective(
        ("bert",),
        _IDS,
        {"masked_lm": {"probability": 0.3, "mask_token": 1, "special_tokens": []}},
        AutoModelForMaskedLM,
        _ENCODER,
    ),
    "own loss": Objective((OWN,), {"own": ["x", "y"]}),
}
MATRIX = [(family, name) for name, one in OBJECTIVES.items() for family in one.families]
"""Every kind of model with every objective that trains it."""


def write_rows(folder: Path, count: int) -> Path:
    """Write rows with the columns of all objectives, and a user's package, into a folder; return the file of rows.

    Rows are shorter than the sequence, so that data ranks differ in the tokens they train.
    """
    write_package(folder / "code", OWN_MODEL)
    draw = np.random.default_rng(0)
    lengths = draw.integers(9, LENGTH + 1, count)
    texts = {
        name: [draw.integers(1, VOCAB, length).astype(np.int32) for length in draw.integers(2, longest, count)]
        for name, longest in (("prompt", 6), ("chosen", 12), ("rejected", 12))
    }
    table: dict[str, Any] = texts | {
        "ids": [draw.integers(0, VOCAB, length).astype(np.int32) for length in lengths],
        "tags": [np.where(draw.random(n) < 0.3, IGNORE, draw.integers(0, CLASSES, n)) for n in lengths],
        "class": draw.integers(0, CLASSES, count),
        "number": draw.normal(size=count),
        "x": pa.FixedSizeListArray.from_arrays(pa.array(draw.normal(size=2 * count).astype(np.float32)), 2),
        "y": pa.array(draw.normal(size=count).astype(np.float32)),
    }
    pq.write_table(pa.table(table), folder / "rows.parquet")
    return folder / "rows.parquet"


def with_objective(raw: dict[str, Any], family: str, name: str, rows: Path) -> dict[str, Any]:
    """Return a spec of a family that trains with an objective on the rows of a file."""
    objective = OBJECTIVES[name]
    data = raw["data"] | {"train": {"path": str(rows)}, "columns": objective.columns}
    if family == OWN:
        code = {"package": str(rows.parent / "code"), "config": {"width": 32}}
        entries = {
            part: f"mymodel:{place}" for part, place in (("model", "build"), ("loss", "loss"), ("batch", "batch"))
        }
        model = {"dtype": "fp32"}
        data = {part: value for part, value in data.items() if part in ("train", "columns", "shuffle", "seed")}
        return {part: value for part, value in raw.items() if part != "model"} | {
            "code": code | entries,
            "model": model,
            "data": data,
        }
    head = {} if objective.head is None else {"head": objective.head}
    config = raw["model"]["config"] | dict(objective.config if family in objective.families else {})
    return raw | {"model": raw["model"] | head | {"config": config}, "data": data}
