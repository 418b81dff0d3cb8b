"""Evaluation: the loss equals a plain computation at every mesh, and training is unchanged."""

import json
from collections.abc import Mapping
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from tests.support.builders.datasets import parquet_dataset
from tests.support.builders.specs import TINY, spec
from tests.support.ranks.ranks import on_ranks
from tests.support.ranks.torchrun import write_tokens
from train_loop.data.dataset import Dataset
from train_loop.data.prepare.pointer import pinned_dataset
from train_loop.data.stream.local import local_stream
from train_loop.loop.batch import MicroBatch
from train_loop.loop.evaluate import Evaluation, evaluate
from train_loop.loop.objectives.token_cross_entropy import LossRule, TokenLoss
from train_loop.loop.reduction import PlainReduction
from train_loop.loop.session import Session
from train_loop.model.build import materialise
from train_loop.model.families.causal.family import CAUSAL
from train_loop.model.families.causal.probe import probe
from train_loop.model.folder import model_shape
from train_loop.optim import Ema
from train_loop.parallel.mesh import build_mesh
from train_loop.parallel.passes import parallelize
from train_loop.plan import plan_job
from train_loop.run import run
from train_loop.run_dir import RunDir, read_lines
from train_loop.spec import JobSpec

LENGTH, STEPS = 32, 5
# Dropout, which evaluation must switch off and training must keep.
CONFIG = TINY | {"attention_dropout": 0.3}
MESHES = {"fsdp": (0, 1), "fsdp x sp": (0, 2), "hsdp": (2, 1), "hsdp x sp": (2, 2), "sp": (0, 4)}
SAMPLES = {"a short last round": 13, "fewer samples than ranks": 3}


def packed(folder: Path, samples: int) -> Dataset:
    """Return samples of uneven length, with several documents in some and ignored labels in some."""
    draw = np.random.default_rng(samples)
    ids = [draw.integers(0, TINY["vocab_size"], draw.integers(5, LENGTH + 1)).tolist() for _ in range(samples)]
    labels = [[-100] * (i % 3) + row[i % 3 :] for i, row in enumerate(ids)]
    documents = [[len(row)] if i % 2 else [3, len(row) - 3] for i, row in enumerate(ids)]
    path = folder / f"{samples}.parquet"
    pq.write_table(pa.table({"input_ids": ids, "labels": labels, "documents": documents}), path)
    return parquet_dataset(path, length=LENGTH, tokens=sum(map(len, ids)), labels="labels", documents="documents")


def plainly(path: str) -> tuple[float, int]:
    """Return loss and tokens, computed document by document on an unmodified model."""
    parts = spec(model={"config": CONFIG}).model
    model: Any = CAUSAL.build(parts).model
    materialise(model, CAUSAL.build(parts), seed=0, device=torch.device("cpu"))
    model.eval()
    total, tokens = 0.0, 0
    for row in pq.read_table(path).to_pylist():
        start = 0
        for length in row["documents"]:
            ids, labels = (torch.tensor(row[name][start : start + length]) for name in ("input_ids", "labels"))
            with torch.no_grad():
                logits = model(input_ids=ids[None]).logits[0, :-1]
            total += F.cross_entropy(logits.double(), labels[1:], reduction="sum").item()
            tokens += int((labels[1:] != -100).sum())
            start += length
    return total / tokens, tokens


class EarlyLoss(TokenLoss):
    """A loss that notes whether the root unit is gathered, or being so, before each batch of an evaluation."""

    def evaluate(self, batch: MicroBatch) -> tuple[Tensor, Tensor, Tensor]:
        model: Any = self.anatomy.model
        group = model._get_fsdp_state()._fsdp_param_group
        assert group.is_unsharded or group._all_gather_result is not None, "a batch waits for its first gather"
        return super().evaluate(batch)


def evaluations(folder: Path, meshes: dict[str, tuple[int, int]]) -> dict[tuple[str, str], Evaluation]:
    """Evaluate every dataset at every mesh, twice."""
    found = {}
    for name, (fsdp, sp) in meshes.items():
        job = spec(
            model={"config": CONFIG, "dtype": "fp32", "gradient_checkpointing": "full"},
            strategy={"fsdp_size": fsdp, "ulysses_size": sp},
            scaling={"num_workers": dist.get_world_size()},
        )
        mesh = build_mesh(plan_job(job, model_shape(job.model)).mesh, torch.device("cpu"))
        anatomy, blueprint = CAUSAL.build(job.model), CAUSAL.build(job.model)
        parallelize(anatomy, mesh, job, probe(anatomy).attention)
        materialise(anatomy.model, blueprint, seed=0, device=mesh.device)
        for data, samples in SAMPLES.items():
            drawn = torch.get_rng_state()
            objective, dataset = EarlyLoss(anatomy, LossRule(z_loss=1.0)), packed(folder / str(mesh.rank), samples)
            result = evaluate(objective, dataset, PlainReduction(anatomy.model, mesh), per_device=2)
            assert isinstance(result, Evaluation)
            found[name, data] = result
            assert torch.equal(drawn, torch.get_rng_state())
        assert all(module.training for module in anatomy.model.modules())
        assert all(isinstance(p, DTensor) for p in anatomy.model.parameters()), "a unit stayed unsharded"
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for rank in range(4):
        (folder / str(rank)).mkdir()
    return folder


