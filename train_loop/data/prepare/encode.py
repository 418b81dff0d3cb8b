"""Rows of every format → documents of tokens, with labels for the trained tokens; encoded text ends with EOS."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

import numpy as np

from train_loop.data.class_names import class_numbers
from train_loop.data.dataset import IGNORE
from train_loop.data.prepare.packing import Document
from train_loop.data.prepare.rows import Row
from train_loop.data.text.chat import encode_chat, load_chat_templates
from train_loop.data.text.tokenizer import TextTokenizer, load_tokenizer
from train_loop.errors import DataError
from train_loop.spec import ColumnsSpec, DataSpec, LabelHeadSpec
from train_loop.spec.data import AddBos

T = TypeVar("T")
Ids = TypeVar("Ids")
_HEAVIEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class BadRow:
    """A row that cannot be trained on."""

    place: int
    """Position of the row, as in `Row.place`."""
    reason: str


Encoded = Document | BadRow


@dataclass(frozen=True)
class TextRules:
    """The rules of a spec that turn text into tokens."""

    tokenizer: str
    """Folder of the tokenizer."""
    system_prompt: str | None = None
    chat_template: str | None = None
    add_bos: AddBos = "auto"
    day: date | None = None
    """Date that chat templates write, by default today's."""
    plain: bool = False
    """True if text gets the special tokens of its tokenizer alone, without EOS."""

    @classmethod
    def of(cls, data: DataSpec, tokenizer: Path, *, plain: bool = False) -> "TextRules":
        """Return the rules of a spec's data with a tokenizer folder."""
        return cls(str(tokenizer), data.system_prompt, data.chat_template, data.add_bos, plain=plain)

    def load(self) -> TextTokenizer:
        """Load the tokenizer. Raises DataError if it is unusable."""
        return load_tokenizer(self.tokenizer, needs_eos=not self.plain).adding_bos(self.add_bos)

    @property
    def kept(self) -> tuple[int | None, int | None]:
        """Return the first and the last token that truncated documents keep: of plain text, those of its tokenizer."""
        loaded = self.load()
        if not self.plain:
            return loaded.bos, None
        return next(iter(loaded.prefix), None), next(iter(loaded.suffix[::-1]), None)


def encode_rows(
    rows: list[Row],
    columns: ColumnsSpec,
    *,
    vocab: int,
    rules: TextRules | None = None,
    head: LabelHeadSpec | None = None,
) -> list[Encoded]:
    """Return a document for every row, or a BadRow if the row cannot be trained on.

    `rules` are needed for rows of text, and `head` for rows with labels of a head.
    """
    encoded: dict[int, Encoded] = {}
    rows, good = numbered(rows, columns, head), []
    for number, row in enumerate(rows):
        wrong = problem_of(row, columns, vocab, head)
        if wrong:
            encoded[number] = BadRow(row.place, wrong)
        else:
            good.append(number)
    for number, document in zip(good, _documents([rows[n] for n in good], columns, vocab, rules), strict=True):
        encoded[number] = document
    return [encoded[number] for number in range(len(rows))]


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


def problem_of(row: Row, columns: ColumnsSpec, vocab: int, head: LabelHeadSpec | None = None) -> str | None:
    """Return the reason why a row cannot be trained on; None if nothing is wrong before tokenisation."""
    if row.wrong is not None:
        return row.wrong
    values = row.values
    for name in (columns.text, columns.prompt, columns.response):
        if name is not None and not is_text(values[name]):
            return f"column {name!r} holds {_kind(values[name])} where text is needed"
    if columns.input_ids is not None:
        for name in filter(None, (columns.input_ids, columns.labels)):
            classes = head.classes if head is not None and name == columns.labels else None
            known = (
                f"in the model's vocabulary of {vocab} tokens" if classes is None else f"below head.labels={classes}"
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


def _documents(rows: list[Row], columns: ColumnsSpec, vocab: int, rules: TextRules | None) -> Iterator[Encoded]:
    weights, targets = (
        [None if name is None else float(row.values[name]) for row in rows] for name in (columns.weight, columns.label)
    )
    lists = _token_lists(rows, columns, vocab, rules)
    for row, found, weight, target in zip(rows, lists, weights, targets, strict=True):
        if isinstance(found, str):
            yield BadRow(row.place, found)
        else:
            ids, labels = (None if part is None else np.asarray(part, np.int32) for part in found[:2])
            assert ids is not None
            yield Document(ids, labels, weight, target, *found[2:])


def _token_lists(
    rows: list[Row], columns: ColumnsSpec, vocab: int, rules: TextRules | None
) -> Iterator[tuple[Any, ...] | str]:
    """Yield the parts of a document for each row, or the reason why it cannot be trained on."""
    if columns.input_ids is not None:
        yield from ((row.values[columns.input_ids], columns.labels and row.values[columns.labels]) for row in rows)
        return
    assert rules is not None
    tokenizer = rules.load()
    for found in _tokenised(tokenizer, rows, columns, rules):
        wrong = None if isinstance(found, str) else tokenizer.why_absent(found[0], vocab)
        yield found if wrong is None else wrong


def _tokenised(
    tokenizer: TextTokenizer, rows: list[Row], columns: ColumnsSpec, rules: TextRules
) -> Iterable[tuple[Any, ...] | str]:
    if columns.text is not None:
        # A label is read from the last token, which transformers' tokenizers do not follow by EOS.
        encode = tokenizer.encode_plainly if rules.plain or columns.label else tokenizer.encode
        return [
            found if isinstance(found, str) else (found, None)
            for found in _all_or_each(encode, [row.values[columns.text] for row in rows])
        ]
    if columns.messages is not None:
        templates = load_chat_templates(rules.tokenizer, rules.chat_template, rules.day)
        tools = (None if columns.tools is None else row.values.get(columns.tools) for row in rows)
        return [
            _or_reason(encode_chat, tokenizer, templates, row.values[columns.messages], rules.system_prompt, its)
            for row, its in zip(rows, tools, strict=True)
        ]
    assert columns.prompt is not None
    assert columns.response is not None
    pairs = [(row.values[columns.prompt], row.values[columns.response]) for row in rows]
    return _all_or_each(tokenizer.encode_responses, pairs)


def _all_or_each(encode: Callable[[list[T]], list[Ids]], texts: list[T]) -> list[Ids | str]:
    """Return the result of each text; if the tokenizer rejects one, the reason in its place."""
    try:
        return list(encode(texts))
    except DataError:
        return [_or_reason(lambda text: encode([text])[0], text) for text in texts]


def _or_reason(call: Callable[..., Ids], *arguments: Any) -> Ids | str:
    try:
        return call(*arguments)
    except ValueError as error:
        return str(error)
    except RecursionError:
        return "a value of the row is nested too deeply; write it with fewer levels"


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
