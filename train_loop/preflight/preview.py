"""Preview of data preparation: the first rows of each source, prepared before the job runs."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

import numpy as np

from train_loop.data.prepare.boundaries import Boundaries, no_end_token
from train_loop.data.prepare.encode import BadRow, Encoded, TextRules, encode_rows, is_text
from train_loop.data.prepare.fit import Fit
from train_loop.data.prepare.judge import Place, check_rows
from train_loop.data.prepare.packing import Document
from train_loop.data.prepare.rows import Row, cut, locate, read_piece
from train_loop.data.prepare.sources import list_files
from train_loop.data.text.chat import left_out, load_chat_templates
from train_loop.data.text.messages import has_text_arguments
from train_loop.errors import DataError
from train_loop.model.folder import model_shape, tokenizer_folder
from train_loop.plan import Preview
from train_loop.spec import ColumnsSpec, JobSpec, SourceSpec

PREVIEWED_SOURCES = 8
"""Maximum number of sources of a spec that are previewed."""
_ROWS = 64
_PIECE_BYTES = 2**20
_MOST_CHARACTERS = 4 * 2**20
"""Maximum size of the previewed rows of a source, in characters or tokens: long rows take seconds to tokenise."""


def preview_source(spec: JobSpec, source: SourceSpec) -> Preview | None:
    """Return the effects of preparation on a source's first rows; None if their tokenizer is yet to be trained.

    Raises DataError for a row that would end the job, and OSError for unreadable files.
    """
    data, columns, folder = spec.data, spec.data.columns_of(source), tokenizer_folder(spec)
    placed = list(_first_rows(source, columns))
    places, rows = [place for place, _ in placed], [row for _, row in placed]
    fit, skip, vocab = Fit.of(data, columns), data.on_bad_rows == "skip", model_shape(spec.model).vocab
    if folder is None and not columns.tokenised:
        check_rows([_judged(row, columns) for row in rows], places, fit, skip=skip)
        return None
    rules = None if folder is None or columns.tokenised else TextRules.of(data, folder)
    encoded = encode_rows(rows, columns, vocab=vocab, rules=rules)
    check_rows(encoded, places, fit, skip=skip)
    _check_vocabulary(encoded, places, vocab)
    name, boundaries = ", ".join(source.paths), _boundaries(encoded, rules)
    notes = list(_row_notes(encoded, places, fit))
    if columns.messages is not None and rules is not None and boundaries is not None:
        notes += _chat_notes(columns, rules, rows, boundaries.sample_without_end)
    bad, long, untrained = _counts(encoded, fit)
    begins = boundaries is not None and boundaries.begins_with_bos
    notes = [f"{name}: {note}" for note in notes]
    return Preview(name, len(rows), bad, long, untrained, fit.rule, begins, tuple(notes))


def _boundaries(encoded: Sequence[Encoded], rules: TextRules | None) -> Boundaries | None:
    """Return the first and last tokens of the documents; None for tokenised rows."""
    if rules is None:
        return None
    boundaries = Boundaries(rules.load())
    for row in encoded:
        if not isinstance(row, BadRow):
            boundaries.see(row)
    return boundaries


def _counts(encoded: Sequence[Encoded], fit: Fit) -> tuple[int, int, int]:
    """Return the numbers of bad rows, of rows longer than a sample, and of rows without a trained token."""
    documents = [row for row in encoded if not isinstance(row, BadRow)]
    long = sum(len(row.input_ids) > fit.length for row in documents)
    return len(encoded) - len(documents), long, sum(fit(row)[1] == "untrained" for row in documents)


def _row_notes(encoded: Sequence[Encoded], places: Sequence[Place], fit: Fit) -> Iterator[str]:
    """Yield a sentence for each kind of row that is left out or cut."""
    bad, long, untrained = _counts(encoded, fit)
    of_rows = f"of the first {len(encoded)} rows"
    reasons = ((place, row.reason) for place, row in zip(places, encoded, strict=True) if isinstance(row, BadRow))
    for place, reason in islice(reasons, 1):
        (where,) = locate([place])
        yield f"{bad} {of_rows} cannot be trained on and are skipped, the first because {where}: {reason}"
    if long and fit.rule != "split":
        fate = "are dropped" if fit.rule == "drop" else "are truncated to it"
        yield f"{long} {of_rows} are longer than sequence_length={fit.length} and {fate}; see on_long_rows"
    if untrained:
        yield f"{untrained} {of_rows} have no token that is trained and are dropped"


def _first_rows(source: SourceSpec, columns: ColumnsSpec) -> Iterator[tuple[Place, Row]]:
    """Yield the first rows of the first files, with their places, up to a limit of their number and of their size."""
    room = _MOST_CHARACTERS
    for place, row in islice(_all_rows(source, columns), _ROWS):
        room -= sum(_size(row.values[name]) for name in columns.names if name in row.values)
        if room < 0:
            return
        yield place, row


def _all_rows(source: SourceSpec, columns: ColumnsSpec) -> Iterator[tuple[Place, Row]]:
    """Yield rows from the start of each file, file by file; a text file is one row."""
    for file in list_files(source):
        if file.format == "text" and file.size > _MOST_CHARACTERS:
            continue  # a text file is read as a whole
        for piece in cut([file], _PIECE_BYTES)[:1]:
            for chunk in read_piece(piece, columns):
                yield from (((file, row.place), row) for row in chunk.rows)


def _size(cell: Any) -> int:
    if isinstance(cell, dict):
        return sum(map(_size, cell.values()))
    if isinstance(cell, list):
        return sum(map(_size, cell))
    return len(cell) if hasattr(cell, "__len__") else 1


def _judged(row: Row, columns: ColumnsSpec) -> Encoded:
    """Return a BadRow if a row is bad with any tokenizer, else an empty document."""
    names = filter(None, (columns.text, columns.prompt, columns.response))
    wrong = row.wrong or next(
        (f"column {name!r} does not hold text" for name in names if not is_text(row.values[name])), None
    )
    return BadRow(row.place, wrong) if wrong else Document(np.empty(0, np.int32))


def _check_vocabulary(encoded: Sequence[Encoded], places: Sequence[Place], vocab: int) -> None:
    """Raise DataError for the first row with a token that the model does not have."""
    for row, place in zip(encoded, places, strict=True):
        highest = -1 if isinstance(row, BadRow) else int(row.input_ids.max(initial=-1))
        if highest >= vocab:
            (where,) = locate([place])
            raise DataError(
                f"{where}: the tokenizer makes token {highest} of the row, and the model has vocab_size={vocab}; raise "
                f"vocab_size to {highest + 1} or more, or give the model's own tokenizer"
            )


def _chat_notes(columns: ColumnsSpec, rules: TextRules, rows: list[Row], sample: str | None) -> list[str]:
    """Return what a user should know of conversations: tools, their arguments, and the ends of turns."""
    notes = []
    if columns.tools is not None and not load_chat_templates(rules.tokenizer, rules.chat_template).use_tools:
        notes += [f"the chat template does not use the tools of column {columns.tools!r}; choose a template that does"]
    if columns.tools is None and any(row.values.get("tools") for row in rows):
        notes += ["the column 'tools' is not used; name it in columns.tools to show it to the chat template"]
    if count := sum(has_text_arguments(row.values.get(str(columns.messages))) for row in rows):
        notes += [f"{count} of the first {len(rows)} rows have tool arguments as JSON text; they are read as objects"]
    absent = [value for value in (_left_out(columns, rules, row) for row in rows) if value is not None]
    if absent:
        notes += [f"in {len(absent)} of the first {len(rows)} rows the chat template leaves out a value: {absent[0]}"]
    return notes if sample is None else [*notes, f"in the first {len(rows)} rows, {no_end_token(sample)}"]


def _left_out(columns: ColumnsSpec, rules: TextRules, row: Row) -> str | None:
    """Return a value of a good conversation that the chat template leaves out; None if it has all."""
    templates = load_chat_templates(rules.tokenizer, rules.chat_template)
    messages, tools = (row.values.get(str(name)) for name in (columns.messages, columns.tools))
    with suppress(DataError, RecursionError):
        return left_out(templates, messages, rules.system_prompt, tools)
    return None
