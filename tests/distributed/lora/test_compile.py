"""Adapters in compiled layers: the run without a compiler, and its bits again after a resume."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.builders.small_runs import LENGTH, events, lines, numbers, run
from tests.support.ranks.torchrun import write_tokens
from train_loop.checkpoint.digest import digest_step
from train_loop.run_dir import RunDir

CONFIG = {"model_type": "llama", "vocab_size": 300, "hidden_size": 16, "intermediate_size": 16}
CONFIG |= {"num_hidden_layers": 3, "num_attention_heads": 2}
LORA = {"r": 2, "dropout": 0.1, "modules_to_save": ["lm_head"]}


def train_compiled(home: Path, name: str, *, compiles: bool, last: int = 6) -> None:
    model = {"config": CONFIG, "lora": LORA, "gradient_checkpointing": "full", "compile": compiles}
    run(home / "d.parquet", home / name, model=model, max_steps=last)


def train_all(home: Path) -> None:
    train_compiled(home, "plain", compiles=False)
    train_compiled(home, "whole", compiles=True)
    for last in (4, 6):
        train_compiled(home, "parts", compiles=True, last=last)


def test_compiled_adapters_equal_plain_ones_and_resume_with_their_bits(
    call_ranks: Callable[..., Any], tmp_path: Path
) -> None:
    write_tokens(tmp_path / "d.parquet", rows=40, length=LENGTH, vocab=300)
    call_ranks(2, train_all, tmp_path)
    plain, whole, parts = ([numbers(line) for line in lines(tmp_path / name)] for name in ("plain", "whole", "parts"))
    assert len(plain) == 6
    for expected, found in zip(plain, whole, strict=True):
        assert found == pytest.approx(expected, rel=1e-5)
    assert parts == whole
    digests = [digest_step(RunDir(tmp_path / name), 6) for name in ("whole", "parts")]
    assert digests[0] is not None
    assert digests[0] == digests[1]
    # The input of the first layer needs no gradient, and that of each other one does.
    (news,) = events(tmp_path / "whole", "compiled")
    assert (news["step"], news["graphs"], news["graph_breaks"]) == (1, 2, {})