@pytest.fixture(scope="module")
def found(folder: Path) -> list[dict[tuple[str, str], Evaluation]]:
    """Return the results of four ranks, including those of a single rank."""
    alone = on_ranks(1, evaluations, folder, {"one rank": (0, 1)})[0]
    return [alone | rank for rank in on_ranks(4, evaluations, folder, MESHES)]


@pytest.mark.parametrize("data", SAMPLES)
@pytest.mark.parametrize("mesh", ["one rank", *MESHES])
def test_every_mesh_returns_the_plain_loss(found: Any, folder: Path, mesh: str, data: str) -> None:
    loss, tokens = plainly(str(folder / "0" / f"{SAMPLES[data]}.parquet"))
    for rank in found:
        metrics = rank[mesh, data].metrics
        assert metrics["tokens"] == tokens
        assert metrics["loss"] == pytest.approx(loss, rel=1e-6)
        assert metrics["perplexity"] == pytest.approx(np.exp(loss), rel=1e-5)
        assert metrics == found[0][mesh, data].metrics


def a_job(folder: Path, **parts: dict[str, Any]) -> JobSpec:
    data = {"train": {"path": str(folder / "train.parquet")}, "columns": {"input_ids": "ids"}, "packing": False}
    training = {"max_steps": STEPS, "global_batch_size": 4, "per_device_train_batch_size": 2, "logging_steps": 3}
    return spec(
        model={"config": CONFIG, "dtype": "fp32"},
        data=data | parts.get("data", {}),
        training=training | parts.get("training", {}),
        strategy={"ulysses_size": 2},
        scaling={"num_workers": 2},
    )


def train_with_and_without(folder: Path) -> None:
    """Train the same run with and without evaluations; start the second again after its end."""
    with_eval = a_job(
        folder, data={"eval": {"path": str(folder / "eval.parquet")}}, training={"eval_steps": 2, "logging_steps": 3}
    )
    averaged = a_job(
        folder, data={"eval": {"path": str(folder / "eval.parquet")}}, training={"eval_steps": 2, "ema_decay": 0.9}
    )
    each = a_job(folder, training={"logging_steps": 1})
    jobs = {"without": a_job(folder), "with": with_eval, "with, again": with_eval, "ema": averaged, "each": each}
    for name, job in jobs.items():
        run_dir = RunDir(folder / name.removesuffix(", again"))
        if dist.get_rank() == 0:
            # The run directory exists before a rank starts: no rank creates it.
            run_dir.write_spec(job)
        dist.barrier()
        session = Session(dist.get_rank(), dist.get_world_size(), 0, 1, run_dir, local_stream)
        run(job, session, folder / "no cache")
    stop_in_evaluation(with_eval, replace(session, run_dir=RunDir(folder / "stopped")), folder / "no cache")


def stop_in_evaluation(job: JobSpec, session: Session, cache: Path) -> None:
    """Pause a run in its first evaluation, and resume it twice: it is also paused in the evaluation that it repeats."""
    if session.rank == 0:
        session.run_dir.write_spec(job)
    dist.barrier()
    # The ranks look for requests before each of the two steps, and before each batch of the evaluation.
    for allowed in (3, 1):
        asked = count()
        stops = session.rank == 1
        session = replace(session, stop_requested=lambda a=asked, n=allowed, s=stops: s and next(a) >= n)  # type: ignore[misc]
        run(job, session, cache)
        # Rank 0 writes the outcome.
        dist.barrier()
        outcome = session.run_dir.attempt(1).outcome()
        assert outcome is not None
        assert (outcome.result, outcome.step, max(session.run_dir.manifests())) == ("paused", 2, 2)
    run(job, replace(session, stop_requested=lambda: False), cache)


def lines(folder: Path) -> dict[int, dict[str, Any]]:
    logged = list(read_lines(RunDir(folder).attempt(1).metrics))
    assert len({line["step"] for line in logged}) == len(logged), "a step was repeated"
    return {line["step"]: line for line in logged}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    write_tokens(folder / "train.parquet", rows=40, length=(9, 32), vocab=TINY["vocab_size"])
    write_tokens(folder / "eval.parquet", rows=7, length=(9, 32), vocab=TINY["vocab_size"])
    on_ranks(2, train_with_and_without, folder)
    return folder


