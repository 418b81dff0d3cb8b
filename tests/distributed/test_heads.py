"""Heads of labels: loss, gradients, evaluation and export equal those of transformers' own heads."""

import functools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoModelForTokenClassification

from tests.support.builders.specs import TINY, spec
from tests.support.ranks.first_step import step_and_evaluation
from tests.support.ranks.ranks import ranks_of_any_number, ranks_to_kill
from tests.support.ranks.torchrun import load_tensors
from tests.support.waiting import wait_for
from train_loop import train
from train_loop.checkpoint.export.huggingface import export
from train_loop.checkpoint.manifest import newest_verified
from train_loop.data.dataset import IGNORE, Rows
from train_loop.data.prepare.cache import evaluation_spec, find_dataset
from train_loop.data.prepare.pointer import pin
from train_loop.data.stream.local import StreamPlan, local_stream
from train_loop.loop.session import Session
from train_loop.model.build import materialise
from train_loop.model.families.causal.family import CAUSAL
from train_loop.plan import MeshPlan
from train_loop.run_dir import ExportWish, RunDir, read_lines
from train_loop.spec import JobSpec

LENGTH, ROWS, LABELS, STEPS = 16, 8, 3, 4
CONFIG = TINY | {"tie_word_embeddings": True}
HEADS: dict[str, dict[str, Any]] = {
    "sequence_classification": {"labels": LABELS},
    "regression": {},
    "token_classification": {"labels": LABELS},
}
KEPT = ("step", "loss", "grad_norm", "lr", "tokens", "eval_loss", "eval_accuracy", "eval_f1", "eval_mse", "eval_labels")
"""Fields that are equal in a replayed step."""
MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "HSDP 2 x 2": (4, {"fsdp_size": 2}),
    "Ulysses 2": (2, {"ulysses_size": 2}),
}
CASES = [(head, mesh) for head in HEADS for mesh in ("one rank", "HSDP 2 x 2")] + [
    ("token_classification", "Ulysses 2")
]


@pytest.fixture(scope="module")
def call_ranks() -> Iterator[Any]:
    with ranks_of_any_number(4) as call:
        yield call


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of any length, with a class, a number, and a class for some tokens; 7 for evaluations."""
    folder, draw = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    for name, rows in (("train", 4 * ROWS), ("eval", 7)):
        ids = [draw.integers(1, CONFIG["vocab_size"], n).astype(np.int32) for n in draw.integers(2, LENGTH + 1, rows)]
        tags = [np.where(draw.random(len(one)) < 0.3, IGNORE, draw.integers(0, LABELS, len(one))) for one in ids]
        table = {"ids": ids, "tags": tags, "class": draw.integers(0, LABELS, rows), "number": draw.normal(size=rows)}
        pq.write_table(pa.table(table), folder / f"{name}.parquet")
    return folder


def config_of(head: str) -> dict[str, Any]:
    return CONFIG | ({"classifier_dropout": 0.0} if head == "token_classification" else {})


def job_of(data: Path, head: str, world: int, **parts: dict[str, Any]) -> JobSpec:
    label = {"labels": "tags"} if head == "token_classification" else {"label": "class"}
    columns = {"input_ids": "ids"} | ({"label": "number"} if head == "regression" else label)
    sources = {name: {"path": str(data / f"{name}.parquet")} for name in ("train", "eval")}
    base: dict[str, dict[str, Any]] = {
        "model": {
            "config": config_of(head),
            "dtype": "fp32",
            "head": {head: HEADS[head]},
            "gradient_checkpointing": "none",
        },
        "data": sources | {"columns": columns, "packing": False, "sequence_length": LENGTH, "shuffle": False},
        "training": {"per_device_train_batch_size": 1, "global_batch_size": ROWS, "eval_steps": 2, "max_steps": STEPS},
        "scaling": {"num_workers": world},
    }
    return spec(**{name: base.get(name, {}) | parts.get(name, {}) for name in base | parts})


def its_model(job: JobSpec) -> Any:
    """Return transformers' own model with a head, with the weights that the loop draws."""
    head = job.model.label_head
    assert head is not None
    config = AutoConfig.for_model(**config_of(head.name), num_labels=head.labels, pad_token_id=0)
    config.problem_type = "regression" if head.classes is None else None
    auto = AutoModelForSequenceClassification if head.pools else AutoModelForTokenClassification
    ours = CAUSAL.build(job.model).model
    materialise(ours, CAUSAL.build(job.model), seed=0, device=torch.device("cpu"))
    model = auto.from_config(config)
    model.load_state_dict(ours.state_dict())
    return model


def call_of(table: pa.Table, head: str) -> dict[str, Tensor]:
    """Return the arguments of transformers' model for the rows of a table, padded on the right."""
    ids, tags = (
        torch.nn.utils.rnn.pad_sequence([torch.tensor(one) for one in table[name].to_pylist()], True, fill).long()
        for name, fill in (("ids", 0), ("tags", IGNORE))
    )
    labels = {
        "token_classification": tags,
        "sequence_classification": torch.tensor(table["class"].to_pylist()),
        "regression": torch.tensor(table["number"].to_pylist(), dtype=torch.float32),
    }
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels[head]}


