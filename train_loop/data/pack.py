"""Documents → samples of sequence_length tokens; no token is lost, repeated or reordered."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from train_loop.data.dataset import Tokens


@dataclass(frozen=True)
class Document:
    """Tokens of one document and, where the data says what is trained on, a label for each."""

    input_ids: Tokens
    labels: Tokens | None = None


@dataclass(frozen=True)
class Sample:
    """At most sequence_length tokens; `documents` are the lengths of the pieces that must not see each other."""

    input_ids: Tokens
    labels: Tokens | None
    documents: list[int]


def pack(documents: Iterable[Document], length: int) -> Iterator[Sample]:
    """Lay documents end to end and cut every `length` tokens; only the last sample may be shorter."""
    pieces: list[Document] = []
    room = length
    for document in documents:
        rest = document
        while len(rest.input_ids) >= room:
            pieces.append(_cut(rest, 0, room))
            yield _join(pieces)
            rest, pieces, room = _cut(rest, room, None), [], length
        if len(rest.input_ids):
            pieces.append(rest)
            room -= len(rest.input_ids)
    if pieces:
        yield _join(pieces)


def one_per_sample(documents: Iterable[Document], length: int) -> Iterator[Sample]:
    """A sample for every document; a document longer than `length` goes on in samples of its own."""
    for document in documents:
        for start in range(0, len(document.input_ids), length):
            yield _join([_cut(document, start, start + length)])


def _cut(document: Document, start: int, stop: int | None) -> Document:
    labels = None if document.labels is None else document.labels[start:stop]
    return Document(document.input_ids[start:stop], labels)


def _join(pieces: list[Document]) -> Sample:
    labels = [piece.labels for piece in pieces if piece.labels is not None]
    return Sample(
        np.concatenate([piece.input_ids for piece in pieces]),
        np.concatenate(labels) if labels else None,
        [len(piece.input_ids) for piece in pieces],
    )
