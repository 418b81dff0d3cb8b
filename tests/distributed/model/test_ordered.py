"""Runs of `reproducible: any_size` have the same bits at every number of ranks and across changes of it."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist

from tests.support.builders.specs import TINY, spec
from tests.support.ranks.ranks import on_ranks
from tests.support.ranks.torchrun import load_checkpoint, write_tokens
from train_loop.data.dataset import Rows
from train_loop.data.prepare.cache import evaluation_spec, find_dataset
from train_loop.data.stream.local import StreamPlan, local_stream
from train_loop.loop.session import Session
from train_loop.plan import MeshPlan
from train_loop.run_dir import RunDir, Stop, read_lines
from train_loop.spec import JobSpec
from train_loop.train import train

SAMPLES, BATCH, STEPS = 37, 8, 8
"""37 samples in two epochs: the second epoch begins inside a step, and steps past the end are padded."""
# Odd sizes: shards of unequal sizes, and ranks without rows of some parameters.
ODD = TINY | {"hidden_size": 28, "intermediate_size": 45, "vocab_size": 203, "attention_dropout": 0.1}
TIED = ODD | {"tie_word_embeddings": True}
GPT2 = {"model_type": "gpt2", "vocab_size": 203, "n_embd": 28, "n_layer": 2, "n_head": 4, "n_positions": 32}
GEMMA3 = ODD | {"model_type": "gemma3_text", "sliding_window": 9, "query_pre_attn_scalar": 8, "attention_dropout": 0.0}


@dataclass(frozen=True)
class Case:
    """A job of which every mesh must give the same bits."""

    config: dict[str, Any] = field(default_factory=lambda: ODD)
    dtype: str = "fp32"
    model: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    strategy: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)


CASES: dict[str, Case] = {
    "qwen3 fp32": Case(training={"ema_decay": 0.9}),
    "qwen3 tied bf16": Case(TIED, "bf16", training={"ema_decay": 0.9, "eval_steps": 4}),
    "llama two in a micro-batch": Case(
        ODD | {"model_type": "llama"}, training={"per_device_train_batch_size": 2, "global_batch_size": 16}
    ),
    "gemma3 bf16": Case(GEMMA3, "bf16"),
    "gpt2": Case(GPT2),
    "sgd, all parts in turn": Case(training={"optimizer": "sgd", "global_batch_size": 24}),
    "muon": Case(training={"optimizer": "muon", "learning_rate": 0.01}),
    "recomputed, chunked, tiled": Case(
        TIED,
        model={"gradient_checkpointing": "full"},
        training={"chunked_loss": True, "z_loss": 1e-3},
        strategy={"apply_tiled_mlp": True},
    ),
    "fp32 norms, embeddings as units": Case(
        dtype="bf16",
        strategy={"norm_dtype": "fp32", "wrap_policy": {"wrap_embeddings": True, "wrap_lm_output": True}},
    ),
    "offloaded": Case(strategy={"offload_policy": True}),
    "weighted": Case(data={"weight": "weight"}, training={"eval_steps": 3}),
    "not finite": Case(training={"learning_rate": 1e18, "max_grad_norm": None, "optimizer": "sgd"}),

}
MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "1": (1, {}),
    "2": (2, {}),
    "4": (4, {}),
    "2x2": (4, {"fsdp_size": 2}),
}


def job_of(case: Case, data: Path, world: int, mesh: dict[str, Any]) -> JobSpec:
    """Return the spec of a case on a mesh."""
    columns = {"input_ids": "ids"} | case.data
    sources: dict[str, Any] = {"train": {"path": str(data)}, "columns": columns, "packing": False, "shuffle": True}
    if "eval_steps" in case.training:
        sources["eval"] = {"path": str(data.with_name("eval.parquet"))}
    tree = {"max_shards": 4, "max_replicas": 2}
    return spec(
        model={"config": case.config, "dtype": case.dtype, "gradient_checkpointing": "none"} | case.model,
        data=sources,
        training={"max_steps": STEPS, "global_batch_size": BATCH, "max_grad_norm": 0.3, "weight_decay": 0.1}
        | {"reproducible": "any_size", "reduction_tree": tree}
        | case.training,
        strategy=mesh | case.strategy,
        checkpoint={"every_steps": None},
        scaling={"num_workers": world},
    )


def train_cases(folder: Path, name: str, names: list[str]) -> None:
    """Train every case on a mesh, in a folder of its own."""
    world, mesh = MESHES[name]
    for case in names:
        job = job_of(CASES[case], folder / "data.parquet", world, mesh)
        dataset = find_dataset(job, folder)
        other = evaluation_spec(job, dataset)
        run_dir = RunDir(folder / f"{case} on {name}")
        session = Session(dist.get_rank(), dist.get_world_size(), 0, 1, run_dir, local_stream)
        train(job, session, dataset, None if other is None else find_dataset(other, folder))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    draw = np.random.default_rng(0)
    for name, rows in (("data", SAMPLES), ("eval", 11)):
        # Rows of one token train none of them.
        ids = [draw.integers(0, 203, n).astype(np.int32).tolist() for n in draw.integers(1, 33, rows)]
        weights = draw.random(rows).tolist()
        pq.write_table(pa.table({"ids": ids, "weight": weights}), folder / f"{name}.parquet")
    for name, (world, _) in MESHES.items():
        on_ranks(world, train_cases, folder, name, list(CASES))
    return folder


def numbers(folder: Path) -> list[dict[str, Any]]:
    """Return the results of each step."""
    told = ("step", "loss", "grad_norm", "lr", "tokens", "eval_loss")
    return [{name: line[name] for name in told if name in line} for line in read_lines(RunDir(folder).attempt(1).metrics)]


def flat(values: Any, name: str = "") -> dict[str, Any]:
    if not isinstance(values, dict):
        return {name: values}
    return {leaf: v for key, value in values.items() for leaf, v in flat(value, f"{name}/{key}").items()}


def state(folder: Path, step: int = STEPS) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint: weights, optimizer states and averages."""
    return {name: value for name, value in flat(load_checkpoint(folder, step)).items() if isinstance(value, torch.Tensor)}


@pytest.mark.parametrize("mesh", [name for name in MESHES if name != "1"])
@pytest.mark.parametrize("case", CASES)
def test_every_mesh_has_the_bits_of_one_rank(folder: Path, case: str, mesh: str) -> None:
    alone, found = folder / f"{case} on 1", folder / f"{case} on {mesh}"
    assert str(numbers(found)) == str(numbers(alone))
    expected, values = state(alone), state(found)
    assert values.keys() == expected.keys()
    assert [name for name, value in expected.items() if not same_bits(values[name], value)] == []


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors are equal, where NaN equals NaN."""
    return torch.equal(one, other) or bool(torch.allclose(one, other, rtol=0, atol=0, equal_nan=True))
