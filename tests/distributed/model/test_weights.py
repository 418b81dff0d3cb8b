"""Token weights: the loss is the weighted mean at every mesh, and weights of one equal no weights bit for bit."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch.distributed as dist

from tests.support.builders.specs import TINY, spec
from tests.support.ranks.gradients import Gradients, one_step, random_rows, replaced
from tests.support.ranks.ranks import on_ranks
from tests.support.ranks.torchrun import write_tokens
from train_loop.data.dataset import IGNORE
from train_loop.data.prepare.cache import find_dataset
from train_loop.data.stream.local import local_stream
from train_loop.loop.session import Session
from train_loop.run_dir import RunDir, read_lines
from train_loop.train import train

STEPS, VOCAB = 2, TINY["vocab_size"]
LOSSES = {"z_loss": 0.01, "label_smoothing_factor": 0.1}
MESHES: dict[str, dict[str, Any]] = {
    "fsdp": {"training": {"per_device_train_batch_size": 1, "chunked_loss": True}},
    "fsdp x sp": {"strategy": {"ulysses_size": 2}},
    "hsdp x sp": {"strategy": {"fsdp_size": 2, "ulysses_size": 2}},
}


def run(data: Path, folder: Path, *, weight: str | None, parts: dict[str, Any]) -> None:
    """Train and evaluate a run on the same rows, with weights from a column."""
    files = {"path": str(data)}
    columns = {"input_ids": "ids", "weight": weight}
    job = spec(
        data={"train": files, "eval": files, "columns": columns, "packing": False},
        training={"max_steps": STEPS, "global_batch_size": 8, "per_device_train_batch_size": 2, "eval_steps": STEPS}
        | LOSSES
        | parts.get("training", {}),
        strategy=parts.get("strategy", {}),
        checkpoint={"save_final": False},
        scaling={"num_workers": dist.get_world_size()},
    )
    session = Session(dist.get_rank(), dist.get_world_size(), 0, 1, RunDir(folder), local_stream)
    dataset = find_dataset(job, folder).model_copy(update={"fingerprint": "the same order for all"})
    train(job, session, dataset, dataset)


def run_alone(folder: Path) -> None:
    """Train the reference run, a run with equal weights, and a run without weights."""
    run(folder / "d.parquet", folder / "one rank", weight="drawn", parts={})
    run(folder / "d.parquet", folder / "one rank, threes", weight="threes", parts={})
    run(folder / "d.parquet", folder / "one rank, plain", weight=None, parts={})


def run_all(folder: Path) -> None:
    """Train a run for every mesh, and for one mesh a run with weights of one and a run without weights."""
    for name, parts in MESHES.items():
        run(folder / "d.parquet", folder / name, weight="drawn", parts=parts)
    run(folder / "d.parquet", folder / "ones", weight="ones", parts=MESHES["fsdp x sp"])
    run(folder / "d.parquet", folder / "plain", weight=None, parts=MESHES["fsdp x sp"])


def lines(folder: Path) -> list[dict[str, Any]]:
    return list(read_lines(RunDir(folder).attempt(1).metrics))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    write_tokens(folder / "d.parquet", rows=30, length=(9, 32), vocab=VOCAB)
    table = pq.read_table(folder / "d.parquet")
    drawn = np.random.default_rng(0).choice([0, 0.25, 0.7, 1, 3], table.num_rows)
    for name, weights in {"drawn": drawn, "ones": np.ones(30), "threes": np.full(30, 3)}.items():
        table = table.append_column(name, pa.array(weights))
    pq.write_table(table, folder / "d.parquet")
    on_ranks(1, run_alone, folder)
    on_ranks(4, run_all, folder)
    return folder


@pytest.mark.parametrize("mesh", MESHES)
def test_every_mesh_trains_the_same_weighted_run(runs: Path, mesh: str) -> None:
    expected, found = lines(runs / "one rank"), lines(runs / mesh)
    for one, many in zip(expected, found, strict=True):
        assert many["tokens"] == one["tokens"]
        assert many["loss"] == pytest.approx(one["loss"], rel=1e-5)
        assert many["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-5)
    assert found[-1]["eval_loss"] == pytest.approx(expected[-1]["eval_loss"], rel=1e-5)
    assert found[-1]["eval_tokens"] == expected[-1]["eval_tokens"]


def test_weights_change_the_training_but_not_the_token_counts(runs: Path) -> None:
    for weighed, plain in zip(lines(runs / "one rank"), lines(runs / "one rank, plain"), strict=True):
        assert weighed["tokens"] == plain["tokens"]
        assert weighed["grad_norm"] != pytest.approx(plain["grad_norm"], rel=1e-2)


def test_equal_weights_change_nothing(runs: Path) -> None:
    for threes, plain in zip(lines(runs / "one rank, threes"), lines(runs / "one rank, plain"), strict=True):
        for name in {"loss", "grad_norm", "eval_loss"} & plain.keys():
            assert threes[name] == pytest.approx(plain[name], rel=1e-5), name


def test_weights_of_one_equal_no_weights_bit_for_bit(runs: Path) -> None:
    same = ("loss", "grad_norm", "tokens", "eval_loss", "eval_tokens")
    for ones, plain in zip(lines(runs / "ones"), lines(runs / "plain"), strict=True):
        assert [ones.get(name) for name in same] == [plain.get(name) for name in same]


def one_weight(weight: float, sp: int) -> tuple[tuple[float, Gradients], ...]:
    """Compare a step in which one token has a weight with an unweighted step that trains only that token."""
    rows = random_rows(4, 32, vocab=VOCAB, packed=False)
    weights = np.zeros(rows.labels.shape, np.float32)
    weights[3, -1] = weight
    labels = np.where(weights == 0, IGNORE, rows.labels)
    job = spec(training={"per_device_train_batch_size": sp}, strategy={"ulysses_size": sp}, scaling={"num_workers": 2})
    return one_step(job, replaced(rows, weights=weights)), one_step(job, replaced(rows, labels=labels))


def every_weight(cases: list[tuple[float, int]]) -> list[Any]:
    return [one_weight(*case) for case in cases]


def test_divisor_may_be_a_small_weight_or_zero() -> None:
    cases = [(0.25, 1), (0.25, 2), (0.0, 2)]
    for (weight, _), ((loss, found), (expected_loss, expected)) in zip(
        cases, on_ranks(2, every_weight, cases)[0], strict=True
    ):
        assert (loss > 0) == (weight > 0)
        assert loss == pytest.approx(expected_loss, rel=1e-6)
        for name, value in expected.items():
            assert (found[name] - value).norm() <= 1e-6 * value.norm(), name
