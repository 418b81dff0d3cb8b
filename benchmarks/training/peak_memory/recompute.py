"""Peak memory of a step with each kind of recomputation, and the plan's estimate, for six models.

`python -m benchmarks.training.peak_memory.recompute [--rounds N] [--quick]`. A step is a forward and a backward pass in
fp32 of a micro-batch on one CPU rank. Each model has a process, whose allocator returns freed memory.
"""

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import command_line, markdown_table, parse, write_result
from benchmarks.launch import run_for_json
from benchmarks.training.peak_memory.options import ALLOCATOR
from benchmarks.workload import SMALL, TOY

_GPT2 = {"model_type": "gpt2", "vocab_size": 4096, "n_embd": 256, "n_layer": 6, "n_head": 8, "n_positions": 4096}
_NO_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
_LLAMA = SMALL | {"model_type": "llama", "hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 6}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3, 8 layers, 2,048 tokens": {"config": SMALL, "tokens": 2048},
    "qwen3, wide MLP, 2 x 1,024 tokens": {"config": SMALL | {"intermediate_size": 2048}, "tokens": 1024, "rows": 2},
    "qwen3, 15 layers, 1,024 packed tokens": {
        "config": SMALL | {"num_hidden_layers": 15},
        "tokens": 1024,
        "packed": True,
    },
    "llama, H 512, 1,024 tokens": {"config": _LLAMA | {"num_attention_heads": 16, "head_dim": 32}, "tokens": 1024},
    "qwen2, many kv heads, 4,096 tokens": {
        "config": SMALL | {"model_type": "qwen2", "num_key_value_heads": 8, "num_hidden_layers": 4},
        "tokens": 4096,
    },
    "gpt2, 2,048 tokens": {"config": _GPT2 | _NO_DROPOUT, "tokens": 2048},
}
KINDS: dict[str, Any] = {
    "none": "none",
    "{every: 3}": {"every": 3},
    "{every: 2}": {"every": 2},
    "selective": "selective",
    "full": "full",
}


def main() -> None:
    """Measure each kind of each model and write the table."""
    arguments = parse(command_line(__doc__), rounds=1)
    shapes = {"toy": {"config": TOY, "tokens": 1024}} if arguments.quick else SHAPES
    data = [
        one | {"round": number}
        for number in range(arguments.rounds)
        for name, shape in shapes.items()
        for one in measure(name, shape)
    ]
    write_result(
        "recompute",
        settings={"shapes": shapes, "dtype": "fp32", "rounds": arguments.rounds, "quick": arguments.quick},
        data=data,
        table=markdown_table([record(name, data) for name in shapes]),
        folder=arguments.results,
    )


def measure(name: str, shape: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the bytes of a model with each kind. Raises ProgramError."""
    with tempfile.TemporaryDirectory(prefix="trainshed-benchmark-") as root:
        settings = json.dumps(shape | {"kinds": KINDS})
        module = "benchmarks.training.peak_memory.recompute_run"
        found = run_for_json(module, settings, here=Path(root), ranks=1, variables=ALLOCATOR)
    return [{"shape": name, "kind": kind} | found[kind] for kind in KINDS]


def record(name: str, data: Sequence[dict[str, Any]]) -> dict[str, str | None]:
    """Return a table row: of each kind the smallest peak of all rounds, and the plan's estimate divided by it."""
    row: dict[str, str | None] = {"peak of a step, MiB (plan / peak)": name}
    for kind in KINDS:
        found = [one for one in data if (one["shape"], one["kind"]) == (name, kind)]
        peak = min(one["peak_bytes"] for one in found)
        row[kind] = f"{peak / 2**20:,.0f} ({found[0]['planned_bytes'] / peak:.2f})"
    return row


if __name__ == "__main__":
    main()
