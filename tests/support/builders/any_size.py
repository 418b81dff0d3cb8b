"""Jobs with `reproducible: any_size`, of which every mesh must give the same bits, and what their runs gave."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.distributed as dist

from tests.support.builders.specs import TINY, spec
from tests.support.families.families import small
from tests.support.ranks.torchrun import load_tensors
from train_loop.data.dataset import Dataset, Rows
from train_loop.data.prepare.cache import evaluation_spec, find_dataset
from train_loop.data.prepare.packing import Sample
from train_loop.data.shards import write_part
from train_loop.data.stream.local import StreamPlan, local_stream
from train_loop.loop.session import Session
from train_loop.plan import MeshPlan
from train_loop.run_dir import RunDir, Stop, read_lines
from train_loop.spec import JobSpec
from train_loop.train import train

SAMPLES, BATCH, STEPS = 37, 8, 5
"""The second epoch begins inside the last step; a run of one epoch pads that step."""
# Odd sizes: shards of unequal sizes, and ranks without rows of some parameters.
ODD = TINY | {"hidden_size": 28, "intermediate_size": 45, "vocab_size": 203, "attention_dropout": 0.1}
TIED = ODD | {"tie_word_embeddings": True}
# For what a second layer would only repeat.
SHALLOW = ODD | {"num_hidden_layers": 1}
GPT2 = {"model_type": "gpt2", "vocab_size": 203, "n_embd": 28, "n_layer": 2, "n_head": 4, "n_positions": 32}
GEMMA3 = ODD | {"model_type": "gemma3_text", "sliding_window": 9, "query_pre_attn_scalar": 8, "attention_dropout": 0.0}
MOE = SHALLOW | {"model_type": "qwen3_moe", "moe_intermediate_size": 12, "num_experts": 6, "num_experts_per_tok": 2}


@dataclass(frozen=True)
class Case:
    """A job of which every mesh must give the same bits."""

    config: dict[str, Any] = field(default_factory=lambda: ODD)
    dtype: str = "fp32"
    model: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    strategy: dict[str, Any] = field(default_factory=dict)
    columns: dict[str, Any] = field(default_factory=dict)
    checkpoint: dict[str, Any] = field(default_factory=dict)
    packed: bool = False
    meshes: tuple[str, ...] = ("4", "2x2")
    """Meshes that are compared with one rank."""


CASES: dict[str, Case] = {
    "qwen3 fp32": Case(training={"ema_decay": 0.9}, meshes=("2", "4", "2x2")),
    "adapters": Case(
        ODD,
        model={"lora": {"r": 3, "dropout": 0.1, "modules_to_save": ["norm"]}},
        training={"ema_decay": 0.9},
        meshes=("2", "4", "2x2"),
    ),
    "adapters of experts": Case(
        MOE,
        model={"lora": {"r": 2, "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}},
        training={"router_aux_loss": {"coef": 0.01, "scope": "sequence"}},
    ),
    "one epoch": Case(SHALLOW, training={"max_steps": None, "num_train_epochs": 1}),
    "qwen3 tied bf16": Case(TIED, "bf16", training={"ema_decay": 0.9, "eval_steps": 2}, meshes=("2", "4", "2x2")),
    "llama two in a micro-batch": Case(
        SHALLOW | {"model_type": "llama"}, training={"per_device_train_batch_size": 2, "global_batch_size": 16}
    ),
    "gemma3 bf16": Case(GEMMA3, "bf16"),
    "gpt2": Case(GPT2),
    "sgd, all parts in turn": Case(
        SHALLOW, training={"optimizer": "sgd", "global_batch_size": 24}, meshes=("2", "4", "2x2")
    ),
    "muon": Case(training={"optimizer": "muon", "learning_rate": 0.01}),
    "recomputed, chunked, tiled": Case(
        TIED,
        model={"gradient_checkpointing": "full"},
        training={"chunked_loss": True, "z_loss": 1e-3},
        strategy={"apply_tiled_mlp": True},
    ),
    "fp32 norms, embeddings as units": Case(
        SHALLOW,
        dtype="bf16",
        strategy={"norm_dtype": "fp32", "wrap_policy": {"wrap_embeddings": True, "wrap_lm_output": True}},
    ),
    "offloaded": Case(SHALLOW, strategy={"offload_policy": True}),
    "weighted": Case(SHALLOW, columns={"weight": "weight"}, training={"eval_steps": 2}),
    "packed": Case(SHALLOW, packed=True),
    "experts, losses of routers": Case(
        MOE,
        training={"router_aux_loss": {"coef": 0.1, "scope": "sequence"}, "router_z_loss": 0.01},
        strategy={"wrap_policy": {"moe_experts": ["Qwen3MoeExperts"]}},
    ),
    "experts bf16, muon": Case(MOE, "bf16", training={"optimizer": "muon", "learning_rate": 0.01}, packed=True),
    "compiled": Case(dtype="bf16", model={"compile": True}, meshes=("2",)),
    "not finite": Case(SHALLOW, training={"learning_rate": 1e18, "max_grad_norm": None, "optimizer": "sgd"}),
}
MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "1": (1, {}),
    "2": (2, {}),
    "4": (4, {}),
    "2x2": (4, {"fsdp_size": 2}),
}
SPECIAL: dict[str, tuple[Case, tuple[str, ...]]] = {
    "two ranks per sequence": (
        Case(strategy={"ulysses_size": 2}, training={"reduction_tree": {"max_shards": 2, "max_replicas": 2}}),
        ("2", "4", "2x2"),
    ),
    "unsharded": (
        Case(
            strategy={"sharding_strategy": "NO_SHARD"},
            training={"reduction_tree": {"max_shards": 1, "max_replicas": 4}},
        ),
        ("1", "2", "4"),
    ),
}
"""Jobs that fit other meshes; the first mesh is what the others are compared with."""


def job_of(case: Case, data: Path, world: int, mesh: dict[str, Any]) -> JobSpec:
    """Return the spec of a case on a mesh."""
    columns = {"input_ids": "ids"} | case.columns
    sources: dict[str, Any] = {
        "train": {"path": str(data)},
        "columns": columns,
        "packing": case.packed,
        "shuffle": True,
    }
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
        checkpoint={"every_steps": None} | case.checkpoint,
        scaling={"num_workers": world},
    )


def train_case(folder: Path, case: Case, name: str, run_dir: RunDir, attempt: int, stop: tuple[int, bool]) -> str:
    """Train a case on a mesh until a stop request at a given step, with or without a last checkpoint.

    Rank n uses GPU n if there are GPUs.
    """
    world, mesh = MESHES[name]
    job = job_of(case, folder / "data.parquet", world, mesh)
    last, checkpoint = stop

    def stream(plan: StreamPlan, mesh: MeshPlan, rank: int) -> Iterator[Rows | None]:
        for step, rows in enumerate(local_stream(plan, mesh, rank), start=plan.start // plan.order.global_batch):
            if step == last and rank == 0:
                run_dir.write_stop(Stop(mode="resize", checkpoint=checkpoint))
            yield rows

    dataset = (
        Dataset.model_validate_json((folder / "packed.json").read_bytes())
        if job.data.packing
        else find_dataset(job, folder)
    )
    # The order of samples depends on the fingerprint, and that on the folder's name.
    dataset = dataset.model_copy(update={"fingerprint": "samples"})
    other = evaluation_spec(job, dataset)
    session = Session(dist.get_rank(), dist.get_world_size(), dist.get_rank(), attempt, run_dir, stream)
    return train(job, session, dataset, None if other is None else find_dataset(other, folder)).result


def weighted_case(seed: int) -> Case:
    """Draw a family, its loss and dtype, for data with token weights."""
    draw = random.Random(seed)
    family = draw.choice(("gpt2", "olmo2", "llama", "gpt_neox", "qwen2", "phi3", "starcoder2", "granite", "stablelm"))
    config = small(family) | {"vocab_size": 203} | ({"n_layer": 1} if family == "gpt2" else {"num_hidden_layers": 1})
    config.pop("layer_types", None)  # one for each of two layers
    training: dict[str, Any] = {"eval_steps": 2, "learning_rate": draw.choice([1e-3, 1e-2])}
    extra = {"label_smoothing_factor": 0.1, "z_loss": 1e-3, "ema_decay": 0.9, "chunked_loss": family != "granite"}
    training |= {name: value for name, value in extra.items() if draw.random() < 0.4}
    return Case(config, draw.choice(["fp32", "fp32", "bf16"]), training=training, columns={"weight": "weight"})


def write_data(folder: Path, seed: int = 0) -> None:
    """Write the data of all cases: rows of odd lengths for training and evaluation, and packed rows."""
    draw = np.random.default_rng(seed)
    for name, rows in (("data", SAMPLES), ("eval", 11)):
        # Rows of one token train none of them.
        ids = [draw.integers(0, 203, n).astype(np.int32).tolist() for n in draw.integers(1, 33, rows)]
        # With many weights of 1, some micro-batches have no other.
        weights = draw.choice([1.0, 1.0, 1.0, 0.3], rows).tolist()
        pq.write_table(pa.table({"ids": ids, "weight": weights}), folder / f"{name}.parquet")
    write_packed(folder, draw)


def write_packed(folder: Path, draw: np.random.Generator) -> None:
    """Write the dataset that preparation writes for packed rows: several documents in a sample."""

    def samples() -> Iterator[Sample]:
        for _ in range(SAMPLES):
            documents = draw.integers(1, 11, 3).tolist()
            yield Sample(draw.integers(0, 203, sum(documents)).astype(np.int32), None, None, documents)

    (folder / "packed").mkdir()
    part = write_part(samples(), folder / "packed")
    packed = Dataset(fingerprint=part.fingerprint, parts=(part,), sequence_length=32)
    (folder / "packed.json").write_text(packed.model_dump_json())


def numbers(folder: Path) -> list[dict[str, Any]]:
    """Return the results of each step."""
    names = (
        "step",
        "loss",
        "grad_norm",
        "lr",
        "tokens",
        "eval_loss",
        "router_aux_loss",
        "router_z_loss",
        "expert_load",
    )
    lines = [line for attempt in RunDir(folder).attempts() for line in read_lines(attempt.metrics)]
    return [{name: line[name] for name in names if name in line} for line in lines]


def differing(one: Path, other: Path, step: int = STEPS) -> list[str]:
    """Return the tensors of the checkpoints of a step that differ; NaN equals NaN."""
    values, expected = load_tensors(one, step), load_tensors(other, step)
    assert {name.split("/")[1] for name in expected} >= {"model", "optimizer"}
    assert values.keys() == expected.keys()
    return [name for name, value in expected.items() if not same_bits(values[name], value)]


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one, other) or bool(torch.allclose(one, other, rtol=0, atol=0, equal_nan=True))
