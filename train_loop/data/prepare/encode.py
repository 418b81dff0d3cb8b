"""Rows of every format → documents of tokens, with labels for the trained tokens; encoded text ends with EOS."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np

from train_loop.data.dataset import IGNORE
from train_loop.data.prepare.chat import encode_chat, load_chat_template
from train_loop.data.prepare.packing import Document
from train_loop.data.prepare.rows import Row
from train_loop.data.prepare.tokenizer import load_tokenizer
from train_loop.spec import ColumnsSpec

_HEAVIEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class BadRow:
    """A row that cannot be trained on."""

    place: int
    """Position of the row, as in `Row.place`."""
    reason: str


Encoded = Document | BadRow


def encode_rows(
    rows: list[Row], columns: ColumnsSpec, *, vocab: int, tokenizer: str | None = None, system_prompt: str | None = None
) -> list[Encoded]:
    """Return a document for every row, or a BadRow if the row cannot be trained on.

    `tokenizer` is a folder; tokenised rows do not need it.
    """
    encoded: dict[int, Encoded] = {}
    good = []
    for number, row in enumerate(rows):
        wrong = row.wrong or _wrong(row.values, columns, vocab)
        if wrong:
            encoded[number] = BadRow(row.place, wrong)
        else:
            good.append(number)
    for number, document in zip(
        good, _documents([rows[n] for n in good], columns, tokenizer, system_prompt), strict=True
    ):
        encoded[number] = document
    return [encoded[number] for number in range(len(rows))]


def _wrong(values: dict[str, Any], columns: ColumnsSpec, vocab: int) -> str | None:
    """Return the reason why a row cannot be trained on; None if nothing is wrong before tokenisation."""
    for name in (columns.text, columns.prompt, columns.response):
        if name is not None and not is_text(values[name]):
            return f"column {name!r} holds {_kind(values[name])} where text is needed"
    if columns.input_ids is not None:
        for name in filter(None, (columns.input_ids, columns.labels)):
            wrong = _wrong_tokens(name, values[name], vocab, ignored=name == columns.labels)
            if wrong:
                return wrong
        if columns.labels is not None and len(values[columns.input_ids]) != len(values[columns.labels]):
            ids, labels = len(values[columns.input_ids]), len(values[columns.labels])
            return f"{ids} tokens and {labels} labels; they must be aligned"
    if columns.weight is not None and not _is_weight(values[columns.weight]):
        return f"column {columns.weight!r} holds {_kind(values[columns.weight])} where a weight of 0 or more is needed"
    return None


def _documents(
    rows: list[Row], columns: ColumnsSpec, tokenizer: str | None, system_prompt: str | None
) -> Iterator[Encoded]:
    weights = [None if columns.weight is None else float(row.values[columns.weight]) for row in rows]
    for row, found, weight in zip(rows, _token_lists(rows, columns, tokenizer, system_prompt), weights, strict=True):
        if isinstance(found, str):
            yield BadRow(row.place, found)
        else:
            ids, labels = (None if part is None else np.asarray(part, np.int32) for part in found)
            assert ids is not None
            yield Document(ids, labels, weight)


def _token_lists(
    rows: list[Row], columns: ColumnsSpec, folder: str | None, system_prompt: str | None
) -> Iterable[tuple[Any, Any] | str]:
    """Return tokens and labels of each row, or the reason why it cannot be trained on."""
    if columns.input_ids is not None:
        return [(row.values[columns.input_ids], columns.labels and row.values[columns.labels]) for row in rows]
    assert folder is not None
    tokenizer = load_tokenizer(folder)
    if columns.text is not None:
        return [(ids, None) for ids in tokenizer.encode([row.values[columns.text] for row in rows])]
    if columns.messages is not None:
        template = load_chat_template(folder)
        tools = (None if columns.tools is None else row.values.get(columns.tools) for row in rows)
        return [
            _or_reason(encode_chat, tokenizer, template, row.values[columns.messages], system_prompt, its)
            for row, its in zip(rows, tools, strict=True)
        ]
    assert columns.prompt is not None
    assert columns.response is not None
    return tokenizer.encode_responses([(row.values[columns.prompt], row.values[columns.response]) for row in rows])


def _or_reason(call: Callable[..., tuple[Any, Any]], *arguments: Any) -> tuple[Any, Any] | str:
    try:
        return call(*arguments)
    except ValueError as error:
        return str(error)


def is_text(value: Any) -> TypeGuard[str]:
    """Return whether a cell is text that can be written as UTF-8."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        # JSON can contain lone surrogates.
        return False


def _wrong_tokens(name: str, value: Any, vocab: int, *, ignored: bool) -> str | None:
    if not isinstance(value, np.ndarray) and not (
        isinstance(value, list) and all(type(token) is int for token in value)
    ):
        return f"column {name!r} holds {_kind(value)} where a list of whole numbers is needed"
    tokens = np.asarray(value)
    strange = (tokens < 0) | (tokens >= vocab)
    if ignored:
        strange &= tokens != IGNORE
    if not strange.any():
        return None
    place = int(strange.argmax())
    token = f"{value[place]} at position {place}"
    return f"column {name!r} holds {token}, which is not in the model's vocabulary of {vocab} tokens"


def _is_weight(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= _HEAVIEST


def _kind(value: Any) -> str:
    """Return a short description of a cell's value for error messages."""
    if value is None:
        return "null"
    if isinstance(value, int | float):
        return str(value)
    words: dict[type, str] = {
        str: "text that is not Unicode",
        bytes: "bytes that are not UTF-8",
        list: "a list",
        dict: "an object",
    }
    return words.get(type(value), type(value).__name__)
