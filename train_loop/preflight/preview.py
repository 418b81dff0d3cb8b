"""Preview of data preparation: the first rows of each source, prepared before the job runs."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from train_loop.data.prepare.boundaries import Boundaries, no_end_token
from train_loop.data.prepare.cells import numbered, problem_of
from train_loop.data.prepare.encode import BadRow, Encoded, TextRules, encode_rows
from train_loop.data.prepare.fit import Fate, Fit, Place, check_rows, explain_cut
from train_loop.data.prepare.packing import Document
from train_loop.data.prepare.rows import Row, cut, locate, read_piece
from train_loop.data.prepare.sources import SourceFile, list_files
from train_loop.data.text.chat import left_out, load_chat_templates
from train_loop.data.text.messages import Conversation, has_text_arguments, read_conversation
from train_loop.errors import DataError
from train_loop.model.folder import model_shape, tokenizer_folder
from train_loop.plan import Preview
from train_loop.preflight.wasted import trains, unused_columns, why_untrained
from train_loop.spec import ColumnsSpec, JobSpec, LabelHeadSpec, SourceSpec

PREVIEWED_SOURCES = 8
"""Maximum number of sources of a spec that are previewed."""
_ROWS = 64
_PIECE_BYTES = 2**20
_MOST_CHARACTERS = 4 * 2**20
"""Maximum size of the previewed rows of a source, in characters or tokens: long rows take seconds to tokenise."""


_BEGINNING = 200
"""Characters of a text whose first tokens are compared."""


@dataclass(frozen=True)
class _FirstRows:
    """The first rows of a source, as preparation encodes and fits them."""

    rows: list[Row]
    places: list[Place]
    encoded: list[Encoded]
    fit: Fit
    files: list[SourceFile]
    are_all: bool
    """Whether the source has no other rows."""
    columns: ColumnsSpec

    @cached_property
    def fitted(self) -> list[tuple[Document, Fate]]:
        """The documents after the rules for long and untrained rows, with their fates."""
        return [self.fit(row) for row in self.encoded if not isinstance(row, BadRow)]

    @property
    def documents(self) -> list[Document]:
        """The documents that become samples."""
        return [document for document, _ in self.fitted if len(document.input_ids)]

    @property
    def wasted(self) -> list[str]:
        """The reason of each good row with tokens that trains nothing, unless it is dropped as too long."""
        each = zip(self.rows, self.encoded, strict=True)
        good = [(row, found) for row, found in each if not isinstance(found, BadRow)]
        return [
            why_untrained(row, self.columns, cut=found.longest > self.fit.length)
            for (row, found), (document, fate) in zip(good, self.fitted, strict=True)
            if len(found.input_ids) and fate != "dropped" and not trains(document, self.columns)
        ]

    @property
    def bad(self) -> list[tuple[Place, str]]:
        """Place and reason of each bad row."""
        placed = zip(self.places, self.encoded, strict=True)
        return [(place, row.reason) for place, row in placed if isinstance(row, BadRow)]

    @property
    def long(self) -> int:
        """Number of rows that are longer than a sample."""
        return self.count("long") + self.count("dropped")

    def count(self, wanted: Fate) -> int:
        """Return the number of documents with a fate."""
        return sum(fate == wanted for _, fate in self.fitted)


def preview_source(spec: JobSpec, source: SourceSpec) -> Preview | None:
    """Return the effects of preparation on a source's first rows; None if these are good and have no tokenizer yet.

    Raises DataError for a row that would end the job, and OSError for unreadable files.
    """
    columns = spec.data.columns_of(source)
    # The folder of a model for tokenised rows may have no tokenizer.
    folder = None if columns.tokenised else tokenizer_folder(spec)
    rules = None if folder is None else TextRules.of_spec(spec, folder)
    first, name = _encode_first(spec, source, rules), ", ".join(source.paths)
    check_rows(first.encoded, first.places, first.fit, skip=spec.data.on_bad_rows == "skip")
    notes = list(_row_notes(first))
    boundaries = None if rules is None else _boundaries(first, rules)
    _check_some_train(first, name, "; ".join(notes))
    if rules is None and not columns.tokenised and not first.bad:
        return None
    without = rules is None or rules.plain or columns.messages or columns.label or columns.sequences
    if rules is not None and not without and (count := _ended(columns, rules, first.rows)):
        notes.append(f"{count} of the first {len(first.rows)} rows end with EOS already and get no second one")
    if rules is not None and (count := _begun(columns, rules, first.rows)):
        what = "BOS" if rules.load().bos in rules.load().prefix else "the tokenizer's special tokens"
        notes.append(f"{count} of the first {len(first.rows)} rows begin with {what} already and get no second one")
    if columns.messages is not None and rules is not None and boundaries is not None:
        notes += _chat_notes(columns, rules, first.rows)
        if boundaries.sample_without_end is not None:
            warning = f"{no_end_token(boundaries.sample_without_end)}{explain_cut(first.fit.rule, first.long)}"
            notes.append(f"in the first {len(first.rows)} rows, {warning}")
    return Preview(
        name,
        rows=len(first.rows),
        bad_rows=len(first.bad),
        long_rows=first.long,
        untrained_rows=first.count("untrained"),
        on_long_rows=first.fit.rule,
        begins_with_bos=None if boundaries is None else boundaries.begins_with_bos,
        notes=tuple(f"{name}: {note}" for note in notes),
    )


def _check_some_train(first: _FirstRows, name: str, reason: str) -> None:
    """Raise DataError if no row is left, or if none trains anything and none is too long, which hides what it has."""
    if first.are_all and not first.documents:
        reason = reason or "all rows are empty"
        raise DataError(f"{name} holds no tokens: {reason}; an empty dataset cannot be trained on")
    if first.wasted and not first.long and not any(trains(one, first.columns) for one in first.documents):
        raise DataError(f"none of the first {len(first.rows)} rows of {name} trains anything: {reason}; correct them")


def _encode_first(spec: JobSpec, source: SourceSpec, rules: TextRules | None) -> _FirstRows:
    """Return the first rows of a source; without `rules`, rows of text are only judged."""
    columns, vocab = spec.data.columns_of(source), model_shape(spec.model).vocab
    files = list_files(source)
    placed, are_all = _first_rows(files, columns)
    rows = [row for _, row in placed]
    if rules is None and not columns.tokenised:
        head = spec.model.label_head
        encoded = [_judged(row, columns, vocab, head) for row in numbered(rows, columns, head)]
    else:
        encoded = encode_rows(rows, columns, vocab=vocab, rules=rules, head=spec.model.label_head)
    fit = Fit.of(spec, columns, rules)
    return _FirstRows(rows, [place for place, _ in placed], encoded, fit, files, are_all, columns)


def _boundaries(first: _FirstRows, rules: TextRules) -> Boundaries:
    """Return the first and last tokens of the documents that become samples."""
    boundaries = Boundaries(rules.load())
    for document in first.documents:
        boundaries.see(document)
    return boundaries


def _row_notes(first: _FirstRows) -> Iterator[str]:
    """Yield a sentence for each kind of row that is left out or cut."""
    of_rows, wasted = f"of the first {len(first.rows)} rows", first.wasted
    for place, reason in first.bad[:1]:
        (where,) = locate([place])
        yield f"{len(first.bad)} {of_rows} cannot be trained on and are skipped, the first because {where}: {reason}"
    if first.long and first.fit.rule != "split":
        fates = {"truncate": "are truncated to it, so their ends are not trained", "truncate_left": "lose their starts"}
        fate = fates.get(first.fit.rule, "are dropped")
        yield f"{first.long} {of_rows} are longer than sequence_length={first.fit.length} and {fate}; see on_long_rows"
    if wasted:
        dropped = " and are dropped" if first.fit.drops_untrained else ""
        yield f"{len(wasted)} {of_rows} have no token that is trained{dropped}, the first because {wasted[0]}"
    yield from unused_columns(first.files, first.columns, first.rows)


def _first_rows(files: Sequence[SourceFile], columns: ColumnsSpec) -> tuple[list[tuple[Place, Row]], bool]:
    """Return the first rows of the first files, up to a limit of number and size, and whether these are all rows."""
    found, room = list[tuple[Place, Row]](), _MOST_CHARACTERS
    for place, row in _all_rows(files, columns):
        room -= sum(_size(row.values[name]) for name in columns.names if name in row.values)
        if room < 0 or len(found) == _ROWS:
            return found, False
        found.append((place, row))
    return found, not any(_is_skipped(file) or len(cut([file], _PIECE_BYTES)) > 1 for file in files)


def _all_rows(files: Sequence[SourceFile], columns: ColumnsSpec) -> Iterator[tuple[Place, Row]]:
    """Yield rows from the start of each file, file by file; a text file is one row."""
    for file in files:
        if _is_skipped(file):
            continue
        for piece in cut([file], _PIECE_BYTES)[:1]:
            for chunk in read_piece(piece, columns):
                yield from (((file, row.place), row) for row in chunk.rows)


def _is_skipped(file: SourceFile) -> bool:
    """Return whether a file is not previewed: a text file is read as a whole."""
    return file.format == "text" and file.size > _MOST_CHARACTERS


def _size(cell: Any) -> int:
    if isinstance(cell, dict):
        return sum(map(_size, cell.values()))
    if isinstance(cell, list):
        return sum(map(_size, cell))
    return len(cell) if hasattr(cell, "__len__") else 1


def _judged(row: Row, columns: ColumnsSpec, vocab: int, head: LabelHeadSpec | None) -> Encoded:
    """Return a BadRow if a row is bad with any tokenizer, else a document of one token in place of the unknown ones."""
    wrong = problem_of(row, columns, vocab, head)
    if not wrong and columns.chosen is not None and isinstance(row.values[columns.chosen], list):
        wrong = (
            f"column {columns.chosen!r} holds a conversation, which needs a chat template, and a tokenizer that is "
            "trained on the data has none; name a tokenizer in model.tokenizer"
        )
    return BadRow(row.place, wrong) if wrong else Document(np.zeros(1, np.int32))


def _ended(columns: ColumnsSpec, rules: TextRules, rows: list[Row]) -> int:
    """Return the number of rows whose own text ends with the tokenizer's EOS."""
    eos, name = str(rules.load().variables["eos_token"]), str(columns.text or columns.response)
    return sum(str(row.values.get(name)).endswith(eos) for row in rows)


