"""What happens to documents that are longer than a sample, or of which nothing is trained."""

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from train_loop.data.dataset import IGNORE
from train_loop.data.prepare.packing import Document
from train_loop.spec import ColumnsSpec, DataSpec
from train_loop.spec.data import LongRows

Fate = Literal["whole", "long", "dropped", "untrained"]
"""long: it is split or truncated; dropped: it was too long; untrained: it is dropped because no token is trained."""


@dataclass(frozen=True)
class Fit:
    """The rule for documents of one source."""

    length: int
    """Tokens of a sample."""
    rule: LongRows
    drops_untrained: bool

    @classmethod
    def of(cls, data: DataSpec, columns: ColumnsSpec) -> "Fit":
        """Return the rule for rows of these columns."""
        return cls(data.sequence_length, data.long_rows_of(columns), data.drops_untrained(columns))

    def refuses(self, document: Document) -> bool:
        """Return whether a document ends the preparation because it is too long."""
        return self.rule == "fail" and len(document.input_ids) > self.length

    def __call__(self, document: Document) -> tuple[Document, Fate]:
        """Return a document as it is packed, and what happened to it; one that is dropped comes back empty."""
        long = len(document.input_ids) > self.length
        if long and self.rule == "drop":
            return _cut(document, slice(0)), "dropped"
        if long and self.rule in ("truncate", "truncate_left"):
            document = _cut(document, slice(self.length) if self.rule == "truncate" else slice(-self.length, None))
        if self.drops_untrained and not _is_trained(document):
            return _cut(document, slice(0)), "untrained"
        return document, "long" if long else "whole"


def _is_trained(document: Document) -> bool:
    """Return whether a token is trained; nothing predicts the first one."""
    return document.labels is None or bool(np.any(document.labels[1:] != IGNORE))


def _cut(document: Document, part: slice) -> Document:
    labels = None if document.labels is None else document.labels[part]
    return replace(document, input_ids=document.input_ids[part], labels=labels)
