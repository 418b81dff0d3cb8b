"""Objectives of sequences that stay together: loss, gradients, evaluation and export equal plain transformers loops."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

from tests.distributed.test_heads import CONFIG, LENGTH, ROWS, STEPS, run
from tests.support.builders.datasets import prepare_tokens
from tests.support.builders.families import small
from tests.support.builders.specs import spec
from tests.support.ranks.first_step import step_and_evaluation
from tests.support.ranks.ranks import ranks_of_any_number
from train_loop.checkpoint.export.huggingface import export
from train_loop.model.build import materialise
from train_loop.model.families.choose import family_of
from train_loop.run_dir import ExportWish, RunDir, read_lines
from train_loop.spec import JobSpec

CENTER, GROUP, TEMPERATURE = 0.05, 2, 0.1
EVAL_ROWS = 7
"""Not a multiple of the group, and of a batch of two ranks."""
EMBEDDING = {"temperature": TEMPERATURE, "group": GROUP}
HEADS: dict[str, dict[str, Any]] = {
    "reward": {"reward": {"center_rewards_coefficient": CENTER}},
    "last_token": {"embedding": EMBEDDING},
    "mean": {"embedding": EMBEDDING | {"pooling": "mean", "normalize": False, "temperature": 20.0}},
    "cls": {"embedding": EMBEDDING | {"pooling": "cls"}},
}
ENCODER = small("bert") | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
CONFIGS = dict.fromkeys(HEADS, CONFIG) | {"cls": ENCODER}
COLUMNS: dict[str, dict[str, Any]] = {
    "reward": {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected", "margin": "margin"},
    "last_token": {"anchor": "prompt", "positive": "chosen"},
    "mean": {"anchor": "prompt", "positive": "chosen", "negatives": ["rejected", "other"]},
    "cls": {"anchor": "prompt", "positive": "chosen", "negatives": ["rejected"]},
}
KEPT = {"loss", "grad_norm", "tokens", "accuracy", "recall_at_1"}

Losses = Callable[[Any, pa.Table, str], tuple[Tensor, dict[str, Tensor]]]


@pytest.fixture(scope="module")
def call_ranks() -> Iterator[Any]:
    with ranks_of_any_number(2) as call:
        yield call


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token ids of texts of any length that belong together, with a margin."""
    folder, draw = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    for name, rows in (("train", 4 * ROWS), ("eval", EVAL_ROWS)):
        table: dict[str, Any] = {
            column: [
                draw.integers(1, min(CONFIG["vocab_size"], ENCODER["vocab_size"]), n).astype(np.int32)
                for n in draw.integers(1, most, rows)
            ]
            for column, most in (("prompt", 6), ("chosen", 12), ("rejected", 12), ("other", 17))
        }
        pq.write_table(pa.table(table | {"margin": draw.normal(size=rows)}), folder / f"{name}.parquet")
    return folder


def job_of(data: Path, head: str, world: int, **parts: dict[str, Any]) -> JobSpec:
    sources = {name: {"path": str(data / f"{name}.parquet")} for name in ("train", "eval")}
    columns = COLUMNS[head] | {"token_ids": True}
    base: dict[str, dict[str, Any]] = {
        "model": {"config": CONFIGS[head], "dtype": "fp32", "head": HEADS[head], "gradient_checkpointing": "none"},
        "data": sources | {"columns": columns, "packing": False, "sequence_length": LENGTH, "shuffle": False},
        "training": {"per_device_train_batch_size": 2, "global_batch_size": ROWS, "eval_steps": 2, "max_steps": STEPS},
        "scaling": {"num_workers": world},
    }
    return spec(**{name: base.get(name, {}) | parts.get(name, {}) for name in base | parts})


def padded(rows: list[list[int]]) -> dict[str, Tensor]:
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(one) for one in rows], True, 0)
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


