"""Corpus for tokenising and packing: real text as JSON lines, with a tokenizer."""

import hashlib
import json
import sysconfig
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.workload import SMALL
from train_loop.data.text.tokenizer import train_tokenizer
from train_loop.spec import JobSpec, parse

VOCABULARY = 8192
CORPUS, WARM, TOKENIZER = "corpus.jsonl", "warm.jsonl", "tokenizer"
_WARM_BYTES = 12 * 2**20
"""Enough to keep tasks on two cores busy until all one-time initialisation is done."""
_TRAINED_DOCUMENTS = 500


def write_corpus(folder: Path, *, size: int) -> dict[str, Any]:
    """Write about `size` bytes of sources of Python and installed packages, one document per file; return its facts."""
    folder.mkdir(parents=True, exist_ok=True)
    documents, written, digest = 0, 0, hashlib.sha256()
    with (folder / CORPUS).open("wb") as corpus, (folder / WARM).open("wb") as warm:
        for text in python_sources():
            line = json.dumps({"text": text}, ensure_ascii=False).encode() + b"\n"
            if written < _WARM_BYTES:
                warm.write(line)
            corpus.write(line)
            digest.update(line)
            documents, written = documents + 1, written + len(line)
            if written >= size:
                break
    (folder / TOKENIZER).mkdir()
    train_tokenizer(
        islice(texts(folder / CORPUS), _TRAINED_DOCUMENTS), vocab_size=VOCABULARY, folder=folder / TOKENIZER
    )
    return {"documents": documents, "bytes": written, "sha256": digest.hexdigest(), "vocabulary": VOCABULARY}


def python_sources() -> Iterator[str]:
    """Yield the non-empty UTF-8 files of the standard library, then of the packages, in name order."""
    for name in ("stdlib", "purelib"):
        root = Path(sysconfig.get_path(name))
        for file in sorted(root.rglob("*.py")):
            if name == "stdlib" and "site-packages" in file.parts:
                continue
            try:
                text = file.read_text("utf-8")
            except (UnicodeDecodeError, OSError):
                continue
            if text:
                yield text


def texts(file: Path) -> Iterator[str]:
    """Yield the documents of a corpus."""
    with file.open("rb") as lines:
        for line in lines:
            yield json.loads(line)["text"]


def corpus_spec(folder: Path, file: str, *, length: int) -> JobSpec:
    """Return a job that trains on a corpus with the folder's tokenizer."""
    return parse(
        {
            "name": "benchmark",
            "model": {"config": SMALL | {"vocab_size": VOCABULARY}, "tokenizer": f"file://{folder / TOKENIZER}"},
            "data": {"train": {"path": f"file://{folder / file}"}, "sequence_length": length},
            "training": {"learning_rate": 1e-3, "max_steps": 1},
        }
    )
