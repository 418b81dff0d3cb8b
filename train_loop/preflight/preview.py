"""Preview of data preparation: counts for the first rows of each source, before the job runs."""

from itertools import islice
from typing import Any

from train_loop.data.prepare.boundaries import Boundaries, no_end_token
from train_loop.data.prepare.encode import BadRow, TextRules, encode_rows
from train_loop.data.prepare.fit import Fit
from train_loop.data.prepare.rows import Row, cut, read_piece
from train_loop.data.prepare.sources import list_files
from train_loop.data.text.chat import load_chat_templates
from train_loop.data.text.messages import has_text_arguments
from train_loop.model.folder import model_shape, tokenizer_folder
from train_loop.plan import Preview
from train_loop.spec import ColumnsSpec, JobSpec, SourceSpec

_ROWS, _SOURCES = 64, 8
_PIECE_BYTES = 2**20
_LARGEST_TEXT = 16 * 2**20


def preview_data(spec: JobSpec) -> list[Preview]:
    """Return the counts of each source of text.

    Empty if the tokenizer is yet to be trained. Raises DataError and OSError for unreadable files.
    """
    folder = tokenizer_folder(spec)
    if folder is None:
        return []
    sources = (*spec.data.sources, *spec.data.eval_sources)
    of_text = (source for source in sources if not spec.data.columns_of(source).tokenised)
    return [_preview(spec, source, TextRules.of(spec.data, folder)) for source in islice(of_text, _SOURCES)]


def _preview(spec: JobSpec, source: SourceSpec, rules: TextRules) -> Preview:
    data, columns = spec.data, spec.data.columns_of(source)
    rows = list(islice(_first_rows(source, columns), _ROWS))
    encoded = encode_rows(rows, columns, vocab=model_shape(spec.model).vocab, rules=rules)
    documents, boundaries = [row for row in encoded if not isinstance(row, BadRow)], Boundaries(rules.load())
    for document in documents:
        boundaries.see(document)
    fit, bad = Fit.of(data, columns), [row for row in encoded if isinstance(row, BadRow)]
    fates = [fit(document)[1] for document in documents]
    long = sum(len(document.input_ids) > fit.length for document in documents)
    name, of_rows = ", ".join(source.paths), f"of the first {len(rows)} rows"
    fate = {"drop": "are dropped", "fail": "fail the job"}.get(fit.rule, "are truncated to it")
    notes = [
        *([f"{name}: {len(bad)} {of_rows} cannot be trained on, the first because {bad[0].reason}"] if bad else []),
        *(
            [f"{name}: {long} {of_rows} are longer than sequence_length={fit.length} and {fate}; see on_long_rows"]
            if long and fit.rule != "split"
            else []
        ),
        *(
            [f"{name}: {fates.count('untrained')} {of_rows} have no token that is trained and are dropped"]
            if "untrained" in fates
            else []
        ),
        *(
            [f"{name}: {note}" for note in _chat_notes(columns, rules, rows, boundaries.sample_without_end)]
            if columns.messages
            else []
        ),
    ]
    return Preview(
        name, len(rows), len(bad), long, fates.count("untrained"), fit.rule, boundaries.begins_with_bos, tuple(notes)
    )


def _first_rows(source: SourceSpec, columns: ColumnsSpec) -> Any:
    """Yield rows from the start of each file, file by file; a text file is one row."""
    for file in list_files(source):
        if file.format == "text" and file.size > _LARGEST_TEXT:
            continue  # a text file is read as a whole
        for piece in cut([file], _PIECE_BYTES)[:1]:
            for chunk in read_piece(piece, columns):
                yield from chunk.rows


def _chat_notes(columns: ColumnsSpec, rules: TextRules, rows: list[Row], sample: str | None) -> list[str]:
    """Return what a user should know of conversations: tools, their arguments, and the ends of turns."""
    notes = []
    if columns.tools is not None and not load_chat_templates(rules.tokenizer, rules.chat_template).use_tools:
        notes += [f"the chat template does not use the tools of column {columns.tools!r}; choose a template that does"]
    if columns.tools is None and any(row.values.get("tools") for row in rows):
        notes += ["the column 'tools' is not used; name it in columns.tools to show it to the chat template"]
    if count := sum(has_text_arguments(row.values.get(str(columns.messages))) for row in rows):
        notes += [f"{count} of the first {len(rows)} rows have tool arguments as JSON text; they are read as objects"]
    return notes if sample is None else [*notes, f"in the first {len(rows)} rows, {no_end_token(sample)}"]
