"""Generation: greedy tokens are those of transformers, and the tokens of a row depend on no other row and no rank."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.builders.specs import TINY
from tests.support.ranks.infer_runs import infer_rows, save_model
from tests.support.ranks.ranks import ranks_of_any_number
from tests.support.ranks.torchrun import write_tokens

LENGTH, ROWS, NEW = 20, 11, 12
SIZES = {"vocab_size": TINY["vocab_size"], "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"intermediate_size": 48, "num_key_value_heads": 2},
    "qwen3": {"intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 8},
    "gpt2": {},
    "gemma2": {"intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 6},
    "mpt": {"attn_config": {}},
}
Call = Callable[..., Any]


@pytest.fixture(scope="module")
def call_ranks() -> Iterator[Call]:
    with ranks_of_any_number(4) as call:
        yield call


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with rows of uneven lengths, and models."""
    folder = tmp_path_factory.mktemp("generate")
    write_tokens(folder / "d.parquet", rows=ROWS, length=(1, LENGTH), vocab=SIZES["vocab_size"])
    for kind, more in FAMILIES.items():
        save_model(folder / kind, {"model_type": kind} | SIZES | more)
    return folder


def job(
    data: Path, kind: str = "qwen3", *, batch: int = 3, strategy: dict[str, Any] | None = None, **generation: Any
) -> dict[str, Any]:
    """Return the spec of a job that generates after the rows."""
    return {
        "model": {"path": str(data / kind), "dtype": "fp32"},
        "data": {
            "train": {"path": str(data / "d.parquet")},
            "columns": {"input_ids": "ids"},
            "sequence_length": LENGTH,
        },
        "infer": {
            "output": "generate",
            "batch_size": batch,
            "rows_per_shard": 4,
            "generation": {"max_new_tokens": NEW} | generation,
        },
        "strategy": strategy or {},
    }


def tokens_of(found: list[dict[str, Any]]) -> list[list[int]]:
    assert [row["row"] for row in found] == list(range(ROWS))
    return [row["generated_tokens"] for row in found]


def plain_tokens(data: Path, kind: str, **more: Any) -> list[list[int]]:
    """Return the tokens that transformers generates after each row alone."""
    model = AutoModelForCausalLM.from_pretrained(data / kind, dtype=torch.float32).eval()
    found = []
    for ids in pq.read_table(data / "d.parquet")["ids"].to_pylist():
        out = model.generate(torch.tensor([ids]), max_new_tokens=NEW, do_sample=False, pad_token_id=0, **more)
        found.append(out[0, len(ids) :].tolist())
    return found


@pytest.mark.parametrize("kind", FAMILIES)
def test_greedy_tokens_equal_those_of_transformers(data: Path, tmp_path: Path, call_ranks: Call, kind: str) -> None:
    _, found = call_ranks(1, infer_rows, job(data, kind), tmp_path)
    assert tokens_of(found) == plain_tokens(data, kind)


def test_tokens_do_not_depend_on_ranks_and_batches(data: Path, tmp_path: Path, call_ranks: Call) -> None:
    greedy = plain_tokens(data, "qwen3")
    for world, batch, strategy in ((2, 1, {}), (4, 2, {"fsdp_size": 2}), (4, 5, {})):
        outcome, found = call_ranks(
            world, infer_rows, job(data, batch=batch, strategy=strategy), tmp_path / f"{world}{batch}"
        )
        assert (outcome.result, outcome.step) == ("succeeded", ROWS)
        assert tokens_of(found) == greedy
