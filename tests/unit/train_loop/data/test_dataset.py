"""Prepared samples: reads by index from any file and row group, padding, and positions per document."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.builders.datasets import parquet_dataset
from train_loop.data.dataset import IGNORE, Dataset, Part, Rows, ShardFile
from train_loop.data.order import mix
from train_loop.data.stream.local import read_rows
from train_loop.errors import DataError


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    """Return two files of 5 and 3 samples.

    Sample i holds i + 1 tokens of value i, at most 4, in documents of at most 2 tokens.
    """
    files = []
    for first, rows in ((0, 5), (5, 3)):
        lengths = [min(i + 1, 4) for i in range(first, first + rows)]
        table = pa.table(
            {
                "input_ids": [[first + k] * n for k, n in enumerate(lengths)],
                "documents": [[2] * (n // 2) + [1] * (n % 2) for n in lengths],
            }
        )
        path = tmp_path / f"{first}.parquet"
        pq.write_table(table, path, row_group_size=2)
        files.append(path)
    return parquet_dataset(*files, length=4, documents="documents").model_copy(update={"pad_token": 99})


def test_samples_keep_the_requested_order(dataset: Dataset) -> None:
    rows = read_rows(dataset, np.array([7, 0, 4, 7, 5]))
    assert rows.samples.tolist() == [7, 0, 4, 7, 5]
    assert rows.input_ids[:, 0].tolist() == [7, 0, 4, 7, 5]


def test_short_samples_get_untrained_padding(dataset: Dataset) -> None:
    rows = read_rows(dataset, np.array([0, 2]))
    assert rows.lengths.tolist() == [1, 3]
    assert rows.input_ids.tolist() == [[0, 99, 99, 99], [2, 2, 2, 99]]
    assert rows.labels.tolist() == [[0, IGNORE, IGNORE, IGNORE], [2, 2, 2, IGNORE]]


def test_positions_restart_per_document_and_continue_in_padding(dataset: Dataset) -> None:
    rows = read_rows(dataset, np.array([0, 2, 3]))
    assert rows.position_ids.tolist() == [[0, 1, 2, 3], [0, 1, 0, 1], [0, 1, 0, 1]]


def test_padding_rows_train_nothing(dataset: Dataset) -> None:
    rows = read_rows(dataset, np.array([-1, 1]))
    assert rows.samples.tolist() == [-1, 1]
    assert (rows.labels[0] == IGNORE).all()
    assert rows.lengths.tolist() == [0, 2]


def test_rows_survive_an_arrow_round_trip(dataset: Dataset) -> None:
    rows = read_rows(dataset, np.array([3, 1]))
    back = Rows.from_arrow(rows.to_arrow())
    assert back.values.keys() == rows.values.keys()
    assert all(np.array_equal(back.values[name], values) for name, values in rows.values.items())


def test_rows_keep_their_weights(dataset: Dataset) -> None:
    weights = np.array([[0.1, 0.2, 0.3, 0.4], [1, 2, 3, 4]], np.float32)
    rows = Rows({**read_rows(dataset, np.array([3, 1])).values, "weights": weights})
    found = Rows.from_arrow(rows.to_arrow()).slice(1, 2).weights
    assert found is not None
    assert found.dtype == np.float32
    assert np.array_equal(found, weights[1:])


def test_sample_longer_than_the_sequence_is_rejected_by_name(dataset: Dataset) -> None:
    short = dataset.model_copy(update={"sequence_length": 3})
    with pytest.raises(DataError, match=r"0.parquet, row 4 has 4 tokens, more than sequence_length=3; raise it"):
        read_rows(short, np.array([4]))


def test_missing_sample_raises(dataset: Dataset) -> None:
    with pytest.raises(IndexError):
        read_rows(dataset, np.array([8]))


def test_fill_of_a_mixture_weighs_sources_by_samples_taken() -> None:
    def of_ten(tokens: int) -> Part:
        return Part(fingerprint="x", files=(ShardFile(path="a", rows=10, size=1),), tokens=tokens)

    dataset = Dataset(fingerprint="x", parts=(of_ten(40), of_ten(20)), sequence_length=4)
    assert dataset.utilisation == 0.75
    mixed = dataset.model_copy(update={"mixture": mix([3.0, 1.0], [10, 10])})
    assert mixed.utilisation == pytest.approx(0.75 * 1 + 0.25 * 0.5, rel=0.01)
