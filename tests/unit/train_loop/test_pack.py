"""Packing: no token is lost, repeated or reordered, and documents keep their borders."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from train_loop.data.pack import Document, one_per_sample, pack

lengths = st.lists(st.integers(1, 40), max_size=30)


def documents(sizes: list[int]) -> list[Document]:
    """Documents of the given lengths whose tokens are all different."""
    ends = np.cumsum(sizes).astype(int)
    ids = [np.arange(end - size, end, dtype=np.int32) for size, end in zip(sizes, ends, strict=True)]
    return [Document(i, -i) for i in ids]


@given(sizes=lengths, length=st.integers(1, 32))
def test_all_tokens_come_out_once_and_in_order(sizes: list[int], length: int) -> None:
    samples = list(pack(documents(sizes), length))
    tokens = [token for sample in samples for token in sample.input_ids.tolist()]
    assert tokens == list(range(sum(sizes)))
    labels = [label for sample in samples if sample.labels is not None for label in sample.labels.tolist()]
    assert labels == [-token for token in tokens]


@given(sizes=lengths, length=st.integers(1, 32))
def test_every_sample_but_the_last_is_full(sizes: list[int], length: int) -> None:
    filled = [len(sample.input_ids) for sample in pack(documents(sizes), length)]
    assert all(size == length for size in filled[:-1])
    assert all(0 < size <= length for size in filled)


@given(sizes=lengths, length=st.integers(1, 32))
def test_a_sample_knows_where_its_documents_begin(sizes: list[int], length: int) -> None:
    starts = set(np.cumsum([0, *sizes]).tolist())
    for sample in pack(documents(sizes), length):
        assert sum(sample.documents) == len(sample.input_ids)
        inner = np.cumsum(sample.documents)[:-1]
        assert {int(sample.input_ids[i]) for i in inner} == starts & set(sample.input_ids[1:].tolist())


@given(sizes=lengths, length=st.integers(1, 32))
def test_unpacked_samples_never_mix_documents(sizes: list[int], length: int) -> None:
    samples = list(one_per_sample(documents(sizes), length))
    assert [token for sample in samples for token in sample.input_ids.tolist()] == list(range(sum(sizes)))
    assert all(len(sample.documents) == 1 and len(sample.input_ids) <= length for sample in samples)