def _begun(columns: ColumnsSpec, rules: TextRules, rows: list[Row]) -> int:
    """Return the number of rows with a text that begins with the special tokens that the tokenizer writes before it."""
    if columns.messages is not None:
        return 0
    tokenizer, names = rules.load(), columns.texts if columns.prompt is None else [columns.prompt]
    cells = ([row.values.get(name) for name in names] for row in rows)
    return sum(any(isinstance(one, str) and tokenizer.begins(one[:_BEGINNING]) for one in some) for some in cells)


def _chat_notes(columns: ColumnsSpec, rules: TextRules, rows: list[Row]) -> list[str]:
    """Return what a user should know of the tools of conversations, and of their arguments."""
    notes = []
    if columns.tools is not None and not load_chat_templates(rules.tokenizer, rules.chat_template).use_tools:
        notes += [f"the chat template does not use the tools of column {columns.tools!r}; choose a template that does"]
    if columns.tools is None and any(row.values.get("tools") for row in rows):
        notes += ["the column 'tools' is not used; name it in columns.tools to show it to the chat template"]
    good = [row.values.get(str(columns.messages)) for row in rows if _conversation(columns, row) is not None]
    if count := sum(isinstance(cell, str) for cell in good):
        notes += [f"{count} of the first {len(rows)} rows have messages as JSON text; they are read as lists"]
    if count := sum(map(has_text_arguments, good)):
        notes += [f"{count} of the first {len(rows)} rows have tool arguments as JSON text; they are read as objects"]
    absent = [value for value in (_left_out(columns, rules, row) for row in rows) if value is not None]
    if absent:
        notes += [f"in {len(absent)} of the first {len(rows)} rows the chat template leaves out a value: {absent[0]}"]
    return notes


def _conversation(columns: ColumnsSpec, row: Row) -> Conversation | None:
    """Return the conversation of a row; None for a bad row."""
    with suppress(DataError):
        return read_conversation(row.values.get(str(columns.messages)))
    return None


def _left_out(columns: ColumnsSpec, rules: TextRules, row: Row) -> str | None:
    """Return a value of a good conversation that the chat template leaves out; None if it has all."""
    templates = load_chat_templates(rules.tokenizer, rules.chat_template)
    messages, tools = (row.values.get(str(name)) for name in (columns.messages, columns.tools))
    with suppress(DataError, RecursionError):
        return left_out(templates, messages, rules.system_prompt, tools)
    return None
