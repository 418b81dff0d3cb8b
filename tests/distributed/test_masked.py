"""Masked language models: loss, gradients, evaluation and export equal those of transformers' own models.

They are compared on one rank, and with `MORE=1` on others. Some runs of `tests/families/test_conformance.py` compare
meshes.
"""

import os
import shutil
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
from transformers import AutoConfig, AutoModelForMaskedLM

from tests.support.builders.specs import spec
from tests.support.families.encoders import FAMILIES, OTHERS
from tests.support.ranks.first_step import step_and_evaluation
from tests.support.ranks.ranks import ranks_of_any_number
from train_loop import train
from train_loop.checkpoint.export.huggingface import export
from train_loop.data.masking import EVALUATION, mask_rows
from train_loop.data.prepare.cache import evaluation_spec, find_dataset
from train_loop.data.prepare.pointer import pin
from train_loop.data.stream.local import local_stream, read_rows
from train_loop.loop.session import Session
from train_loop.model.build import materialise
from train_loop.model.families.masked import MASKED
from train_loop.run_dir import ExportWish, RunDir, read_lines
from train_loop.spec import JobSpec

MORE = bool(os.environ.get("MORE"))
LENGTH, ROWS, STEPS, VOCABULARY = 16, 8, 6, 60
CASES: list[tuple[str, dict[str, int], dict[str, int]]] = [
    (name, {"num_workers": world}, {}) for name in FAMILIES for world in ((1, 2) if MORE else (1,))
]
CASES += [(name, {"num_workers": 2}, {}) for name in OTHERS] if MORE else []
CASES += [(name, {"num_workers": 4}, {"fsdp_size": 2}) for name in FAMILIES] if MORE else []
KEPT = ("loss", "grad_norm", "lr", "tokens", "eval_loss", "eval_accuracy", "eval_perplexity", "eval_tokens")
"""Fields that are equal in a replayed step."""


@pytest.fixture(scope="module")
def call_ranks() -> Iterator[Any]:
    with ranks_of_any_number(4 if MORE else 2) as call:
        yield call


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of any length between CLS (2) and SEP (3); 7 for evaluations."""
    folder, draw = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    for name, rows in (("train", 2 * ROWS), ("eval", 7)):
        inner = [draw.integers(5, VOCABULARY, n) for n in draw.integers(4, LENGTH - 1, rows)]
        ids = [np.array([2, *one, 3], np.int32) for one in inner]
        pq.write_table(pa.table({"ids": ids}), folder / f"{name}.parquet")
    return folder


def config_of(family: str) -> dict[str, Any]:
    return {"model_type": family, "vocab_size": VOCABULARY} | (FAMILIES | OTHERS)[family]


def job_of(data: Path, family: str, scaling: dict[str, Any], **parts: dict[str, Any]) -> JobSpec:
    sources = {name: {"path": str(data / f"{name}.parquet")} for name in ("train", "eval")}
    base: dict[str, dict[str, Any]] = {
        "model": {
            "config": config_of(family),
            "dtype": "fp32",
            "head": {"masked_lm": {"probability": 0.3, "mask_token": 4, "special_tokens": [0, 1, 2, 3]}},
        },
        "data": sources | {"columns": {"input_ids": "ids"}, "packing": False, "sequence_length": LENGTH},
        "training": {"per_device_train_batch_size": 2, "global_batch_size": ROWS, "eval_steps": 3, "max_steps": STEPS}
        | {"audit_samples": True},
        "scaling": scaling,
    }
    return spec(**{name: base.get(name, {}) | parts.get(name, {}) for name in base | parts})


def its_model(job: JobSpec) -> Any:
    """Return transformers' own model, with the weights that the loop draws."""
    ours, blueprint = (MASKED.build(job.model) for _ in range(2))
    materialise(ours.model, blueprint, seed=0, device=torch.device("cpu"))
    model = AutoModelForMaskedLM.from_config(AutoConfig.for_model(**job.model.config or {}))
    model.load_state_dict(ours.model.state_dict())
    return model.train()


