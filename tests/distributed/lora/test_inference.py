"""Inference from a checkpoint of adapters: the base of its folder with the adapters, as peft computes it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from tests.support.builders.folders import write_model
from tests.support.builders.small_runs import LENGTH
from tests.support.builders.small_runs import job_of as clone_of
from tests.support.builders.small_runs import run as train
from tests.support.builders.specs import infer_spec, may_read
from tests.support.ranks.adapters import round_weights
from tests.support.ranks.torchrun import load_tensors, write_tokens
from train_loop.data.prepare.cache import find_dataset
from train_loop.data.read_results import read_rows
from train_loop.data.stream.local import local_stream
from train_loop.infer import infer
from train_loop.loop.session import Session
from train_loop.model.quantize import Kind
from train_loop.preflight.model import check_model
from train_loop.run_dir import Parent, RunDir
from train_loop.spec import InferJobSpec, SpecError, parse_any
from train_loop.spec.kinds.model import model_of_job

CallRanks = Callable[..., Any]
LORA = {"r": 4, "target_modules": ["q_proj", "down_proj"]}


def train_adapters(home: Path, quantized: str | None) -> None:
    model = {"path": str(home / "base"), "config": None, "lora": LORA, "quantize_base": quantized}
    train(home / "d.parquet", home / "trained", model=model, learning_rate=0.05)


def job_of(home: Path, workers: int, quantized: str | None = None, tp: int = 1) -> InferJobSpec:
    job = parse_any(
        infer_spec(
            model={
                "job": "job-trained",
                "step": 6,
                "path": str(home / "base"),
                "config": None,
                "lora": LORA,
                "quantize_base": quantized,
            },
            data={"train": {"path": str(home / "d.parquet")}},
            infer={"output": "logprobs", "rows_per_shard": 8, "batch_size": 2},
            strategy={"tp_size": tp},
            scaling={"num_workers": workers},
        )
    )
    assert isinstance(job, InferJobSpec)
    return job


def compute(home: Path, quantized: str | None, tp: int) -> None:
    job = job_of(home, dist.get_world_size(), quantized, tp)
    session = Session(dist.get_rank(), dist.get_world_size(), 0, 1, RunDir(home / "job"), local_stream)
    infer(job, session, find_dataset(job.run, home))


@pytest.mark.parametrize(("quantized", "workers", "tp"), [(None, 2, 2), ("int8", 1, 1), ("int8", 2, 1)])
def test_logprobs_are_those_of_peft_with_the_trained_adapters(
    call_ranks: CallRanks, tmp_path: Path, quantized: Kind | None, workers: int, tp: int
) -> None:
    write_tokens(tmp_path / "d.parquet", rows=12, length=LENGTH, vocab=300)
    write_model(tmp_path / "base")
    call_ranks(2, train_adapters, tmp_path, quantized)
    parent = Parent(
        job="job-trained",
        run_dir=str(tmp_path / "trained"),
        manifest=RunDir(tmp_path / "trained").manifests()[6],
        same_order=False,
        same_optimizer=False,
    )
    RunDir(tmp_path / "job").write_parent(parent)
    assert check_model(job_of(tmp_path, 1, quantized).run, may_read(f"file://{tmp_path}"), parent)[1] == []
    other = None if quantized else "int8"
    model = {"path": str(tmp_path / "base"), "config": None, "lora": LORA, "quantize_base": other}
    clone = clone_of(tmp_path / "d.parquet", 1, model=model)
    (problem,) = check_model(clone, may_read(f"file://{tmp_path}"), parent)[1]
    then, now = quantized or "null", other or "null"
    assert (problem.pointer, problem.message) == (
        "/model/quantize_base",
        f"the adapters of step 6 were trained with quantize_base={then}, and quantize_base={now} gives the frozen "
        f"weights other values; keep quantize_base: {then}, or export the adapters and name their folder in "
        "model.adapter, which begins a new run",
    )
    call_ranks(workers, compute, tmp_path, quantized, tp)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    if quantized is not None:
        round_weights(base.model.layers, quantized)
    config = peft.LoraConfig(r=4, lora_alpha=32, target_modules=LORA["target_modules"])
    plain = peft.inject_adapter_in_model(config, base)
    saved = load_tensors(tmp_path / "trained", 6)
    weights = {name.removeprefix("/model/"): value for name, value in saved.items() if name.startswith("/model/")}
    assert not plain.load_state_dict(weights, strict=False).unexpected_keys
    rows, ids = list(read_rows(RunDir(tmp_path / "job"))), pq.read_table(tmp_path / "d.parquet")["ids"].to_pylist()
    assert len(rows) == 12
    for row, tokens in zip(rows, ids, strict=True):
        with torch.no_grad():
            logprobs = plain(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
            expected = logprobs.gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0]
        np.testing.assert_allclose(row["logprobs"], expected, rtol=0, atol=1e-5)


def test_adapters_of_random_weights_are_refused(tmp_path: Path) -> None:
    of = job_of(tmp_path, 1).model.model_copy(update={"path": None, "config": {"model_type": "qwen3"}})
    own = infer_spec()["model"] | {"config": None, "job": "job-trained"}
    asking = parse_any(infer_spec(model=own))
    assert isinstance(asking, InferJobSpec)
    with pytest.raises(SpecError, match="job-trained has adapters for random weights, which only its own run can draw"):
        model_of_job(asking.model, "job-trained", of, None, reads_text=False)
