"""Runs of `reproducible: any_size` have the same bits at every number of ranks and across changes of it."""

import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from tests.support.builders.specs import TINY, spec
from tests.support.ranks.ranks import ranks_of_any_number
from tests.support.ranks.torchrun import load_tensors
from train_loop.checkpoint.digest import digest_step
from train_loop.data.dataset import Dataset, Rows
from train_loop.data.order import StepOrder
from train_loop.data.prepare.cache import evaluation_spec, find_dataset
from train_loop.data.prepare.packing import Sample
from train_loop.data.shards import write_part
from train_loop.data.stream.local import StreamPlan, local_stream
from train_loop.loop.session import Session
from train_loop.optim import clip_gradients
from train_loop.parallel.ordered import OrderedReduction
from train_loop.plan import MeshPlan
from train_loop.run_dir import RunDir, Stop, read_lines
from train_loop.spec import JobSpec
from train_loop.state import seed_generators
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
    columns: dict[str, Any] = field(default_factory=dict)
    packed: bool = False


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
    "weighted": Case(columns={"weight": "weight"}, training={"eval_steps": 3}),
    "packed": Case(packed=True),
    "compiled": Case(dtype="bf16", model={"compile": True}),
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
        checkpoint={"every_steps": None},
        scaling={"num_workers": world},
    )


def train_case(folder: Path, case: Case, name: str, run_dir: RunDir, attempt: int, stop: tuple[int, bool]) -> str:
    """Train a case on a mesh, up to a step at which it is told to stop with or without a checkpoint."""
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
    other = evaluation_spec(job, dataset)
    session = Session(dist.get_rank(), dist.get_world_size(), 0, attempt, run_dir, stream)
    return train(job, session, dataset, None if other is None else find_dataset(other, folder)).result


Ask = Callable[..., Any]


@pytest.fixture(scope="module")
def ask() -> Iterator[Ask]:
    with ranks_of_any_number(4) as ask:
        yield ask


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    draw = np.random.default_rng(0)
    for name, rows in (("data", SAMPLES), ("eval", 11)):
        # Rows of one token train none of them.
        ids = [draw.integers(0, 203, n).astype(np.int32).tolist() for n in draw.integers(1, 33, rows)]
        weights = draw.random(rows).tolist()
        pq.write_table(pa.table({"ids": ids, "weight": weights}), folder / f"{name}.parquet")
    write_packed(folder, draw)
    return folder


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


def trained(ask: Ask, folder: Path, case: str, mesh: str) -> Path:
    """Return the folder of a case's undisturbed run on a mesh."""
    run_dir = folder / f"{case} on {mesh}"
    if not run_dir.exists():
        ask(MESHES[mesh][0], train_case, folder, CASES[case], mesh, RunDir(run_dir), 1, (STEPS, True))
    return run_dir


def numbers(folder: Path) -> list[dict[str, Any]]:
    """Return the results of each step."""
    told = ("step", "loss", "grad_norm", "lr", "tokens", "eval_loss")
    lines = [line for attempt in RunDir(folder).attempts() for line in read_lines(attempt.metrics)]
    return [{name: line[name] for name in told if name in line} for line in lines]


@pytest.mark.parametrize("mesh", [name for name in MESHES if name != "1"])
@pytest.mark.parametrize("case", CASES)
def test_every_mesh_has_the_bits_of_one_rank(ask: Ask, folder: Path, case: str, mesh: str) -> None:
    alone, found = trained(ask, folder, case, "1"), trained(ask, folder, case, mesh)
    assert len(numbers(alone)) == STEPS
    assert str(numbers(found)) == str(numbers(alone))
    assert differing(found, alone) == []


@pytest.mark.parametrize("mesh", [name for name in MESHES if name != "1"])
@pytest.mark.parametrize("case", ["qwen3 fp32", "qwen3 tied bf16", "muon"])
def test_digests_do_not_depend_on_the_mesh(ask: Ask, folder: Path, case: str, mesh: str) -> None:
    alone, found = (digest_step(RunDir(trained(ask, folder, case, name)), STEPS) for name in ("1", mesh))
    assert alone is not None
    assert found == alone
    names = {name.partition(".")[0] for name in alone.tensors}
    assert names == {"model", "optimizer", *({"ema"} if "ema_decay" in CASES[case].training else ())}


def test_digests_of_another_step_differ(ask: Ask, folder: Path) -> None:
    short = folder / "qwen3 fp32 for one step less"
    ask(2, train_case, folder, CASES["qwen3 fp32"], "2", RunDir(short), 1, (STEPS - 1, True))
    found, other = (
        digest_step(RunDir(trained(ask, folder, "qwen3 fp32", "2")), STEPS),
        digest_step(RunDir(short), STEPS - 1),
    )
    assert found is not None
    assert other is not None
    assert found.tensors.keys() == other.tensors.keys()
    assert found.sha256 != other.sha256


def differing(one: Path, other: Path) -> list[str]:
    """Return the tensors of the last checkpoints that differ; NaN equals NaN."""
    values, expected = load_tensors(one, STEPS), load_tensors(other, STEPS)
    assert {name.split("/")[1] for name in expected} >= {"model", "optimizer"}
    assert values.keys() == expected.keys()
    return [name for name, value in expected.items() if not same_bits(values[name], value)]


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one, other) or bool(torch.allclose(one, other, rtol=0, atol=0, equal_nan=True))


def test_the_case_that_is_not_finite_skips_steps(ask: Ask, folder: Path) -> None:
    events = read_lines(RunDir(trained(ask, folder, "not finite", "2x2")).attempt(1).events)
    assert [event["step"] for event in events if event["event"] == "step_skipped"]


