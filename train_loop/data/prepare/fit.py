"""Rules for documents that are longer than a sample or without a trained token, and for rows that end a job."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from train_loop.data.dataset import IGNORE
from train_loop.data.prepare.encode import BadRow, Encoded, TextRules
from train_loop.data.prepare.packing import Document
from train_loop.data.prepare.rows import locate
from train_loop.data.prepare.sources import SourceFile
from train_loop.errors import DataError
from train_loop.spec import ColumnsSpec, JobSpec
from train_loop.spec.data import LongRows

_OF_ONE_ROW = "correct the row, or set on_bad_rows: skip"
Fate = Literal["whole", "long", "dropped", "untrained"]
"""whole: unchanged; long: split or truncated; dropped: too long; untrained: dropped because no token is trained."""

Place = tuple[SourceFile, int]
"""A row's file, and its place in that file, as in `Row.place`."""


@dataclass(frozen=True)
class Fit:
    """The rules for the documents of one source."""

    length: int
    """Tokens per sample."""
    rule: LongRows
    drops_untrained: bool
    bos: int | None = None
    """First token that truncate_left keeps, if a document begins with it."""
    last: int | None = None
    """Last token that truncate keeps, if a document ends with it."""
    others: tuple[LongRows, ...] = ()
    """Rules in place of `fail` that the spec takes."""

    @classmethod
    def of(cls, spec: JobSpec, columns: ColumnsSpec, rules: TextRules | None) -> "Fit":
        """Return the rules for rows with these columns; `rules` are those of their text, None for rows of tokens."""
        data, (first, last) = spec.data, (None, None) if rules is None else rules.kept
        drops, others = data.drops_untrained(columns), _rules_of(spec, columns)
        return cls(data.sequence_length, data.long_rows_of(columns), drops, first, last, others)

    def refuses(self, document: Document) -> bool:
        """Return whether a document is too long and on_long_rows is `fail`, so that preparation fails."""
        return self.rule == "fail" and document.longest > self.length

    def __call__(self, document: Document) -> tuple[Document, Fate]:
        """Return the document to pack and its fate; a dropped document is empty."""
        long = document.longest > self.length
        if long and self.rule == "drop":
            return _empty(document), "dropped"
        if long and self.rule in ("truncate", "truncate_left"):
            document = document.each(self._shortened)
        if self.drops_untrained and not _is_trained(document):
            return _empty(document), "untrained"
        return document, "long" if long else "whole"

    def _shortened(self, document: Document) -> Document:
        if len(document.input_ids) <= self.length:
            return document
        return _cut(document, self._start(document) if self.rule == "truncate" else self._end(document))

    def _start(self, document: Document) -> NDArray[np.int64]:
        """Return the indices of the tokens that truncate keeps."""
        kept = np.arange(self.length)
        if document.input_ids[-1] == self.last:
            kept[-1] = len(document.input_ids) - 1
        return kept

    def _end(self, document: Document) -> NDArray[np.int64]:
        """Return the indices of the tokens that truncate_left keeps."""
        size = len(document.input_ids)
        kept = np.arange(size - self.length, size)
        if document.input_ids[0] == self.bos:
            # Models that are trained with BOS need it: as tokenizers of transformers do when they truncate on the left.
            kept[0] = 0
        return kept


def _rules_of(spec: JobSpec, columns: ColumnsSpec) -> tuple[LongRows, ...]:
    """Return the values of on_long_rows, but `fail`, that a spec takes for rows with these columns."""
    head = spec.model.label_head
    if spec.infer is None:
        return ("drop", "truncate", "truncate_left", *(("split",) if head is None or not head.pools else ()))
    # The end of a conversation asks for the answer.
    return ("truncate_left",) if columns.messages and spec.chats == "prompt" else ("truncate", "truncate_left")


def explain_cut(rule: str, long: int) -> str:
    """Return the end of a warning that no end token is trained, if the rule for `long` rows has cut ends; else ''."""
    return f"; on_long_rows: truncate cuts the ends of {long} rows" if rule == "truncate" and long else ""


def _is_trained(document: Document) -> bool:
    """Return whether any token is trained; the first token is never predicted."""
    return document.labels is None or bool(np.any(document.labels[1:] != IGNORE))


def _empty(document: Document) -> Document:
    return replace(_cut(document, slice(0)), sizes=())


def _cut(document: Document, part: slice | NDArray[np.int64]) -> Document:
    labels = None if document.labels is None else document.labels[part]
    return replace(document, input_ids=document.input_ids[part], labels=labels)


def check_rows(encoded: Sequence[Encoded], places: Sequence[Place], fit: Fit, *, skip: bool) -> None:
    """Raise DataError for the first row that ends the job: a bad row, unless these are skipped, or one too long."""
    all_bad = len(encoded) > 1 and all(isinstance(row, BadRow) for row in encoded)
    of_all = (
        f"none of the {len(encoded)} rows read with it can be trained on: correct data.columns, or convert the rows"
    )
    remedy = of_all if all_bad else _OF_ONE_ROW
    for row, place in zip(encoded, places, strict=True):
        if isinstance(row, BadRow) and not skip:
            raise DataError(f"{_where(place)}: {row.reason}; {remedy}")
    for row, place in zip(encoded, places, strict=True):
        if not isinstance(row, BadRow) and fit.refuses(row):
            raise DataError(
                f"{_where(place)} has {row.longest} tokens, more than sequence_length={fit.length}, and "
                f"on_long_rows is fail; raise sequence_length, or choose {' or '.join(fit.others)}"
            )


def _where(place: Place) -> str:
    (where,) = locate([place])
    return where
