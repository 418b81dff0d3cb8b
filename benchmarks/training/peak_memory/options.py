"""Peak memory of a step's forward and backward pass by sequence length, for each memory-saving option.

`python -m benchmarks.training.peak_memory.options [--quick]`. Each cell runs in a separate process. Options that the
spec rejects keep a row.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.harness import command_line, markdown_table, parse, write_result
from benchmarks.launch import ProgramError, loop_arguments, run_module
from benchmarks.workload import SMALL, TOY, Workload, write_tokens
from train_loop.spec import SpecError
from train_loop.spec import parse as parse_spec

# Head and MLP are wide relative to the rest, as in larger models of this family.
CONFIG = SMALL | {"vocab_size": 32768, "intermediate_size": 2048, "max_position_embeddings": 16384}
LENGTHS = (512, 1024, 2048, 4096)
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
"""Fixed thresholds: glibc then returns freed memory, so that resident memory equals memory in use."""
PLAIN = {"gradient_checkpointing": "none", "chunked_loss": False, "apply_tiled_mlp": False}
WAYS: dict[str, dict[str, Any]] = {
    "plain": PLAIN,
    "gradient_checkpointing: full": PLAIN | {"gradient_checkpointing": "full"},
    "gradient_checkpointing: offload": PLAIN | {"gradient_checkpointing": "offload"},
    "full, chunked_loss": PLAIN | {"gradient_checkpointing": "full", "chunked_loss": True},
    "full, chunked_loss, apply_tiled_mlp": PLAIN
    | {"gradient_checkpointing": "full", "chunked_loss": True, "apply_tiled_mlp": True},
}


def main() -> None:
    """Measure every option at every length and write the table."""
    arguments = parse(command_line(__doc__), rounds=3)
    config, lengths = (TOY, (512,)) if arguments.quick else (CONFIG, LENGTHS)
    data = [
        {"round": number, "way": name, "tokens": tokens} | measure(config, way, tokens)
        for number in range(arguments.rounds)
        for name, way in WAYS.items()
        for tokens in lengths
    ]
    write_result(
        "memory",
        settings={"config": config, "dtype": "fp32", "rounds": arguments.rounds, "quick": arguments.quick},
        data=data,
        table=markdown_table([record(name, data, lengths) for name in WAYS]),
        folder=arguments.results,
    )


def measure(config: dict[str, Any], way: dict[str, Any], tokens: int) -> dict[str, Any]:
    """Return the peak bytes of one cell, or the error."""
    workload = Workload(config=config, world=1, sequence_length=tokens, steps=2)
    with tempfile.TemporaryDirectory(prefix="trainshed-benchmark-") as root:
        folder, out = Path(root), Path(root, "peak.json")
        write_tokens(folder / "tokens.parquet", rows=workload.steps, length=tokens, config=config)
        try:
            arguments, log = loop_arguments(job_spec(workload, folder, way), folder / "run")
            run_module(
                "benchmarks.training.peak_memory.peak_run", out, *arguments, log=log, ranks=1, variables=ALLOCATOR
            )
        except (SpecError, ProgramError) as error:
            return {"peak_bytes": None, "error": str(error)}
        found: dict[str, Any] = json.loads(out.read_bytes())
        return found


def job_spec(workload: Workload, folder: Path, way: dict[str, Any]) -> dict[str, Any]:
    """Return the spec of one cell. Raises SpecError if the spec rejects the option."""
    raw = workload.spec(folder, strategy={"apply_tiled_mlp": way["apply_tiled_mlp"]})
    raw["model"] |= {"gradient_checkpointing": way["gradient_checkpointing"]}
    raw["training"] |= {"chunked_loss": way["chunked_loss"]}
    parse_spec(raw)
    return raw


def record(name: str, data: list[dict[str, Any]], lengths: tuple[int, ...]) -> dict[str, str | None]:
    """Return a table row: the smallest peak of all rounds at each length, in MiB."""
    cells: dict[str, str | None] = {"MiB beyond weights, gradients and optimizer, at tokens": name}
    for tokens in lengths:
        found = [one for one in data if one["way"] == name and one["tokens"] == tokens]
        peaks = [one["peak_bytes"] for one in found if one["peak_bytes"] is not None]
        cells[f"{tokens}"] = f"{min(peaks) / 2**20:,.0f}" if peaks else found[0]["error"]
    return cells


if __name__ == "__main__":
    main()