def its_metrics(model: Any, data: Path, head: str) -> dict[str, float]:
    """Return the metrics of transformers' model on the eval data, by their textbook formulas."""
    arguments = call_of(pq.read_table(data / "eval.parquet"), head)
    with torch.no_grad():
        out = model.eval()(**arguments)
    if head == "regression":
        mse = F.mse_loss(out.logits.squeeze(-1), arguments["labels"]).item()
        return {"loss": mse, "mse": mse, "labels": 7}
    known = arguments["labels"] != IGNORE
    true, found = arguments["labels"][known], out.logits.argmax(-1)[known]
    f1 = []
    for label in sorted({*true.tolist(), *found.tolist()}):
        hits = int(((true == label) & (found == label)).sum())
        f1.append(2 * hits / int((true == label).sum() + (found == label).sum()))
    accuracy = (true == found).double().mean().item()
    return {"loss": out.loss.item(), "accuracy": accuracy, "f1": float(np.mean(f1)), "labels": len(true)}


@pytest.mark.parametrize(("head", "mesh"), CASES)
def test_head_equals_that_of_transformers(call_ranks: Any, data: Path, tmp_path: Path, head: str, mesh: str) -> None:
    world, strategy = MESHES[mesh]
    job = job_of(data, head, world, strategy=strategy)
    loss, gradients, found = call_ranks(world, step_and_evaluation, job, tmp_path)
    model = its_model(job)
    expected = model(**call_of(pq.read_table(data / "train.parquet")[:ROWS], head)).loss
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    own = dict(model.named_parameters())
    assert own.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert (gradient - own[name].grad).norm() <= 1e-5 * own[name].grad.norm(), name
    assert found.metrics == pytest.approx(its_metrics(model, data, head), rel=1e-5)


def run(job: JobSpec, folder: Path, *, hangs_at: int | None = None) -> None:
    """Run the loop in a folder; it waits forever for the rows after step `hangs_at`."""

    def stream(plan: StreamPlan, mesh: MeshPlan, rank: int) -> Iterator[Rows | None]:
        for step, rows in enumerate(local_stream(plan, mesh, rank), start=plan.start // ROWS):
            while step == hangs_at:
                time.sleep(1)
            yield rows

    session = Session(dist.get_rank(), dist.get_world_size(), 0, 1, RunDir(folder), stream)
    dataset = find_dataset(job, folder)
    of_eval = evaluation_spec(job, dataset)
    assert of_eval is not None
    if session.rank == 0:
        session.run_dir.write_spec(job)
        pin(dataset, session.run_dir.data)
    train.train(job, session, dataset, find_dataset(of_eval, folder))


def history(run_dir: RunDir) -> list[dict[str, Any]]:
    """Return the logged steps, without times."""
    lines = read_lines(run_dir.attempt(1).metrics)
    return [{name: value for name, value in line.items() if name in KEPT} for line in lines]


@pytest.mark.parametrize("head", HEADS)
def test_export_is_transformers_model_with_the_metrics_of_the_run(
    call_ranks: Any, data: Path, tmp_path: Path, head: str
) -> None:
    job, run_dir = job_of(data, head, 2, checkpoint={"every_steps": 2}), RunDir(tmp_path / "run")
    call_ranks(2, run, job, run_dir.root)
    folder = export(run_dir, STEPS, ExportWish(dtype="fp32"))
    auto = AutoModelForTokenClassification if head == "token_classification" else AutoModelForSequenceClassification
    model = auto.from_pretrained(folder, pad_token_id=0)
    assert model.config.num_labels == HEADS[head].get("labels", 1)
    kinds = {"sequence_classification": "single_label_classification", "regression": "regression"}
    assert model.config.problem_type == kinds.get(head)
    last = history(run_dir)[-1]
    for name, value in its_metrics(model, data, head).items():
        assert last[f"eval_{name}"] == pytest.approx(value, rel=1e-5)


def test_killed_run_resumes_with_the_same_bits(call_ranks: Any, data: Path, tmp_path: Path) -> None:
    """Labels of tokens also have dropout before their head."""
    job = job_of(data, "token_classification", 2, checkpoint={"every_steps": 2})
    job = job.model_copy(update={"model": job.model.model_copy(update={"config": CONFIG})})
    whole, killed = RunDir(tmp_path / "whole"), RunDir(tmp_path / "killed")
    with ranks_to_kill(2, functools.partial(run, hangs_at=3), job, killed.root) as ranks:
        wait_for(
            lambda: len(history(killed)) == 3 and newest_verified(killed)[0], "step 3 and the checkpoint of step 2"
        )
        for rank in ranks:
            rank.kill()
    for run_dir in (whole, killed):
        call_ranks(2, run, job, run_dir.root)
    assert [line["step"] for line in history(killed)] == [1, 2, 3, 3, 4]
    assert history(killed)[:2] + history(killed)[3:] == history(whole)
    expected, found = (load_tensors(one.root, STEPS) for one in (whole, killed))
    assert expected.keys() == found.keys()
    assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == []
