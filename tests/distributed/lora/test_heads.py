"""Heads of labels with adapters: all that begins random is trained, exported, and read by stock peft."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import peft
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from tests.support import textbook
from tests.support.builders.datasets import prepare_tokens
from tests.support.builders.folders import write_model
from tests.support.builders.searches import drawn
from tests.support.builders.specs import spec
from tests.support.families.encoders import FAMILIES, OTHERS
from tests.support.ranks.first_step import step_and_evaluation
from train_loop import train
from train_loop.checkpoint.export.huggingface import export
from train_loop.data.dataset import IGNORE
from train_loop.data.prepare.cache import evaluation_spec, find_dataset
from train_loop.data.prepare.pointer import pin
from train_loop.data.stream.local import local_stream
from train_loop.loop.session import Session
from train_loop.model.lora.peft_config import with_adapter
from train_loop.run_dir import ExportWish, RunDir, read_lines
from train_loop.spec import JobSpec, override

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # peft reads a deprecated property
CallRanks = Callable[..., Any]
LENGTH, ROWS, STEPS, LABELS = 24, 4, 2, 3
ADAPTER, MERGED = (ExportWish(dtype="fp32", form=form) for form in ("adapter", "merged"))
CLASSES = {"sequence_classification": {"labels": LABELS}}
ENCODERS = FAMILIES | OTHERS
REFUSED = ("gte", "ibert", "jina_embeddings_v3", "neomme", "nomic_bert")
"""Encoders without a head of classes, without linear layers, or whose folders of transformers are not read."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of any length with labels of each kind."""
    folder, draw = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    for name, rows in (("train", STEPS * ROWS), ("eval", 5)):
        ids = [draw.integers(5, 50, n).astype(np.int32) for n in draw.integers(4, LENGTH // 2, rows)]
        tags = [np.where(draw.random(len(one)) < 0.3, IGNORE, draw.integers(0, LABELS, len(one))) for one in ids]
        table = {"ids": ids, "tags": tags, "class": draw.integers(0, LABELS, rows), "number": draw.normal(size=rows)}
        pq.write_table(pa.table(table | {"other": ids[::-1]}), folder / f"{name}.parquet")
    return folder


def job_of(data: Path, base: Path, head: Any, columns: dict[str, Any], world: int = 1, **model: Any) -> JobSpec:
    sources = {name: {"path": str(data / f"{name}.parquet")} for name in ("train", "eval")}
    model = {"lora": {"r": 2, "alpha": 4}} | model
    return spec(
        model={"config": None, "path": str(base), "dtype": "fp32", "head": head, "gradient_checkpointing": "none"}
        | model,
        data=sources | {"columns": columns, "packing": False, "sequence_length": LENGTH, "shuffle": False},
        training={"per_device_train_batch_size": 2, "global_batch_size": ROWS, "eval_steps": STEPS}
        | {"max_steps": STEPS, "learning_rate": 3e-2, "lr_scheduler_type": "constant"},
        scaling={"num_workers": world},
    )


def run(job: JobSpec, folder: Path) -> None:
    session = Session(dist.get_rank(), dist.get_world_size(), 0, 1, RunDir(folder), local_stream)
    dataset = find_dataset(job, folder)
    of_eval = evaluation_spec(job, dataset)
    assert of_eval is not None
    if session.rank == 0:
        session.run_dir.write_spec(job)
        pin(dataset, session.run_dir.data)
    train.train(job, session, dataset, find_dataset(of_eval, folder))


def trained(call_ranks: CallRanks, job: JobSpec, folder: Path) -> dict[str, float]:
    """Train, and return the last evaluation."""
    prepare_tokens(job, folder)
    call_ranks(job.scaling.num_workers, run, job, folder)
    last = list(read_lines(RunDir(folder).attempt(1).metrics))[-1]
    return {name.removeprefix("eval_"): value for name, value in last.items() if name.startswith("eval_")}


def padded(rows: list[list[int]], fill: int = 0) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(one) for one in rows], True, fill).long()


@torch.no_grad()
def logits(model: Any, data: Path) -> Tensor:
    """Return the logits of the eval rows, one after another, as a user computes them."""
    rows = pq.read_table(data / "eval.parquet")["ids"].to_pylist()
    found = [model.eval()(input_ids=torch.tensor([row]))[0] for row in rows]
    return torch.cat([one.flatten(0, -2) for one in found])


def continue_at_each_seed(call_ranks: CallRanks, job: JobSpec, adapter: Path, loss: float) -> None:
    """Continue from exported adapters, with the settings of their run kept: the first evaluation is its last one."""
    for seed in (0, 7):
        parts = {"model": {"adapter": str(adapter)}, "training": {"seed": seed}}
        again = with_adapter(override(job, parts)).run
        _, _, evaluation = call_ranks(1, step_and_evaluation, again, adapter.parents[1])
        assert evaluation.metrics["loss"] == pytest.approx(loss, rel=1e-6)


