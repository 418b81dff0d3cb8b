"""Preview of data preparation: counts for the first rows of each source, before the job runs."""

from itertools import islice
from typing import Any

from train_loop.data.prepare.chat import load_chat_template
from train_loop.data.prepare.encode import BadRow, encode_rows
from train_loop.data.prepare.fit import Fit
from train_loop.data.prepare.rows import Row, cut, read_piece
from train_loop.data.prepare.sources import list_files
from train_loop.model.folder import model_shape, tokenizer_folder
from train_loop.plan import Preview
from train_loop.spec import ColumnsSpec, DataSpec, JobSpec, SourceSpec

_ROWS, _SOURCES = 64, 8
_PIECE_BYTES = 2**20


def preview_data(spec: JobSpec) -> list[Preview]:
    """Return the counts of each text source whose rows may be dropped or truncated.

    Empty if the tokenizer is yet to be trained. Raises DataError and OSError for unreadable files.
    """
    folder = tokenizer_folder(spec)
    if folder is None:
        return []
    sources = (*spec.data.sources, *spec.data.eval_sources)
    losing = (source for source in sources if _may_lose(spec.data, spec.data.columns_of(source)))
    return [_preview(spec, source, str(folder)) for source in islice(losing, _SOURCES)]


def _may_lose(data: DataSpec, columns: ColumnsSpec) -> bool:
    return not columns.tokenised and (data.long_rows_of(columns) != "split" or data.drops_untrained(columns))


def _preview(spec: JobSpec, source: SourceSpec, folder: str) -> Preview:
    data, columns = spec.data, spec.data.columns_of(source)
    rows = list(islice(_first_rows(source, columns), _ROWS))
    encoded = encode_rows(
        rows, columns, vocab=model_shape(spec.model).vocab, tokenizer=folder, system_prompt=data.system_prompt
    )
    fit, bad = Fit.of(data, columns), [row for row in encoded if isinstance(row, BadRow)]
    fates = [fit(row)[1] for row in encoded if not isinstance(row, BadRow)]
    long = sum(len(row.input_ids) > fit.length for row in encoded if not isinstance(row, BadRow))
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
        *([f"{name}: {note}" for note in _tools_notes(columns, folder, rows)] if columns.messages else []),
    ]
    return Preview(name, len(rows), len(bad), long, fates.count("untrained"), fit.rule, tuple(notes))


def _first_rows(source: SourceSpec, columns: ColumnsSpec) -> Any:
    """Yield rows from the start of each file, file by file; a text file is one row."""
    for file in list_files(source):
        for piece in cut([file], _PIECE_BYTES)[:1]:
            for chunk in read_piece(piece, columns):
                yield from chunk.rows


def _tools_notes(columns: ColumnsSpec, folder: str, rows: list[Row]) -> list[str]:
    if columns.tools is not None and not load_chat_template(folder).uses_tools:
        return [f"the chat template does not use the tools of column {columns.tools!r}; choose a template that does"]
    if columns.tools is None and any(row.values.get("tools") for row in rows):
        return ["the column 'tools' is not used; name it in columns.tools to show it to the chat template"]
    return []
