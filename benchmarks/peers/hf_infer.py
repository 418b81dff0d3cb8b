"""A plain loop of transformers over rows of tokens: `-m benchmarks.peers.hf_infer OUT FOLDER`.

It writes results to a Parquet file. Rows are padded to the longest of their batch. A first pass takes them in the order
of the file, and a second one by length.
"""

import json
import sys
import time
from pathlib import Path
from time import perf_counter
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from benchmarks.inference.work import LOGPROBS, Work


def main() -> None:
    """Compute the results of all rows, in both orders."""
    out, folder = map(Path, sys.argv[1:])
    work = Work.model_validate_json((folder / "work.json").read_bytes())
    model = load(folder)
    rows = pq.read_table(folder / "rows.parquet")["ids"].to_pylist()
    began = time.time()
    seconds, total = one_pass(model, rows, work, out.with_name("results.parquet"))
    ordered = sorted(rows, key=len, reverse=True)
    sorted_seconds, _ = one_pass(model, ordered, work, out.with_name("ordered.parquet"))
    out.write_text(json.dumps({"began": began, "seconds": seconds, "sum": total, "sorted_seconds": sorted_seconds}))


def one_pass(model: Any, rows: list[list[int]], work: Work, file: Path) -> tuple[float, float]:
    """Write the results of all rows. Return the seconds, and the sum of the results."""
    began, results = perf_counter(), list[list[float]]()
    for start in range(0, len(rows), work.batch):
        results += compute(model, rows[start : start + work.batch], work)
    pq.write_table(pa.table({"ids": rows, "results": results}), file)
    return perf_counter() - began, sum(float(sum(one)) for one in results)


def load(folder: Path) -> Any:
    """Return the model in fp32."""
    return AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()


def compute(model: Any, rows: list[list[int]], work: Work) -> list[list[float]]:
    """Return the results of a batch."""
    is_left = work.output != LOGPROBS
    lengths = torch.tensor([len(row) for row in rows])
    width = int(lengths.max())
    ids = torch.stack([_padded(row, width, left=is_left) for row in rows])
    places = torch.arange(width)
    is_token = (places >= width - lengths[:, None]) if is_left else (places < lengths[:, None])
    with torch.no_grad():
        if is_left:
            found = model.generate(
                ids,
                attention_mask=is_token.long(),
                max_new_tokens=work.new_tokens,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
            return [row.tolist() for row in found[:, width:]]
        logits = model(ids, attention_mask=is_token.long()).logits[:, :-1]
        losses = F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none")
    values = -losses.view(len(rows), -1)
    return [one[: size - 1].tolist() for one, size in zip(values, lengths.tolist(), strict=True)]


def _padded(row: list[int], width: int, *, left: bool) -> Tensor:
    missing = width - len(row)
    return F.pad(torch.tensor(row), (missing, 0) if left else (0, missing))


if __name__ == "__main__":
    main()
