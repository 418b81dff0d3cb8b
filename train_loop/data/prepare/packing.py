"""Documents → samples of at most sequence_length tokens; no token is lost or repeated."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from train_loop.data.dataset import Tokens, Weights


@dataclass(frozen=True)
class Document:
    """The tokens of one document, with labels and a weight if the data contains them."""

    input_ids: Tokens
    labels: Tokens | None = None
    weight: float | None = None
    target: float | None = None
    """Label of the document."""
    ends: frozenset[int] = frozenset()
    """Tokens that end a trained turn of a conversation."""
    sizes: tuple[int, ...] = ()
    """Lengths of the sequences of a row that stay together, such as chosen and rejected; empty for one sequence."""

    @property
    def sequences(self) -> "tuple[Document, ...]":
        """The sequences of a row, each as a document."""
        if not self.sizes:
            return (self,)
        stops = accumulate(self.sizes)
        parts = [self.input_ids[stop - size : stop] for stop, size in zip(stops, self.sizes, strict=True)]
        return tuple(replace(self, input_ids=part, sizes=()) for part in parts)

    @property
    def longest(self) -> int:
        """The tokens of the longest sequence."""
        return max(self.sizes, default=len(self.input_ids))

    def each(self, change: "Callable[[Document], Document]") -> "Document":
        """Return the document with each sequence changed."""
        if not self.sizes:
            return change(self)
        changed = [change(sequence).input_ids for sequence in self.sequences]
        return replace(self, input_ids=np.concatenate(changed), sizes=tuple(map(len, changed)))


@dataclass(frozen=True)
class Sample:
    """At most sequence_length tokens; `documents` are the lengths of documents that must not attend to each other."""

    input_ids: Tokens
    labels: Tokens | None
    weights: Weights | None  # one per document
    documents: list[int]
    targets: Weights | None = None  # one per document


WINDOW_SAMPLES = 1024
WINDOW_TOKENS = 4 * 2**20
"""Size of a window of documents that are packed together: WINDOW_SAMPLES full samples, at most WINDOW_TOKENS."""


def pack(documents: Iterable[Document], length: int) -> Iterator[Sample]:
    """Pack documents into full samples of `length` tokens, within windows of consecutive documents.

    Best-fit decreasing (Johnson, 1973; for training by Ding et al., "Fewer truncations improve language modeling",
    2024): starting with the longest, each document goes into the fullest sample with room for it. Only a document
    longer than `length` is split. The samples of a window are in the order of their first documents.
    """
    room = max(min(WINDOW_SAMPLES * length, WINDOW_TOKENS), 8 * length)
    window: list[Document] = []
    tokens = 0
    for document in documents:
        for piece in _split(document, length):
            window.append(piece)
            tokens += len(piece.input_ids)
        if tokens >= room:
            yield from _pack_window(window, length)
            window, tokens = [], 0
    yield from _pack_window(window, length)


def one_per_sample(documents: Iterable[Document], length: int) -> Iterator[Sample]:
    """Yield one sample per document; a document longer than `length` is split into several samples.

    Sequences that stay together are one sample: each has at most `length` tokens.
    """
    for document in documents:
        for piece in (document,) if document.sizes else _split(document, length):
            yield _join([piece])


def best_fit(sizes: list[int], room: int) -> list[list[int]]:
    """Return the bins for `sizes`, each at most `room`: lists of ascending indices, ordered by their first index."""
    bins: list[list[int]] = []
    by_room: list[list[int]] = [[] for _ in range(room + 1)]
    # Bit r is set if a bin has room for r more. The lowest set bit from bit `size` on is the fullest bin that fits.
    open_rooms = 0
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        size = sizes[index]
        fitting = open_rooms >> size
        if fitting:
            left = size + (fitting & -fitting).bit_length() - 1
            chosen = by_room[left].pop()
            if not by_room[left]:
                open_rooms ^= 1 << left
            bins[chosen].append(index)
        else:
            left, chosen = room, len(bins)
            bins.append([index])
        left -= size
        if left:
            by_room[left].append(chosen)
            open_rooms |= 1 << left
    return sorted((sorted(members) for members in bins), key=lambda members: members[0])


def _pack_window(window: list[Document], length: int) -> Iterator[Sample]:
    for members in best_fit([len(document.input_ids) for document in window], length):
        yield _join([window[member] for member in members])


def _split(document: Document, length: int) -> Iterator[Document]:
    for start in range(0, len(document.input_ids), length):
        part = slice(start, start + length)
        labels = None if document.labels is None else document.labels[part]
        yield Document(document.input_ids[part], labels, document.weight, document.target)


def _join(pieces: list[Document]) -> Sample:
    labels = [piece.labels for piece in pieces if piece.labels is not None]
    weights = [piece.weight for piece in pieces if piece.weight is not None]
    sequences = [sequence for piece in pieces for sequence in piece.sequences]
    targets = [sequence.target for sequence in sequences if sequence.target is not None]
    return Sample(
        np.concatenate([piece.input_ids for piece in pieces]),
        np.concatenate(labels) if labels else None,
        np.array(weights, np.float32) if weights else None,
        [len(sequence.input_ids) for sequence in sequences],
        np.array(targets, np.float32) if targets else None,
    )
