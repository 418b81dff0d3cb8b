"""Heads: loss, gradients, evaluation and export equal those of transformers' own models.

They are compared on one rank. `tests/families/test_conformance.py` compares meshes with it, for some heads in each run.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, AutoModelForTokenClassification

from tests.support import textbook
from tests.support.builders.datasets import prepare_tokens
from tests.support.builders.specs import TINY, spec
from tests.support.families.families import small
from tests.support.ranks.first_step import step_and_evaluation
from tests.support.ranks.ranks import ranks_of_any_number
from tests.support.textbook import Result
from train_loop import train
from train_loop.checkpoint.export.huggingface import export
from train_loop.data.dataset import IGNORE
from train_loop.data.prepare.cache import evaluation_spec, find_dataset
from train_loop.data.prepare.pointer import pin
from train_loop.data.stream.local import local_stream
from train_loop.loop.session import Session
from train_loop.model.build import materialise
from train_loop.model.families.choose import family_of
from train_loop.run_dir import ExportWish, RunDir, read_lines
from train_loop.spec import JobSpec

LENGTH, ROWS, STEPS, LABELS = 16, 8, 4, 3
EVAL_ROWS = 7
"""Not a multiple of a batch, and of a group."""
CENTER, GROUP, TEMPERATURE = 0.05, 2, 0.1
CONFIG = TINY | {"tie_word_embeddings": True}
ENCODER = small("bert") | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
UNEQUAL = ("seq", "time", "_seconds", "_per_second", "_bytes", "slowest_rank", "mfu")
"""Parts of the names of fields that differ in a replayed step."""


@torch.no_grad()
def metrics_of(head: str, model: Any, data: Path) -> dict[str, float]:
    """Return the metrics of transformers' model on the eval data."""
    return HEADS[head].plain(model.eval(), pq.read_table(data / "eval.parquet")).metrics


def padded(rows: list[list[int]], fill: int = 0) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(one) for one in rows], True, fill).long()


def call(model: Any, rows: list[list[int]]) -> Any:
    """Call transformers' model with rows, padded on the right."""
    ids = padded(rows)
    return model(input_ids=ids, attention_mask=(ids != 0).long())[0]


def of_rows(model: Any, table: pa.Table) -> Result:
    return textbook.classes(call(model, table["ids"].to_pylist()), torch.tensor(table["class"].to_pylist()))


def of_numbers(model: Any, table: pa.Table) -> Result:
    labels = torch.tensor(table["number"].to_pylist(), dtype=torch.float32)
    return textbook.numbers(call(model, table["ids"].to_pylist()).squeeze(-1), labels)


def of_tokens(model: Any, table: pa.Table) -> Result:
    tags = padded(table["tags"].to_pylist(), IGNORE)
    return textbook.classes(call(model, table["ids"].to_pylist())[tags != IGNORE], tags[tags != IGNORE])


def of_rewards(model: Any, table: pa.Table) -> Result:
    prompts = table["prompt"].to_pylist()
    chosen, rejected = (
        call(model, [a + b for a, b in zip(prompts, table[name].to_pylist(), strict=True)]).squeeze(-1)
        for name in ("chosen", "rejected")
    )
    margins = torch.tensor(table["number"].to_pylist(), dtype=torch.float32)
    return textbook.rewards(chosen, rejected, margins=margins, center=CENTER)


def of_texts(
    names: tuple[str, ...], pooling: str, *, normalize: bool = True, temperature: float = TEMPERATURE
) -> Callable[[Any, pa.Table], Result]:
    def plain(model: Any, table: pa.Table) -> Result:
        rows = [table[name].to_pylist() for name in names]
        anchors, *texts = (
            textbook.embeddings(call(model, one), padded(one) != 0, pooling, normalize=normalize) for one in rows
        )
        return textbook.recalls(anchors, texts, group=GROUP, temperature=temperature)

    return plain


class Head(NamedTuple):
    """A head in a spec, its columns, and its plain loss and metrics."""

    spec: Mapping[str, Any]
    columns: Mapping[str, Any]
    plain: Callable[[Any, pa.Table], Result]
    exported: Any = AutoModelForSequenceClassification
    config: Mapping[str, Any] = CONFIG
    problem_type: str | None = None


