"""A plain loop of transformers over rows of tokens: `-m benchmarks.peers.hf_infer OUT FOLDER`.

Rows are padded to the longest of their batch. As a program it only loads the model and computes the first batch:
`benchmarks.inference.own_run` computes all rows in turns with Trainshed.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from benchmarks.inference.work import LOGPROBS, Work


def main() -> None:
    """Write when the first batch began."""
    out, folder = map(Path, sys.argv[1:])
    work = Work.model_validate_json((folder / "work.json").read_bytes())
    model = load(folder)
    rows = pq.read_table(folder / "rows.parquet")["ids"].to_pylist()
    began = time.time()
    compute(model, rows[: work.batch], work)
    out.write_text(json.dumps({"began": began}))


def compute_all(model: Any, rows: list[list[int]], work: Work, file: Path) -> float:
    """Write the results of all rows, and return their sum."""
    results = list[list[float]]()
    for start in range(0, len(rows), work.batch):
        results += compute(model, rows[start : start + work.batch], work)
    pq.write_table(pa.table({"ids": rows, "results": results}), file)
    return sum(float(sum(one)) for one in results)


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