def write_encoder(folder: Path, family: str) -> Path:
    """Write a masked language model whose padding token is none of the rows."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{"vocab_size": 60, "pad_token_id": 1} | ENCODERS[family])
    AutoModelForMaskedLM.from_config(config).save_pretrained(folder)
    return folder


def write_decoder(folder: Path, family: str) -> Path:
    return write_model(folder, model_type=family, vocab_size=60, pad_token_id=0)


@pytest.mark.parametrize(
    "family", ["bert", "roberta", "distilbert", *drawn([name for name in OTHERS if name not in REFUSED], 2)]
)
def test_stock_peft_has_the_run_of_an_encoder(call_ranks: CallRanks, data: Path, tmp_path: Path, family: str) -> None:
    base = write_encoder(tmp_path / "base", family)
    job = job_of(data, base, CLASSES, {"input_ids": "ids", "label": "class"})
    found = trained(call_ranks, job, tmp_path / "run")
    folder = export(RunDir(tmp_path / "run"), STEPS, ADAPTER)
    torch.manual_seed(7)
    auto = peft.AutoPeftModelForSequenceClassification.from_pretrained(str(folder), num_labels=LABELS)
    plain = AutoModelForSequenceClassification.from_pretrained(base, num_labels=LABELS)
    merged = AutoModelForSequenceClassification.from_pretrained(export(RunDir(tmp_path / "run"), STEPS, MERGED))
    labels = torch.tensor(pq.read_table(data / "eval.parquet")["class"].to_pylist())
    for model in (auto, peft.PeftModel.from_pretrained(plain, str(folder)), merged):
        metrics = textbook.classes(logits(model, data), labels).metrics
        assert metrics == pytest.approx({name: found[name] for name in metrics}, rel=1e-5, abs=1e-6)
    continue_at_each_seed(call_ranks, job, folder, found["loss"])


class Task(NamedTuple):
    """A head of a family, the classes that load its adapters and its merged model, and its columns."""

    family: str
    head: Any
    peft: Any
    auto: Any
    columns: dict[str, Any]
    labels: int | None = None


IDS = {"input_ids": "ids"}
PAIR = {"token_ids": True, "prompt": "other", "chosen": "ids", "rejected": "other"}
ANCHOR = {"token_ids": True, "anchor": "ids", "positive": "other"}
EMBEDDING = {"embedding": {"group": 2, "pooling": "mean"}}
MASKED = {"masked_lm": {"mask_token": 4, "special_tokens": [1, 4]}}
ROWS_OF, TOKENS_OF = peft.AutoPeftModelForSequenceClassification, peft.AutoPeftModelForTokenClassification
TASKS = {
    "regression": Task(
        "bert", {"regression": {}}, ROWS_OF, AutoModelForSequenceClassification, IDS | {"label": "number"}, 1
    ),
    "token_classification": Task(
        "distilbert",
        {"token_classification": {"labels": LABELS}},
        TOKENS_OF,
        AutoModelForTokenClassification,
        IDS | {"labels": "tags"},
        LABELS,
    ),
    "reward": Task("qwen3", {"reward": {}}, ROWS_OF, AutoModelForSequenceClassification, PAIR, 1),
    "reward of an encoder": Task("roberta", {"reward": {}}, ROWS_OF, AutoModelForSequenceClassification, PAIR, 1),
    "embedding": Task("bert", EMBEDDING, peft.AutoPeftModelForFeatureExtraction, AutoModel, ANCHOR),
    "embedding of a decoder": Task("qwen3", EMBEDDING, peft.AutoPeftModelForFeatureExtraction, AutoModel, ANCHOR),
    "masked_lm": Task("bert", MASKED, peft.AutoPeftModel, AutoModelForMaskedLM, IDS),
    "causal_lm": Task("qwen3", "causal_lm", peft.AutoPeftModelForCausalLM, AutoModelForCausalLM, IDS),
}


@pytest.mark.parametrize("name", TASKS)
def test_auto_class_of_a_task_loads_its_adapters(call_ranks: CallRanks, data: Path, tmp_path: Path, name: str) -> None:
    task = TASKS[name]
    is_encoder = task.family in ENCODERS
    base = (write_encoder if is_encoder else write_decoder)(tmp_path / "base", task.family)
    job = job_of(data, base, task.head, task.columns)
    found = trained(call_ranks, job, tmp_path / "run")
    run_dir = RunDir(tmp_path / "run")
    adapter, merged = (export(run_dir, STEPS, wish) for wish in (ADAPTER, MERGED))
    torch.manual_seed(7)
    model = task.peft.from_pretrained(str(adapter), **({"num_labels": task.labels} if task.labels else {}))
    whole = task.auto.from_pretrained(merged)
    torch.testing.assert_close(logits(model, data), logits(whole, data), rtol=1e-5, atol=1e-5)
    assert any(name.endswith("lora_B.default.weight") and one.any() for name, one in model.named_parameters())
    continue_at_each_seed(call_ranks, job, adapter, found["loss"])
