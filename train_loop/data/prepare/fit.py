"""Rules for documents that are longer than a sample, or without a trained token."""

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from train_loop.data.dataset import IGNORE
from train_loop.data.prepare.encode import TextRules
from train_loop.data.prepare.packing import Document
from train_loop.spec import ColumnsSpec, DataSpec
from train_loop.spec.data import LongRows

Fate = Literal["whole", "long", "dropped", "untrained"]
"""whole: unchanged; long: split or truncated; dropped: too long; untrained: dropped because no token is trained."""


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

    @classmethod
    def of(cls, data: DataSpec, columns: ColumnsSpec, rules: TextRules | None) -> "Fit":
        """Return the rules for rows with these columns; `rules` are those of their text, None for rows of tokens."""
        first, last = (None, None) if rules is None else rules.kept
        return cls(data.sequence_length, data.long_rows_of(columns), data.drops_untrained(columns), first, last)

    def refuses(self, document: Document) -> bool:
        """Return whether a document is too long and on_long_rows is `fail`, so that preparation fails."""
        return self.rule == "fail" and len(document.input_ids) > self.length

    def __call__(self, document: Document) -> tuple[Document, Fate]:
        """Return the document to pack and its fate; a dropped document is empty."""
        long = len(document.input_ids) > self.length
        if long and self.rule == "drop":
            return _cut(document, slice(0)), "dropped"
        if long and self.rule in ("truncate", "truncate_left"):
            document = _cut(document, self._start(document) if self.rule == "truncate" else self._end(document))
        if self.drops_untrained and not _is_trained(document):
            return _cut(document, slice(0)), "untrained"
        return document, "long" if long else "whole"

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


def explain_cut(rule: str, long: int) -> str:
    """Return the end of a warning that no end token is trained, if the rule for `long` rows has cut ends; else ''."""
    return f"; on_long_rows: truncate cuts the ends of {long} rows" if rule == "truncate" and long else ""


def _is_trained(document: Document) -> bool:
    """Return whether any token is trained; the first token is never predicted."""
    return document.labels is None or bool(np.any(document.labels[1:] != IGNORE))


def _cut(document: Document, part: slice | NDArray[np.int64]) -> Document:
    labels = None if document.labels is None else document.labels[part]
    return replace(document, input_ids=document.input_ids[part], labels=labels)