def call_of(job: JobSpec, folder: Path, samples: list[int], epoch: int) -> dict[str, Tensor]:
    """Return the arguments of transformers' model for some samples."""
    rows = mask_rows(read_rows(dataset := find_dataset(job, folder), np.array(samples)), dataset, epoch)
    assert rows is not None
    ids, labels = (torch.from_numpy(one).long() for one in (rows.input_ids, rows.labels))
    mask = (torch.arange(LENGTH) < torch.from_numpy(rows.lengths)[:, None]).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def its_metrics(model: Any, arguments: dict[str, Tensor]) -> dict[str, float]:
    with torch.no_grad():
        out = model.eval()(**arguments)
    known = arguments["labels"] != -100
    right = out.logits.argmax(-1)[known] == arguments["labels"][known]
    loss, count = out.loss.item(), int(known.sum())
    return {"loss": loss, "perplexity": np.exp(loss), "accuracy": right.double().mean().item(), "tokens": count}


@pytest.mark.parametrize(("family", "scaling", "strategy"), CASES)
def test_masked_model_equals_that_of_transformers(
    call_ranks: Any, data: Path, tmp_path: Path, family: str, scaling: dict[str, Any], strategy: dict[str, Any]
) -> None:
    job = job_of(data, family, scaling, strategy=strategy)
    loss, gradients, found = call_ranks(scaling["num_workers"], step_and_evaluation, job, tmp_path)
    model = its_model(job)
    expected = model(**call_of(job, tmp_path, [*range(ROWS)], 0)).loss
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    own = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    largest = max(gradient.norm() for gradient in own.values())
    assert own.keys() == gradients.keys()
    for name, gradient in gradients.items():
        # Biases of keys have no effect: their gradients are rounding.
        assert (gradient - own[name]).norm() <= 1e-5 * max(own[name].norm(), 1e-2 * largest), name
    of_eval = evaluation_spec(job, find_dataset(job, tmp_path))
    assert of_eval is not None
    assert found.metrics == pytest.approx(
        its_metrics(model, call_of(of_eval, tmp_path, [*range(7)], EVALUATION)), rel=1e-5
    )


def run(job: JobSpec, folder: Path) -> None:
    """Run the loop in a folder."""
    session = Session(dist.get_rank(), dist.get_world_size(), 0, 1, RunDir(folder), local_stream)
    dataset = find_dataset(job, folder)
    of_eval = evaluation_spec(job, dataset)
    assert of_eval is not None
    if session.rank == 0:
        session.run_dir.write_spec(job)
        pin(dataset, session.run_dir.data)
    train.train(job, session, dataset, find_dataset(of_eval, folder))


@pytest.mark.parametrize("family", FAMILIES if MORE else ["modernbert"])
def test_run_resumes_with_the_same_bits_and_its_export_is_transformers_model(
    call_ranks: Any, data: Path, tmp_path: Path, family: str
) -> None:
    job, run_dir = job_of(data, family, {"num_workers": 2}, checkpoint={"every_steps": 3}), RunDir(tmp_path / "run")
    for _ in range(2):
        call_ranks(2, run, job, run_dir.root)
        folder = export(run_dir, STEPS, ExportWish(dtype="fp32"))
        shutil.rmtree(run_dir.checkpoint(STEPS))
    lines = list(read_lines(run_dir.attempt(1).metrics))
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6, 4, 5, 6]
    same = [{name: value for name, value in line.items() if name in KEPT} for line in lines]
    assert same[3:6] == same[6:]
    model, info = AutoModelForMaskedLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    # Step 4 trains the rows of the second epoch with the weights of step 3.
    before = AutoModelForMaskedLM.from_pretrained(export(run_dir, 3, ExportWish(dtype="fp32")))
    of_epoch = [its_metrics(before, call_of(job, tmp_path, lines[3]["samples"], epoch))["loss"] for epoch in (0, 1)]
    assert lines[3]["loss"] == pytest.approx(of_epoch[1], rel=1e-5)
    assert lines[3]["loss"] != pytest.approx(of_epoch[0], rel=1e-3)
    of_eval = evaluation_spec(job, find_dataset(job, tmp_path))
    assert of_eval is not None
    expected = its_metrics(model, call_of(of_eval, tmp_path, [*range(7)], EVALUATION))
    assert {name: lines[-1][f"eval_{name}"] for name in expected} == pytest.approx(expected, rel=1e-5)
