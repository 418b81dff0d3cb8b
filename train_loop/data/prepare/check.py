"""`python -m train_loop.data.prepare.check RUN_DIR`: compare a run's prepared samples with today's rules for text.

The first rows of each source are read again, as this version reads text. Each must be among the first samples of the
run, with the same tokens and labels. Exit status: 0 if all are, 1 if one is not, 2 if nothing can be compared.
"""

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import date, timedelta
from itertools import islice
from pathlib import Path

import numpy as np

from train_loop.data.columns import DOCUMENTS, INPUT_IDS, LABELS
from train_loop.data.dataset import Dataset, Part
from train_loop.data.prepare.boundaries import mark_trained
from train_loop.data.prepare.cache import Source, evaluation_spec, list_sources
from train_loop.data.prepare.encode import Encoded, TextRules, encode_rows
from train_loop.data.prepare.fit import Fit
from train_loop.data.prepare.packing import Document
from train_loop.data.prepare.pointer import pinned_dataset
from train_loop.data.prepare.rows import Row, cut, read_piece
from train_loop.data.shards import read_shards
from train_loop.data.text.chat import load_chat_templates
from train_loop.errors import DataError
from train_loop.model.folder import model_shape
from train_loop.run_dir import RunDir
from train_loop.spec import JobSpec

_SAMPLES = 20_000
"""Samples to search: packing moves a document by at most about a thousand samples."""
_PIECE_BYTES = 2**20
_SHOWN = 300
"""Characters of a document in a message."""
_MOST_DAYS = 400
"""Days before today that are tried for a chat template that writes the date."""
_PROBES = 3

Prepared = dict[bytes, set[bytes]]
"""Labels of the prepared documents with the same tokens."""