_IDS, _EMBEDDING = {"input_ids": "ids"}, {"temperature": TEMPERATURE, "group": GROUP}
_PAIR = {"anchor": "prompt", "positive": "chosen", "token_ids": True}
_UNSCALED = {"pooling": "mean", "normalize": False, "temperature": 20.0}
HEADS = {
    "sequence_classification": Head(
        {"sequence_classification": {"labels": LABELS}},
        _IDS | {"label": "class"},
        of_rows,
        problem_type="single_label_classification",
    ),
    "regression": Head({"regression": {}}, _IDS | {"label": "number"}, of_numbers, problem_type="regression"),
    "token_classification": Head(
        {"token_classification": {"labels": LABELS}},
        _IDS | {"labels": "tags"},
        of_tokens,
        AutoModelForTokenClassification,
    ),
    "reward": Head(
        {"reward": {"center_rewards_coefficient": CENTER}},
        {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected", "margin": "number", "token_ids": True},
        of_rewards,
    ),
    "last_token": Head({"embedding": _EMBEDDING}, _PAIR, of_texts(("prompt", "chosen"), "last_token"), AutoModel),
    "mean": Head(
        {"embedding": _EMBEDDING | _UNSCALED},
        _PAIR | {"negatives": ["rejected", "other"]},
        of_texts(("prompt", "chosen", "rejected", "other"), "mean", normalize=False, temperature=20.0),
        AutoModel,
    ),
    "cls": Head(
        {"embedding": _EMBEDDING | {"pooling": "cls"}},
        _PAIR | {"negatives": ["rejected"]},
        of_texts(("prompt", "chosen", "rejected"), "cls"),
        AutoModel,
        ENCODER,
    ),
}


@pytest.fixture(scope="module")
def call_ranks() -> Iterator[Any]:
    with ranks_of_any_number(2) as call:
        yield call


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of any length with labels of each kind, and texts that belong together."""
    folder, draw = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    vocabulary = min(CONFIG["vocab_size"], ENCODER["vocab_size"])

    def texts(least: int, most: int, rows: int) -> list[Any]:
        return [draw.integers(1, vocabulary, n).astype(np.int32) for n in draw.integers(least, most + 1, rows)]

    for name, rows in (("train", 4 * ROWS), ("eval", EVAL_ROWS)):
        sizes = {"ids": (2, LENGTH), "prompt": (1, 5), "chosen": (1, 11), "rejected": (1, 11), "other": (1, LENGTH)}
        table: dict[str, Any] = {column: texts(*size, rows) for column, size in sizes.items()}
        tags = [
            np.where(draw.random(len(one)) < 0.3, IGNORE, draw.integers(0, LABELS, len(one))) for one in table["ids"]
        ]
        table |= {"tags": tags, "class": draw.integers(0, LABELS, rows), "number": draw.normal(size=rows)}
        pq.write_table(pa.table(table), folder / f"{name}.parquet")
    return folder


def job_of(data: Path, head: str, world: int, **config: Any) -> JobSpec:
    one = HEADS[head]
    sources = {name: {"path": str(data / f"{name}.parquet")} for name in ("train", "eval")}
    return spec(
        model={"config": {**one.config, **config}, "dtype": "fp32", "head": one.spec, "gradient_checkpointing": "none"},
        data=sources | {"columns": one.columns, "packing": False, "sequence_length": LENGTH, "shuffle": False},
        training={"per_device_train_batch_size": 2, "global_batch_size": ROWS, "eval_steps": 2, "max_steps": STEPS},
        checkpoint={"every_steps": 2},
        scaling={"num_workers": world},
    )


def its_model(job: JobSpec, head: str) -> Any:
    """Return transformers' own model with the weights that the loop draws."""
    family, labels = family_of(job), job.model.label_head
    assert labels is not None
    ours = family.build(job.model).model
    materialise(ours, family.build(job.model), seed=0, device=torch.device("cpu"))
    its = {"num_labels": labels.labels} if labels.labels else {}
    config = AutoConfig.for_model(**{**(job.model.config or {}), **its, "pad_token_id": 0})
    model = HEADS[head].exported.from_config(config)
    model.load_state_dict(ours.state_dict(), strict=head != "cls")  # BERT's pooler is for another task
    return model


@pytest.mark.parametrize("head", HEADS)
def test_loss_gradients_and_evaluation_equal_a_plain_loop(
    call_ranks: Any, data: Path, tmp_path: Path, head: str
) -> None:
    job = job_of(data, head, 1, **({"classifier_dropout": 0.0} if head == "token_classification" else {}))
    prepare_tokens(job, tmp_path)
    loss, gradients, found = call_ranks(1, step_and_evaluation, job, tmp_path)
    model = its_model(job, head)
    expected = HEADS[head].plain(model, pq.read_table(data / "train.parquet")[:ROWS]).losses.mean()
    torch.autograd.backward(expected)
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    own = {name: one for name, one in model.named_parameters() if not name.startswith("pooler.")}
    assert own.keys() == gradients.keys()
    for name, gradient in gradients.items():
        # A bias of BERT's keys has no gradient but rounding: softmax ignores it.
        assert (gradient - own[name].grad).norm() <= 1e-5 * own[name].grad.norm() + 1e-9, name
    assert found.metrics == pytest.approx(metrics_of(head, model, data), rel=1e-5, abs=1e-6)


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


@pytest.mark.parametrize("head", [head for head in HEADS if head != "last_token"])
def test_run_resumes_with_the_same_bits_and_exports_the_model_of_transformers(
    call_ranks: Any, data: Path, tmp_path: Path, head: str
) -> None:
    """A head of tokens also has dropout."""
    job, run_dir = job_of(data, head, 2), RunDir(tmp_path / "run")
    prepare_tokens(job, run_dir.root)
    for _ in range(2):
        call_ranks(2, run, job, run_dir.root)
        folder = export(run_dir, STEPS, ExportWish(dtype="fp32"))
        shutil.rmtree(run_dir.checkpoint(STEPS))
    lines = list(read_lines(run_dir.attempt(1).metrics))
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 3, 4]
    replayed = [{n: v for n, v in line.items() if not any(part in n for part in UNEQUAL)} for line in lines]
    assert replayed[2:4] == replayed[4:]
    model = HEADS[head].exported.from_pretrained(folder, pad_token_id=0)
    assert model.config.problem_type == HEADS[head].problem_type
    for name, value in metrics_of(head, model, data).items():
        assert lines[-1][f"eval_{name}"] == pytest.approx(value, rel=1e-5, abs=1e-6)
    if head == "mean":
        modules = json.loads((folder / "modules.json").read_text())
        assert [one["path"] for one in modules] == ["", "1_Pooling"]
        assert json.loads((folder / "1_Pooling/config.json").read_text())["pooling_mode_mean_tokens"] is True
