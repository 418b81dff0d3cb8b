"""`python -m train_loop.data.prepare.check RUN_DIR`: compare a run's prepared samples with today's rules for text.

The first rows of each source are read again, as this version reads text. Each must be among the first samples of the
run, with the same tokens and labels. Exit status: 0 if all are, 1 if one is not, 2 if nothing can be compared.
"""

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np

from train_loop.data.dataset import Dataset, Part
from train_loop.data.prepare.boundaries import mark_trained
from train_loop.data.prepare.cache import Source, evaluation_spec, list_sources, pinned_dataset
from train_loop.data.prepare.encode import Encoded, TextRules, encode_rows
from train_loop.data.prepare.fit import Fit
from train_loop.data.prepare.packing import Document
from train_loop.data.prepare.rows import Row, cut, read_piece
from train_loop.data.shards import read_shards
from train_loop.errors import DataError
from train_loop.model.folder import model_shape
from train_loop.run_dir import RunDir
from train_loop.spec import JobSpec

_SAMPLES = 20_000
"""Samples to search: packing moves a document by at most about a thousand samples."""
_PIECE_BYTES = 2**20
_SHOWN = 300
"""Characters of a document in a message."""

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
    spec = run_dir.spec()
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
    rules = TextRules.of(spec.data, Path(dataset.tokenizer))
    lines = []
    for source, part in zip(list_sources(spec), dataset.parts, strict=True):
        if part.index is not None and not source.columns.tokenised:
            encoded = encode_rows(
                list(islice(_rows(source), rows)), source.columns, vocab=model_shape(spec.model).vocab, rules=rules
            )
            documents = _beginnings(encoded, Fit.of(spec.data, source.columns))
            different = _compare(documents, part)
            lines.append((f"{source}: {_told(different, len(documents), rules)}", bool(different)))
    return lines


def _rows(source: Source) -> Iterator[Row]:
    for piece in cut(source.files, _PIECE_BYTES):
        for chunk in read_piece(piece, source.columns):
            yield from chunk.rows


def _beginnings(encoded: Sequence[Encoded], fit: Fit) -> list[Document]:
    """Return the part of each trained row that begins it in the samples: all of it, unless it is split."""
    fitted = [fit(row)[0] for row in encoded if isinstance(row, Document)]
    parts = [(one, slice(fit.length)) for one in fitted if len(one.input_ids)]
    return [Document(one.input_ids[cut], None if one.labels is None else one.labels[cut]) for one, cut in parts]


def _compare(documents: list[Document], part: Part) -> list[Document]:
    """Return the documents that are not among the prepared ones."""
    prepared = _prepared(part)
    return [one for one in documents if _labels(one) not in prepared.get(one.input_ids.tobytes(), set())]


def _prepared(part: Part) -> Prepared:
    found: Prepared = defaultdict(set)
    for cells in read_shards(part, np.arange(min(part.samples, _SAMPLES))):
        lengths = [len(cells.input_ids)] if cells.documents is None else cells.documents.tolist()
        for stop, length in zip(np.cumsum(lengths).tolist(), lengths, strict=True):
            labels = None if cells.labels is None else cells.labels[stop - length : stop]
            one = Document(cells.input_ids[stop - length : stop], labels)
            found[one.input_ids.tobytes()].add(_labels(one))
    return found


def _labels(document: Document) -> bytes:
    labels = document.input_ids if document.labels is None else document.labels
    return np.asarray(labels, np.int32).tobytes()


def _told(different: list[Document], rows: int, rules: TextRules) -> str:
    if not rows:
        return "no row could be compared: none of the first rows is trained"
    if not different:
        return f"{rows} of the first rows have the tokens and labels of the run"
    now = mark_trained(rules.load(), different[0])[:_SHOWN]
    return (
        f"{len(different)} of {rows} rows that were compared have other tokens or labels than in the run; the first is "
        f"now {now!r}, with trained text in ⟦⟧"
    )


if __name__ == "__main__":
    sys.exit(main())