ULYSSES = {"2": (2, {}), "4": (4, {}), "2x2": (4, {"fsdp_size": 2})}


def test_ulysses_keeps_the_bits_at_a_fixed_size(ask: Ask, folder: Path) -> None:
    """Check two ranks per sequence; two ranks are one data-parallel rank."""
    case = Case(strategy={"ulysses_size": 2}, training={"reduction_tree": {"max_shards": 2, "max_replicas": 2}})
    runs = {}
    for name, (world, _) in ULYSSES.items():
        runs[name] = folder / f"ulysses on {name}"
        ask(world, train_case, folder, case, name, RunDir(runs[name]), 1, (STEPS, True))
    for name in ("4", "2x2"):
        assert numbers(runs[name]) == numbers(runs["2"])
        assert differing(runs[name], runs["2"]) == []


def test_unsharded_runs_have_the_same_bits_at_every_number_of_replicas(ask: Ask, folder: Path) -> None:
    tree = {"max_shards": 1, "max_replicas": 4}
    case = Case(strategy={"sharding_strategy": "NO_SHARD"}, training={"reduction_tree": tree})
    runs = {name: folder / f"unsharded on {name}" for name in ("1", "2", "4")}
    for name, run_dir in runs.items():
        ask(MESHES[name][0], train_case, folder, case, name, RunDir(run_dir), 1, (STEPS, True))
    for name in ("2", "4"):
        assert numbers(runs[name]) == numbers(runs["1"])
        assert differing(runs[name], runs["1"]) == []


@pytest.mark.parametrize("seed", range(int(os.environ.get("SCHEDULES", "6"))))
def test_resized_and_killed_runs_have_the_bits_of_the_undisturbed_run(ask: Ask, folder: Path, seed: int) -> None:
    """Check random schedules: each leg has a mesh and ends with a checkpoint, or without one as if it were killed.

    `SCHEDULES=200` tries 200 of them, which takes some ten minutes.
    """
    draw = random.Random(seed)
    case = draw.choice(("qwen3 fp32", "qwen3 tied bf16", "muon", "weighted"))
    alone, run_dir = trained(ask, folder, case, "1"), RunDir(folder / f"{case} by schedule {seed}")
    attempt = done = 0
    while done < STEPS:
        attempt += 1
        mesh = draw.choice(list(MESHES))
        stop = draw.randint(done + 1, STEPS) if attempt < 5 else STEPS
        checkpoint = draw.random() < 0.6
        run_dir.write_fence(attempt)
        ask(MESHES[mesh][0], train_case, folder, CASES[case], mesh, run_dir, attempt, (stop, checkpoint))
        run_dir.stop_file.unlink(missing_ok=True)
        done = stop if checkpoint or stop == STEPS else done
    expected = {line["step"]: line for line in numbers(alone)}
    assert {line["step"] for line in numbers(run_dir.root)} == expected.keys()
    for line in numbers(run_dir.root):
        assert str(line) == str(expected[line["step"]])
    assert differing(run_dir.root, alone) == []


def train_without(folder: Path, ingredient: str, mesh: str, run_dir: RunDir) -> None:
    """Train the first case on a mesh, with one part of the order missing."""
    with pytest.MonkeyPatch.context() as patch:
        ABLATIONS[ingredient](patch)
        train_case(folder, CASES["qwen3 fp32"], mesh, run_dir, 1, (STEPS, True))


def default_reduce_scatter(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FSDPModule, "set_custom_reduce_scatter", lambda *_: None)


def torch_norm(patch: pytest.MonkeyPatch) -> None:
    def norm(_: object, model: torch.nn.Module) -> torch.Tensor:
        return clip_gradients(model, None)

    patch.setattr(OrderedReduction, "grad_norm", norm)


def fused_adamw(patch: pytest.MonkeyPatch) -> None:
    make = torch.optim.AdamW.__init__

    def fused(*arguments: Any, **options: Any) -> None:
        make(*arguments, **options | {"fused": True, "foreach": False})

    patch.setattr(torch.optim.AdamW, "__init__", fused)


def order_by_rank(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StepOrder, "_places", property(lambda self: np.arange(self.global_batch).reshape(self.dp, -1)))


def seed_by_rank(patch: pytest.MonkeyPatch) -> None:
    def seed(number: int, *, step: int, rank: int) -> None:
        seed_generators(number, step=step, rank=dist.get_rank())

    patch.setattr("train_loop.loop.step.seed_generators", seed)


def losses_by_rank(patch: pytest.MonkeyPatch) -> None:
    def sum_float32(_: object, values: torch.Tensor, *, shared: bool = False) -> torch.Tensor:
        total = values.sum()
        dist.all_reduce(total)
        return total

    patch.setattr(OrderedReduction, "sum", sum_float32)


ABLATIONS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "gradients: FSDP2's reduce-scatter": default_reduce_scatter,
    "gradient norm": torch_norm,
    "optimizer flavour": fused_adamw,
    "order of samples": order_by_rank,
    "dropout seeds": seed_by_rank,
    "losses": losses_by_rank,
}


@pytest.mark.parametrize("ingredient", ABLATIONS)
def test_without_any_part_the_bits_depend_on_the_mesh(ask: Ask, folder: Path, ingredient: str) -> None:
    alone, found = (folder / f"without {ingredient} on {mesh}" for mesh in ("1", "4"))
    for mesh, run_dir in (("1", alone), ("4", found)):
        ask(MESHES[mesh][0], train_without, folder, ingredient, mesh, RunDir(run_dir))
    assert numbers(found) != numbers(alone) or differing(found, alone)
