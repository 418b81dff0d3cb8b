"""Hugging Face `datasets` as in run_clm: `-m benchmarks.peers.hf_prepare OUT FOLDER CACHE LENGTH BATCH`.

Unlike run_clm it writes no attention masks and labels: they would double the output, and a collator can create them.
Every document ends with an end-of-text token.
"""

import json
import sys
from itertools import chain
from pathlib import Path
from time import perf_counter
from typing import Any

import pyarrow.compute as pc
from datasets import Dataset, load_dataset
from torch.utils.data import DataLoader
from transformers import AutoTokenizer

from benchmarks.data.corpus import CORPUS, TOKENIZER, WARM

_PROCESSES = 2


def main() -> None:
    """Warm up on a little text, then prepare the corpus twice."""
    out, folder, cache = map(Path, sys.argv[1:4])
    length, batch = map(int, sys.argv[4:])
    tokenizer = AutoTokenizer.from_pretrained(folder / TOKENIZER)
    first_batch(prepared(tokenizer, folder / WARM, cache / "warm", length)[1], batch)
    began = perf_counter()
    prepared(tokenizer, folder / CORPUS, cache / "first", length)
    again = perf_counter()
    tokenised, rows = prepared(tokenizer, folder / CORPUS, cache / "again", length)
    seconds = perf_counter() - again
    first_batch(rows, batch)
    found = {"seconds": seconds, "first_seconds": again - began, "first_batch": perf_counter() - again}
    found["rows"] = len(rows)
    out.write_text(json.dumps(found | {"tokens": pc.sum(pc.list_value_length(tokenised.data["input_ids"])).as_py()}))


def prepared(tokenizer: Any, file: Path, cache: Path, length: int) -> tuple[Dataset, Dataset]:
    """Return the tokenised documents, and the rows into which they are packed."""

    def tokenise(documents: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        found = tokenizer(documents["text"], return_attention_mask=False, return_token_type_ids=False)["input_ids"]
        for ids in found:
            ids.append(tokenizer.eos_token_id)
        return {"input_ids": found}

    def group_texts(documents: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
        tokens = list(chain(*documents["input_ids"]))
        whole = len(tokens) // length * length
        return {"input_ids": [tokens[start : start + length] for start in range(0, whole, length)]}

    raw = load_dataset("json", data_files=str(file), split="train", cache_dir=str(cache))
    tokenised = raw.map(tokenise, batched=True, num_proc=_PROCESSES, remove_columns=["text"])
    return tokenised, tokenised.map(group_texts, batched=True, num_proc=_PROCESSES)


def first_batch(rows: Dataset, batch: int) -> None:
    """Take the first batch of a shuffled epoch."""
    next(iter(DataLoader(rows.with_format("torch"), batch_size=batch, shuffle=True)))


if __name__ == "__main__":
    main()
