"""A plain loop over `tokenizers` on all cores: `-m benchmarks.peers.tokenizers_loop OUT FOLDER LENGTH`.

Consecutive documents are cut into rows of equal length. Nothing is kept or written.
"""

import json
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from time import perf_counter

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from benchmarks.data.corpus import CORPUS, TOKENIZER, WARM, texts
from train_loop.data.text.tokenizer import END_OF_TEXT

_DOCUMENTS = 1000
"""Documents per call of the tokenizer, which uses all cores."""


def main() -> None:
    """Warm up on a little text, then tokenise the corpus twice."""
    out, folder, length = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    tokenizer = Tokenizer.from_file(str(folder / TOKENIZER / "tokenizer.json"))
    sum(len(rows) for rows in packed(tokenizer, folder / WARM, length))
    seconds = []
    for _ in range(2):
        began = perf_counter()
        tokens = sum(rows.size for rows in packed(tokenizer, folder / CORPUS, length))
        seconds.append(perf_counter() - began)
    out.write_text(json.dumps({"tokens": tokens, "first_seconds": seconds[0], "seconds": seconds[1]}))


def packed(tokenizer: Tokenizer, file: Path, length: int) -> Iterator[NDArray[np.int32]]:
    """Yield token rows in batches; the last tokens may not fill a row."""
    end = np.array([tokenizer.token_to_id(END_OF_TEXT)], np.int32)
    documents, rest = texts(file), np.empty(0, np.int32)
    while some := list(islice(documents, _DOCUMENTS)):
        pieces = [rest]
        for encoding in tokenizer.encode_batch_fast(some, add_special_tokens=False):
            pieces += [np.array(encoding.ids, np.int32), end]
        tokens = np.concatenate(pieces)
        whole = len(tokens) // length * length
        yield tokens[:whole].reshape(-1, length)
        rest = tokens[whole:]
    yield rest


if __name__ == "__main__":
    main()
