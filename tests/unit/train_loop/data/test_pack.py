"""Packing: no token is lost or repeated, documents that fit stay whole, and samples are full."""

from collections import Counter
from itertools import combinations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from train_loop.data.prepare import packing as packing
from train_loop.data.prepare.packing import Document, Sample, best_fit, one_per_sample, pack

sizes = st.lists(st.integers(0, 40), max_size=60)


def documents(sizes: list[int]) -> list[Document]:
    """Return documents of the given lengths: distinct tokens, negated as labels, numbered as weights."""
    ends = np.cumsum(sizes).astype(int)
    ids = [np.arange(end - size, end, dtype=np.int32) for size, end in zip(sizes, ends, strict=True)]
    return [Document(i, -i, float(n)) for n, i in enumerate(ids)]


def pieces(sample: Sample) -> list[list[int]]:
    """Return the documents, or parts of them, in a sample."""
    return [part.tolist() for part in np.split(sample.input_ids, np.cumsum(sample.documents)[:-1])]


def expected(sizes: list[int], length: int) -> list[list[int]]:
    """Return documents cut every `length` tokens."""
    whole = [document.input_ids.tolist() for document in documents(sizes)]
    return [ids[start : start + length] for ids in whole for start in range(0, len(ids), length)]


@given(sizes=sizes, length=st.integers(1, 32))
def test_every_token_appears_once_and_only_long_documents_are_cut(sizes: list[int], length: int) -> None:
    samples = list(pack(documents(sizes), length))
    found = [piece for sample in samples for piece in pieces(sample)]
    assert sorted(found) == sorted(expected(sizes, length))
    assert Counter(token for piece in found for token in piece) == Counter(range(sum(sizes)))
    assert all(0 < len(sample.input_ids) <= length for sample in samples)


@given(sizes=sizes, length=st.integers(1, 32))
def test_labels_and_weights_stay_with_their_tokens(sizes: list[int], length: int) -> None:
    owner = np.repeat(np.arange(len(sizes)), sizes)
    for sample in pack(documents(sizes), length):
        assert sample.labels is not None
        assert sample.labels.tolist() == (-sample.input_ids).tolist()
        assert sample.weights is not None
        assert sample.weights.tolist() == [owner[piece[0]] for piece in pieces(sample)]


@given(sizes=st.lists(st.integers(1, 32), max_size=60))
def test_no_two_bins_fit_into_one(sizes: list[int]) -> None:
    bins = best_fit(sizes, 32)
    assert sorted(index for members in bins for index in members) == list(range(len(sizes)))
    filled = [sum(sizes[index] for index in members) for members in bins]
    assert all(total <= 32 for total in filled)
    assert all(one + other > 32 for one, other in combinations(filled, 2))


def test_document_goes_to_the_tightest_bin() -> None:
    assert best_fit([6, 5, 4, 3], 10) == [[0, 2], [1, 3]]
    assert best_fit([7, 6, 3, 3], 10) == [[0, 2], [1, 3]]


@given(sizes=sizes, length=st.integers(1, 32))
def test_samples_and_their_documents_keep_file_order(sizes: list[int], length: int) -> None:
    samples = list(pack(documents(sizes), length))
    firsts = [int(sample.input_ids[0]) for sample in samples]
    assert firsts == sorted(firsts)
    assert all(sample.input_ids.tolist() == sorted(sample.input_ids.tolist()) for sample in samples)


def test_windows_limit_memory_and_keep_the_result() -> None:
    taken = []

    def endless() -> object:
        for document in documents([5] * 10_000):
            taken.append(document)
            yield document

    first = next(pack(endless(), 8))  # type: ignore[arg-type]
    assert len(first.input_ids) == 5
    assert len(taken) * 5 <= packing.WINDOW_SAMPLES * 8 + 5


def test_text_of_many_lengths_fills_samples() -> None:
    lengths = np.random.default_rng(0).lognormal(5, 1.2, 20_000).astype(int).clip(1).tolist()
    samples = list(pack(documents(lengths), 1024))
    assert sum(lengths) / (1024 * len(samples)) > 0.99


@given(sizes=sizes, length=st.integers(1, 32))
def test_unpacked_samples_never_mix_documents(sizes: list[int], length: int) -> None:
    samples = list(one_per_sample(documents(sizes), length))
    assert [sample.input_ids.tolist() for sample in samples] == expected(sizes, length)
    assert all(len(sample.documents) == 1 for sample in samples)
