"""What every program tokenises and packs: real text in JSON lines, and a tokenizer for it, in a folder."""

import hashlib
import json
import sysconfig
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.workload import SMALL
from train_loop.data.prepare.tokenizer import train_tokenizer
from train_loop.spec import JobSpec, parse

VOCABULARY = 8192
CORPUS, WARM, TOKENIZER = "corpus.jsonl", "warm.jsonl", "tokenizer"
_WARM_BYTES = 12 * 2**20
"""Enough that tasks on each of two cores still run when all that starts on first use has started."""
_TRAINED_DOCUMENTS = 500


def write_corpus(folder: Path, *, size: int) -> dict[str, Any]:
    """About `size` bytes of Python's own sources and those of installed packages, a document to a file; its facts."""
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
    """The standard library's files and then the packages', in name order, those that are UTF-8 and not empty."""
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
    """The documents of a corpus."""
    with file.open("rb") as lines:
        for line in lines:
            yield json.loads(line)["text"]


def corpus_spec(folder: Path, file: str, *, length: int) -> JobSpec:
    """A job that trains on a corpus with the folder's tokenizer."""
    return parse(
        {
            "name": "benchmark",
            "model": {"config": SMALL | {"vocab_size": VOCABULARY}, "tokenizer": f"file://{folder / TOKENIZER}"},
            "data": {"train": {"path": f"file://{folder / file}"}, "sequence_length": length},
            "training": {"learning_rate": 1e-3, "max_steps": 1},
        }
    )
