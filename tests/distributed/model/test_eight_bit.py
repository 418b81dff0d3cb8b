"""AdamW with eight-bit moments: a resumed run is bit-equal, and one rank trains nearly the same weights as two.

Own code trains nearly the weights of its plain PyTorch loop with torchao's optimizer.
"""

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed.test_own_code import lines, train_once
from tests.support.builders.specs import TINY, spec
from tests.support.own_code import example_job, plain_loop, write_example
from tests.support.ranks.ranks import on_ranks
from tests.support.ranks.torchrun import load_checkpoint, write_tokens
from train_loop.data.prepare.cache import find_dataset
from train_loop.data.stream.local import local_stream
from train_loop.loop.session import Session
from train_loop.run_dir import RunDir, read_lines
from train_loop.spec import parse
from train_loop.train import train

pytest.importorskip("torchao", reason="torchao is an optional dependency, which is not installed here")

# Large enough that shards have the 4096 values above which torchao uses eight bits.
CONFIG = TINY | {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 1}


def compile_seldom() -> None:
    """Let torchao's step run without torch.compile, which takes minutes here, unless MORE is set."""
    if not os.environ.get("MORE"):
        torch.compiler.set_stance("force_eager")


def train_run(folder: Path, name: str) -> None:
    compile_seldom()
    job = spec(
        model={"config": CONFIG, "dtype": "fp32"},
        data={"train": {"path": str(folder / "d.parquet")}, "columns": {"input_ids": "ids"}, "packing": False},
        training={"optimizer": "adamw_8bit", "max_steps": 4, "global_batch_size": 4, "weight_decay": 0.1},
        checkpoint={"every_steps": 2},
        scaling={"num_workers": dist.get_world_size()},
    )
    session = Session(dist.get_rank(), dist.get_world_size(), 0, 1, RunDir(folder / name), local_stream)
    train(job, session, find_dataset(job, folder))


@pytest.mark.timeout(600)  # torchao compiles its step
def test_resumed_run_is_bit_equal_and_close_to_one_rank(tmp_path: Path) -> None:
    write_tokens(tmp_path / "d.parquet", rows=16, length=32, vocab=TINY["vocab_size"])
    on_ranks(2, train_run, tmp_path, "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "resumed")
    shutil.rmtree(RunDir(tmp_path / "resumed").checkpoint(4))
    on_ranks(2, train_run, tmp_path, "resumed")
    on_ranks(1, train_run, tmp_path, "one rank")

    events = read_lines(RunDir(tmp_path / "resumed").attempt(1).events)
    assert [event["resumed_from"] for event in events if event["event"] == "training_started"] == [0, 2]
    whole, resumed, one = (load_checkpoint(tmp_path / name, 4)["model"] for name in ("whole", "resumed", "one rank"))
    for name, weight in whole.items():
        assert torch.equal(resumed[name], weight), name
        # In other shards, different values may form the blocks that share a scale.
        assert (one[name] - weight).norm() <= 1e-3 * weight.norm(), name


def own_job(folder: Path) -> dict[str, Any]:
    raw = example_job(folder, "simple")
    raw["code"]["config"]["width"] = 2048
    raw["training"] |= {"optimizer": "adamw_8bit", "num_train_epochs": 1}
    return raw


def train_own(folder: Path) -> None:
    compile_seldom()
    tempfile.tempdir = str(folder)
    train_once(parse(own_job(folder)), folder / "run", folder)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, by which torchao compiles its step
@pytest.mark.timeout(600)
def test_own_code_is_close_to_its_plain_loop(tmp_path: Path) -> None:
    write_example(tmp_path, "simple")
    on_ranks(2, train_own, tmp_path)
    found = lines(tmp_path / "run")
    losses, _, weights = plain_loop(tmp_path, "simple", found, own_job(tmp_path))
    assert [line["loss"] for line in found] == pytest.approx(losses, rel=1e-3)
    saved = load_checkpoint(tmp_path / "run", len(found))
    for name, weight in weights.items():
        assert (saved["model"][name] - weight).norm() <= 1e-3 * weight.norm(), name
