"""BOS at the start of documents, and trained end tokens of turns: a model that trains none does not learn to stop."""

from itertools import groupby

import numpy as np

from train_loop.data.dataset import IGNORE
from train_loop.data.prepare.packing import Document
from train_loop.data.text.tokenizer import TextTokenizer

_AROUND = 200
"""Characters of a sample before and after the first end of trained text."""


class Boundaries:
    """A search through documents for BOS, and for a trained token that ends a turn."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._found = False
        self._first: Document | None = None
        self._documents = self._with_bos = 0

    def see(self, document: Document) -> None:
        """Look at one document; ends are no longer searched after the first trained end token."""
        self._documents += len(document.sequences)
        self._with_bos += sum(one.input_ids[0] == self._tokenizer.bos for one in document.sequences)
        if self._found or document.labels is None:
            return
        trained = document.labels != IGNORE
        if not trained.any():
            return
        last = trained & ~np.append(trained[1:], False)
        self._found = bool(np.isin(document.input_ids[last], sorted(document.ends)).any())
        self._first = self._first or document

    @property
    def begins_with_bos(self) -> bool:
        """Whether all documents begin with the tokenizer's BOS token."""
        return bool(0 < self._documents == self._with_bos)

    @property
    def sample_without_end(self) -> str | None:
        """A conversation with trained text in ⟦⟧ if no end token is trained; None if one is, or nothing is trained."""
        if self._found or self._first is None:
            return None
        text = mark_trained(self._tokenizer, self._first)
        stop = text.index("⟧") + 1
        return text[max(0, stop - _AROUND) : stop + _AROUND]


def mark_trained(tokenizer: TextTokenizer, document: Document) -> str:
    """Return the text of a document, with trained text between ⟦ and ⟧."""
    labels = document.input_ids if document.labels is None else document.labels
    text = ""
    for trained, run in groupby(zip(document.input_ids.tolist(), labels.tolist(), strict=True), _is_trained):
        part = tokenizer.decode([token for token, _ in run], special=True)
        text += f"⟦{part}⟧" if trained else part
    return text


def no_end_token(sample: str) -> str:
    """Return the warning that no end token is trained."""
    return (
        f"no end token of any turn is trained, so the model does not learn to stop: {sample!r}, with trained text in "
        "⟦⟧; write the end token inside the template's {% generation %} block, or choose another template with "
        "data.chat_template"
    )


def _is_trained(pair: tuple[int, int]) -> bool:
    return pair[1] != IGNORE