def test_evaluation_leaves_training_unchanged(runs: Path) -> None:
    without, evaluated = lines(runs / "without"), lines(runs / "with")
    assert set(without) == {3, STEPS}
    for step, line in without.items():
        assert all(evaluated[step][name] == line[name] for name in ("loss", "grad_norm", "lr", "tokens")), step


def test_evaluated_step_is_logged_and_the_last_step_is_evaluated_once(runs: Path) -> None:
    found = lines(runs / "with")
    assert set(found) == {2, 3, 4, STEPS}
    assert {step for step, line in found.items() if "eval_loss" in line} == {2, 4, STEPS}
    last = found[STEPS]
    assert last["eval_perplexity"] == pytest.approx(np.exp(last["eval_loss"]))
    assert last["eval_loss"] != found[2]["eval_loss"], "identical weights were evaluated"
    rows = pq.read_table(runs / "eval.parquet")["ids"].to_pylist()
    assert last["eval_tokens"] == sum(len(row) - 1 for row in rows)
    assert last["eval_seconds"] > 0


def test_line_contains_the_mean_loss_since_the_previous_line(runs: Path) -> None:
    each, without, evaluated = (
        {n: line["loss"] for n, line in lines(runs / name).items()} for name in ("each", "without", "with")
    )
    assert len(set(each.values())) == STEPS
    assert without == {3: (each[1] + each[2] + each[3]) / 3, STEPS: (each[4] + each[5]) / 2}
    assert evaluated == without | {2: (each[1] + each[2]) / 2, 4: each[4]}
    # The value that keep_best compares.
    manifest = RunDir(runs / "without").checkpoint(STEPS) / "manifest.json"
    assert json.loads(manifest.read_text())["metrics"]["loss"] == without[STEPS]


def test_evaluation_uses_averaged_weights_and_leaves_training_unchanged(runs: Path) -> None:
    plain, averaged = lines(runs / "with"), lines(runs / "ema")
    for step, line in averaged.items():
        assert all(line[name] == plain[step][name] for name in ("loss", "grad_norm")), step
    assert all(averaged[step]["eval_loss"] != plain[step]["eval_loss"] for step in (2, 4, STEPS))


def averaged(dtype: str) -> dict[str, bool]:
    """Return facts about an evaluation whose averages differ from the weights."""
    job = spec(
        model={"config": TINY, "dtype": "fp32", "master_dtype": dtype}, scaling={"num_workers": dist.get_world_size()}
    )
    mesh = build_mesh(plan_job(job, model_shape(job.model)).mesh, torch.device("cpu"))
    anatomy, blueprint = CAUSAL.build(job.model), CAUSAL.build(job.model)
    model = anatomy.model
    parallelize(anatomy, mesh, job, probe(anatomy).attention)
    materialise(model, blueprint, seed=1, device=mesh.device)
    other = {name: p.detach().clone() for name, p in model.named_parameters()}
    materialise(model, blueprint, seed=0, device=mesh.device)
    average = Ema(model, 0.5)
    average.load(other)
    own = {name: p.detach().clone() for name, p in model.named_parameters()}
    means = {name: mean.clone() for name, mean in average.averages.items()}

    def equal(values: Mapping[str, Any], expected: Mapping[str, Any]) -> bool:
        return all(torch.equal(value.to_local(), expected[name].to_local()) for name, value in values.items())

    with average.applied():
        inside = equal(dict(model.named_parameters()), other)
    after = equal(dict(model.named_parameters()), own)
    return {"inside": inside, "weights after": after, "averages after": equal(average.averages, means)}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_averages_are_applied_and_weights_restored(dtype: str) -> None:
    for facts in on_ranks(2, averaged, dtype):
        assert facts == dict.fromkeys(facts, True)


def test_run_keeps_the_eval_data_of_its_start(runs: Path) -> None:
    pinned = pinned_dataset(
        a_job(runs, data={"train": {"path": str(runs / "eval.parquet")}}), RunDir(runs / "with").eval_data
    )
    assert pinned is not None
    assert pinned.samples == 7
    assert not RunDir(runs / "without").eval_data.exists()


def test_evaluation_that_a_pause_interrupts_is_repeated_by_the_resumed_run(runs: Path) -> None:
    expected, stopped = lines(runs / "with"), lines(runs / "stopped")
    names = ("loss", "grad_norm", "lr", "tokens", "eval_loss", "eval_perplexity", "eval_tokens")
    assert {step: [line.get(name) for name in names] for step, line in stopped.items()} == {
        step: [line.get(name) for name in names] for step, line in expected.items()
    }