def main() -> int:
    """Compare each source of text of a run, print the results, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m train_loop.data.prepare.check", description=__doc__)
    parser.add_argument("run_dir", metavar="RUN_DIR", help="folder or URI of the run, with spec.json")
    parser.add_argument("--rows", type=int, default=200, help="rows of each source to compare [%(default)s]")
    arguments = parser.parse_args()
    try:
        found = check_run(RunDir.at(arguments.run_dir), arguments.rows)
    except (ValueError, OSError) as error:  # of the spec, the data, the run's address or its files
        print(error, file=sys.stderr)
        return 2
    for line, _ in found:
        print(line)
    return 1 if any(differs for _, differs in found) else 0


def check_run(run_dir: RunDir, rows: int) -> list[tuple[str, bool]]:
    """Return a line for each source of text, and whether it differs. Raises DataError without prepared samples."""
    spec = run_dir.spec().run
    dataset = _dataset(spec, run_dir, run_dir.data)
    found = _check(spec, dataset, rows)
    evaluated = evaluation_spec(spec, dataset)
    return (
        found if evaluated is None else found + _check(evaluated, _dataset(evaluated, run_dir, run_dir.eval_data), rows)
    )


def _dataset(spec: JobSpec, run_dir: RunDir, pointer: Path) -> Dataset:
    dataset = pinned_dataset(spec, pointer)
    if dataset is None:
        raise DataError(f"the samples of {run_dir.root} are no longer in the cache; nothing can be compared")
    return dataset


def _check(spec: JobSpec, dataset: Dataset, rows: int) -> list[tuple[str, bool]]:
    if dataset.tokenizer is None:
        return [("all sources have token ids, which no version changes", False)]
    lines = []
    for source, part in zip(list_sources(spec), dataset.parts, strict=True):
        if part.index is not None and not source.columns.tokenised:
            rules = TextRules.of_spec(spec, Path(dataset.tokenizer))
            text = _SourceText(spec, source, rules)
            found = text.compare(list(islice(_rows(source), rows)), part)
            lines.append((f"{source}: {found}", bool(found.different)))
    return lines


@dataclass(frozen=True)
class _Comparison:
    """The result of comparing rows with the samples of a run."""

    compared: int
    different: list[str]
    """Texts of the rows that differ, with trained text in ⟦⟧."""
    day: date | None = None
    """Day at which the chat template gave the samples of the run; None if that does not matter."""

    def __str__(self) -> str:
        if not self.compared:
            return "no row could be compared: none of the first rows is trained"
        if not self.different:
            then = f", if the chat template writes the date of {self.day}" if self.day else ""
            return f"{self.compared} of the first rows have the tokens and labels of the run{then}"
        return (
            f"{len(self.different)} of {self.compared} rows that were compared have other tokens or labels than in the "
            f"run; the first is now {self.different[0]!r}, with trained text in ⟦⟧"
        )


@dataclass(frozen=True)
class _SourceText:
    """The text of a source, as this version turns it into tokens."""

    spec: JobSpec
    source: Source
    rules: TextRules

    def compare(self, rows: list[Row], part: Part) -> _Comparison:
        """Compare rows with the samples of a run. A template that writes the date is rendered as on other days, too."""
        prepared = _prepared(part)

        def others(rows: list[Row], text: "_SourceText" = self) -> list[Row]:
            return [row for row in rows if any(not _is_in(one, prepared) for one in text.documents([row]))]

        different, day = others(rows), None
        for other in _days(part) if self.is_dated else ():
            # A few rows tell whether it is the day, or one of two.
            probes, then = different[:: -(-len(different) // _PROBES) or 1], self.on(other)
            if len(others(probes, then)) < len(probes):
                different, day = others(different, then), other
        tokenizer = self.rules.load()
        texts = [mark_trained(tokenizer, one)[:_SHOWN] for one in self.documents(different)]
        return _Comparison(len(self.documents(rows)), texts, day)

    def on(self, day: date) -> "_SourceText":
        """Return the same with chat templates that write the date of a day."""
        return replace(self, rules=replace(self.rules, day=day))

    def documents(self, rows: list[Row]) -> list[Document]:
        """Return the part of each trained row that begins it in the samples."""
        vocab = model_shape(self.spec.model).vocab
        encoded = encode_rows(rows, self.source.columns, vocab=vocab, rules=self.rules)
        return _beginnings(encoded, Fit.of(self.spec, self.source.columns, self.rules))

    @property
    def is_dated(self) -> bool:
        """Return whether a chat template writes the date."""
        columns = self.source.columns
        if columns.messages is None and (columns.chosen is None or self.rules.load().templates is None):
            return False
        templates = load_chat_templates(self.rules.tokenizer, self.rules.chat_template)
        return any("strftime_now" in template.source for template in templates.by_name.values())


def _days(part: Part) -> Iterator[date]:
    """Yield the days on which samples can have been prepared: the day of their last change first, then backwards."""
    assert part.index is not None
    today = date.today()
    yield date.fromtimestamp(Path(part.index).stat().st_mtime)
    yield from (today - timedelta(days=number) for number in range(1, _MOST_DAYS))


def _rows(source: Source) -> Iterator[Row]:
    for piece in cut(source.files, _PIECE_BYTES):
        for chunk in read_piece(piece, source.columns):
            yield from chunk.rows


def _beginnings(encoded: Sequence[Encoded], fit: Fit) -> list[Document]:
    """Return the part of each trained row that begins it in the samples: all of it, unless it is split."""
    fitted = [one for row in encoded if isinstance(row, Document) for one in fit(row)[0].sequences]
    parts = [(one, slice(fit.length)) for one in fitted if len(one.input_ids)]
    return [Document(one.input_ids[cut], None if one.labels is None else one.labels[cut]) for one, cut in parts]


def _is_in(document: Document, prepared: Prepared) -> bool:
    """Return whether a document is among the prepared ones, with the same labels."""
    return _labels(document) in prepared.get(document.input_ids.tobytes(), set())


def _prepared(part: Part) -> Prepared:
    found: Prepared = defaultdict(set)
    for cells in read_shards(part, np.arange(min(part.samples, _SAMPLES))):
        ids, labels = cells[INPUT_IDS.name], cells.get(LABELS.name)
        lengths = cells[DOCUMENTS.name].tolist() if DOCUMENTS.name in cells else [len(ids)]
        for stop, length in zip(np.cumsum(lengths).tolist(), lengths, strict=True):
            its = slice(stop - length, stop)
            one = Document(ids[its], None if labels is None else labels[its])
            found[one.input_ids.tobytes()].add(_labels(one))
    return found


def _labels(document: Document) -> bytes:
    labels = document.input_ids if document.labels is None else document.labels
    return np.asarray(labels, np.int32).tobytes()


if __name__ == "__main__":
    sys.exit(main())
