"""The cells of a row: names of classes become numbers, and the reason why a row cannot be trained on is found."""

from dataclasses import replace
from typing import Any, TypeGuard

import numpy as np

from train_loop.data.class_names import class_numbers
from train_loop.data.dataset import IGNORE
from train_loop.data.prepare.rows import Row
from train_loop.spec import ColumnsSpec, LabelHeadSpec

_HEAVIEST = float(np.finfo(np.float32).max)


def problem_of(row: Row, columns: ColumnsSpec, vocab: int, head: LabelHeadSpec | None = None) -> str | None:
    """Return the reason why a row cannot be trained on; None if nothing is wrong before tokenisation."""
    if row.wrong is not None:
        return row.wrong
    values = row.values
    if columns.sequences:
        return _pair_problem(values, columns, vocab)
    for name in columns.texts:
        if not is_text(values[name]):
            return f"column {name!r} holds {_kind(values[name])} where text is needed"
    if columns.input_ids is not None:
        for name in filter(None, (columns.input_ids, columns.labels)):
            classes = head.classes if head is not None and name == columns.labels else None
            known = (
                f"in the model's vocabulary of {vocab} tokens"
                if classes is None
                else f"a class from 0 to {classes - 1}, nor {IGNORE}"
            )
            wrong = _wrong_tokens(name, values[name], range(classes or vocab), known, ignored=name == columns.labels)
            if wrong:
                return wrong
        if columns.labels is not None and len(values[columns.input_ids]) != len(values[columns.labels]):
            ids, labels = len(values[columns.input_ids]), len(values[columns.labels])
            return f"{ids} tokens and {labels} labels; they must be aligned"
    if columns.label is not None and head is not None and not _is_label(values[columns.label], head.classes):
        wanted = "a finite number" if head.classes is None else f"a whole number from 0 to {head.classes - 1}"
        return f"column {columns.label!r} holds {_kind(values[columns.label])} where {wanted} is needed"
    if columns.weight is not None and not _is_weight(values[columns.weight]):
        return f"column {columns.weight!r} holds {_kind(values[columns.weight])} where a weight of 0 or more is needed"
    return None


def _pair_problem(values: dict[str, Any], columns: ColumnsSpec, vocab: int) -> str | None:
    """Return the reason why sequences that stay together cannot be trained on, as `problem_of`."""
    known, first = f"in the model's vocabulary of {vocab} tokens", columns.sequences[0]
    is_chat = columns.may_chat and isinstance(values[first], list)
    for name in columns.texts:
        cell = values[name]
        if columns.token_ids:
            wrong = _wrong_tokens(name, cell, range(vocab), known, ignored=False)
            if wrong is not None:
                return wrong
        elif not (isinstance(cell, list) if is_chat else is_text(cell)):
            wanted = f"a list of messages as in column {first!r}" if is_chat else "text"
            return f"column {name!r} holds {_kind(cell)} where {wanted} is needed"
        if name != columns.prompt and not is_text(cell) and not len(cell):
            return f"column {name!r} holds an empty list"
    if columns.margin is not None and not _is_label(values[columns.margin], None):
        return f"column {columns.margin!r} holds {_kind(values[columns.margin])} where a finite number is needed"
    return None


def is_text(value: Any) -> TypeGuard[str]:
    """Return whether a cell is text that can be written as UTF-8."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        # JSON can contain lone surrogates.
        return False


def _wrong_tokens(name: str, value: Any, allowed: range, known: str, *, ignored: bool) -> str | None:
    if not isinstance(value, np.ndarray | list):
        return f"column {name!r} holds {_kind(value)} where a list of whole numbers is needed"
    if isinstance(value, list) and not all(type(token) is int for token in value):
        place = next(number for number, token in enumerate(value) if type(token) is not int)
        return f"column {name!r} holds {_kind(value[place])} at position {place}, where a whole number is needed"
    tokens = np.asarray(value)
    strange = (tokens < 0) | (tokens >= allowed.stop)
    if ignored:
        strange &= tokens != IGNORE
    if not strange.any():
        return None
    place = int(strange.argmax())
    token = f"{value[place]} at position {place}"
    return f"column {name!r} holds {token}, which is not {known}"


def _is_label(value: Any, classes: int | None) -> bool:
    if classes is None:
        return type(value) in (int, float) and abs(value) <= _HEAVIEST
    return type(value) in (int, float) and value in range(classes)


def _is_weight(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= _HEAVIEST


def _kind(value: Any) -> str:
    """Return a short description of a cell's value for error messages."""
    if value is None:
        return "null"
    if isinstance(value, int | float):
        return str(value)
    words: dict[type, str] = {
        str: "text" if is_text(value) else "text that is not Unicode",
        bytes: "bytes that are not UTF-8",
        list: "a list",
        dict: "an object",
    }
    return words.get(type(value), type(value).__name__)


def numbered(rows: list[Row], columns: ColumnsSpec, head: LabelHeadSpec | None) -> list[Row]:
    """Return rows with the numbers of classes in place of their names; a row with an unknown name is wrong."""
    column = columns.label or columns.labels
    if head is None or head.classes is None or column is None:
        return rows

    def number(row: Row) -> Row:
        try:
            return replace(row, values={**row.values, column: class_numbers(row.values[column], head.names)})
        except ValueError as error:
            return replace(row, values={}, wrong=f"column {column!r} holds {error}")

    return [row if row.wrong is not None else number(row) for row in rows]
