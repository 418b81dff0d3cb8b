"""Rows of every format → documents of tokens, with labels for the trained tokens; encoded text ends with EOS."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from train_loop.data.prepare.cells import numbered, problem_of
from train_loop.data.prepare.packing import Document
from train_loop.data.prepare.rows import Row
from train_loop.data.text.chat import ChatTemplates, encode_chat, encode_prompt, encode_whole, load_chat_templates
from train_loop.data.text.tokenizer import TextTokenizer, load_tokenizer
from train_loop.errors import DataError
from train_loop.spec import ColumnsSpec, DataSpec, JobSpec, LabelHeadSpec
from train_loop.spec.data import AddBos, Chats

T = TypeVar("T")
Ids = TypeVar("Ids")


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
    chats: Chats = "trained"

    @classmethod
    def of(cls, data: DataSpec, tokenizer: Path, *, plain: bool = False) -> "TextRules":
        """Return the rules of a spec's data with a tokenizer folder."""
        return cls(str(tokenizer), data.system_prompt, data.chat_template, data.add_bos, plain=plain)

    @classmethod
    def of_spec(cls, spec: JobSpec, tokenizer: Path) -> "TextRules":
        """Return the rules of a spec with a tokenizer folder."""
        return replace(cls.of(spec.data, tokenizer, plain=not spec.model.ends_text), chats=spec.chats)

    def load(self) -> TextTokenizer:
        """Load the tokenizer. Raises DataError if it is unusable."""
        loaded = load_tokenizer(self.tokenizer, needs_eos=not self.plain).adding_bos(self.add_bos)
        # Nothing ends a prompt, which the model continues.
        return replace(loaded, suffix=()) if self.chats == "prompt" else loaded

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


def _documents(rows: list[Row], columns: ColumnsSpec, vocab: int, rules: TextRules | None) -> Iterator[Encoded]:
    weights, targets = (
        [None if name is None else float(row.values[name]) for row in rows]
        for name in (columns.weight, columns.label or columns.margin)
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
    if columns.sequences:
        yield from _together(rows, columns, vocab, rules)
        return
    if columns.input_ids is not None:
        yield from ((row.values[columns.input_ids], columns.labels and row.values[columns.labels]) for row in rows)
        return
    assert rules is not None
    tokenizer = rules.load()
    for found in _tokenised(tokenizer, rows, columns, rules):
        wrong = None if isinstance(found, str) else tokenizer.why_absent(found[0], vocab)
        yield found if wrong is None else wrong


def _together(
    rows: list[Row], columns: ColumnsSpec, vocab: int, rules: TextRules | None
) -> Iterator[tuple[Any, ...] | str]:
    """Yield the parts of a document for each row of sequences that stay together, or the reason of a bad row."""
    count, tokenizer = len(columns.sequences), None if rules is None else rules.load()
    cells = [_after_prompt(row, columns, name) for row in rows for name in columns.sequences]
    found = cells if rules is None or tokenizer is None else _pair_tokens(tokenizer, rules, rows, columns, cells)
    for start in range(0, len(found), count):
        reason, several = None, found[start : start + count]
        for name, one in zip(columns.sequences, several, strict=True):
            why = one if isinstance(one, str) else "it has no tokens but padding" if not len(one) else None
            if why is None and tokenizer is not None:
                why = tokenizer.why_absent(one, vocab)
            reason = reason or (why and f"column {name!r}: {why}")
        yield reason or (np.concatenate(several), None, frozenset(), tuple(map(len, several)))


def _after_prompt(row: Row, columns: ColumnsSpec, name: str) -> Any:
    """Return a cell after that of its prompt: text, messages or token ids."""
    cell = row.values[name]
    if columns.token_ids:
        cell = np.asarray(cell, np.int32)
    if columns.prompt is None:
        return cell
    before = row.values[columns.prompt]
    return np.concatenate([np.asarray(before, np.int32), cell]) if columns.token_ids else before + cell


def _pair_tokens(
    tokenizer: TextTokenizer, rules: TextRules, rows: list[Row], columns: ColumnsSpec, cells: list[Any]
) -> list[Any]:
    """Return the token ids of the texts and conversations of pairs, or the reason in their place.

    Texts to embed have the tokens of transformers' tokenizer. Others are read as by TRL, whose rewards are those of the
    last token that is not padding.
    """
    if columns.anchor is not None:
        return _all_or_each(tokenizer.encode_plainly, cells)
    pad = tokenizer.eos if tokenizer.pad is None else tokenizer.pad
    tools = [
        None if columns.tools is None else row.values.get(columns.tools) for row in rows for _ in columns.sequences
    ]
    texts: list[list[int] | str] = _all_or_each(tokenizer.encode, [cell for cell in cells if isinstance(cell, str)])

    def encode(messages: Any, its: Any) -> list[int]:
        templates = load_chat_templates(rules.tokenizer, rules.chat_template, rules.day)
        return encode_whole(tokenizer, templates, messages, rules.system_prompt, its)

    rest = iter(texts)
    found = [
        next(rest) if isinstance(cell, str) else _or_reason(encode, cell, its)
        for cell, its in zip(cells, tools, strict=True)
    ]
    return [one if isinstance(one, str) else without_end(one, pad) for one in found]


def without_end(ids: list[int], token: int) -> list[int]:
    """Return token ids without those at their end that are a token."""
    stop = len(ids)
    while stop and ids[stop - 1] == token:
        stop -= 1
    return ids[:stop]


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
            _or_reason(_encode_chat, tokenizer, templates, row.values[columns.messages], rules, its)
            for row, its in zip(rows, tools, strict=True)
        ]
    assert columns.prompt is not None
    assert columns.response is not None
    pairs = [(row.values[columns.prompt], row.values[columns.response]) for row in rows]
    return _all_or_each(tokenizer.encode_responses, pairs)


def _encode_chat(
    tokenizer: TextTokenizer, templates: ChatTemplates, messages: Any, rules: TextRules, tools: Any
) -> tuple[Any, ...]:
    """Return the parts of a document of a conversation: with labels if it is trained. Raises DataError."""
    if rules.chats == "trained":
        return encode_chat(tokenizer, templates, messages, rules.system_prompt, tools)
    encode = encode_prompt if rules.chats == "prompt" else encode_whole
    return encode(tokenizer, templates, messages, rules.system_prompt, tools), None


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