def of_rewards(model: Any, table: pa.Table, _: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of TRL's RewardTrainer for each pair, and the values that it logs."""
    chosen, rejected = (
        model(**padded([a + b for a, b in zip(table["prompt"].to_pylist(), table[name].to_pylist(), strict=True)]))
        for name in ("chosen", "rejected")
    )
    one, other = chosen.logits.squeeze(-1), rejected.logits.squeeze(-1)
    losses = -F.logsigmoid(one - other - torch.tensor(table["margin"].to_pylist(), dtype=torch.float32))
    rewards = {"reward_chosen": one, "reward_rejected": other, "reward_margin": one - other}
    return losses + CENTER * (one + other) ** 2, {"accuracy": (one > other).float()} | rewards


def embedded(model: Any, table: pa.Table, column: str, head: str) -> Tensor:
    """Return embeddings by the textbook formulas of sentence-transformers."""
    inputs = padded(table[column].to_pylist())
    states, mask = model(**inputs).last_hidden_state, inputs["attention_mask"]
    if head == "mean":
        mean: Tensor = (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return mean
    places = torch.zeros(len(mask)).long() if head == "cls" else mask.sum(1) - 1
    return F.normalize(states[torch.arange(len(mask)), places], dim=-1)


def of_embeddings(model: Any, table: pa.Table, head: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of sentence-transformers' MultipleNegativesRankingLoss in batches of a group, and recalls."""
    columns, temperature = COLUMNS[head], HEADS[head]["embedding"]["temperature"]
    names = [columns["positive"], *columns.get("negatives", ())]
    losses, ranks = list[Tensor](), list[Tensor]()
    for start in range(0, len(table), GROUP):
        group = table[start : start + GROUP]
        texts = torch.cat([embedded(model, group, name, head) for name in names])
        scores = embedded(model, group, columns["anchor"], head) @ texts.T / temperature
        own = torch.arange(len(group))
        losses.append(F.cross_entropy(scores, own, reduction="none"))
        ranks.append((scores > scores[own, own][:, None]).sum(1))
    rank = torch.cat(ranks)
    return torch.cat(losses), {f"recall_at_{most}": (rank < most).float() for most in (1, 5)}


LOSSES: dict[str, Losses] = dict.fromkeys(HEADS, of_embeddings) | {"reward": of_rewards}


def its_metrics(model: Any, data: Path, head: str) -> dict[str, float]:
    with torch.no_grad():
        losses, values = LOSSES[head](model.eval(), pq.read_table(data / "eval.parquet"), head)
    count = "pairs" if head == "reward" else "anchors"
    return {name: one.mean().item() for name, one in ({"loss": losses} | values).items()} | {count: EVAL_ROWS}


def its_model(job: JobSpec, head: str) -> Any:
    """Return transformers' own model with the weights that the loop draws."""
    family = family_of(job)
    ours = family.build(job.model).model
    materialise(ours, family.build(job.model), seed=0, device=torch.device("cpu"))
    auto, labels = (AutoModelForSequenceClassification, {"num_labels": 1}) if head == "reward" else (AutoModel, {})
    model = auto.from_config(AutoConfig.for_model(**CONFIGS[head] | labels | {"pad_token_id": 0}))
    model.load_state_dict(ours.state_dict(), strict=head != "cls")  # BERT's pooler is for another task
    return model


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("world", [1, 2])
def test_loss_gradients_and_evaluation_equal_a_plain_loop(
    call_ranks: Any, data: Path, tmp_path: Path, head: str, world: int
) -> None:
    job = job_of(data, head, world)
    prepare_tokens(job, tmp_path)
    loss, gradients, found = call_ranks(world, step_and_evaluation, job, tmp_path)
    model = its_model(job, head)
    expected = LOSSES[head](model, pq.read_table(data / "train.parquet")[:ROWS], head)[0].mean()
    torch.autograd.backward(expected)
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    own = {name: one for name, one in model.named_parameters() if not name.startswith("pooler.")}
    assert own.keys() == gradients.keys()
    for name, gradient in gradients.items():
        # A bias of BERT's keys has no gradient but rounding: softmax ignores it.
        assert (gradient - own[name].grad).norm() <= 1e-5 * own[name].grad.norm() + 1e-9, name
    assert found.metrics == pytest.approx(its_metrics(model, data, head), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("head", ["reward", "mean"])
def test_run_resumes_with_the_same_bits_and_exports_the_same_model(
    call_ranks: Any, data: Path, tmp_path: Path, head: str
) -> None:
    job, run_dir = job_of(data, head, 2, checkpoint={"every_steps": 2}), RunDir(tmp_path / "run")
    prepare_tokens(job, run_dir.root)
    for _ in range(2):
        call_ranks(2, run, job, run_dir.root)
        folder = export(run_dir, STEPS, ExportWish(dtype="fp32"))
        shutil.rmtree(run_dir.checkpoint(STEPS))
    lines = list(read_lines(run_dir.attempt(1).metrics))
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 3, 4]
    replayed = [{n: v for n, v in line.items() if n in KEPT or n.startswith(("eval_", "reward_"))} for line in lines]
    for line in replayed:
        line.pop("eval_seconds", None)
    assert replayed[2:4] == replayed[4:]
    assert len(KEPT & replayed[0].keys()) == 4
    auto = AutoModelForSequenceClassification if head == "reward" else AutoModel
    model = auto.from_pretrained(folder, pad_token_id=0)
    for name, value in its_metrics(model, data, head).items():
        assert lines[-1][f"eval_{name}"] == pytest.approx(value, rel=1e-5, abs=1e-6)
    if head == "mean":
        modules = json.loads((folder / "modules.json").read_text())
        assert [one["path"] for one in modules] == ["", "1_Pooling"]
        assert json.loads((folder / "1_Pooling/config.json").read_text())["pooling_mode_mean_tokens"] is True
    else:
        assert model.config.num_labels == 1
