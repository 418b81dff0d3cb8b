"""Peak memory of a step's forward and backward pass by sequence length, for each memory-saving option.

`python -m benchmarks.training.peak_memory.options [--shared] [--quick]`. Each cell runs in a separate process. Options
that the spec rejects keep a row. `--shared`: two ranks share each layer, with and without sequence parallelism, and
the peak is that of rank 0.
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
LENGTHS: tuple[int, ...] = (512, 1024, 2048, 4096)
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
# Heads are as wide as the states, as in larger models of this family.
SHARED_CONFIG = CONFIG | {"hidden_size": 512, "num_attention_heads": 16, "num_key_value_heads": 8}
SHARED_LENGTHS: tuple[int, ...] = (1024, 2048)
_TWO = PLAIN | {"chunked_loss": True, "tp_size": 2}
SHARED: dict[str, dict[str, Any]] = {
    f"tp_size: 2{more}": _TWO | way | {"sequence_parallel": splits}
    for way, checkpointing in (({}, ""), ({"gradient_checkpointing": "full"}, ", full"))
    for splits, more in ((False, checkpointing), (True, f"{checkpointing}, sequence_parallel"))
}
_STRATEGY = ("apply_tiled_mlp", "tp_size", "sequence_parallel")


def main() -> None:
    """Measure every option at every length and write the table."""
    parser = command_line(__doc__)
    parser.add_argument("--shared", action="store_true", help="two ranks share each layer")
    arguments = parse(parser, rounds=3)
    ways = SHARED if arguments.shared else WAYS
    config, lengths = (SHARED_CONFIG, SHARED_LENGTHS) if arguments.shared else (CONFIG, LENGTHS)
    if arguments.quick:
        config, lengths = TOY, (512,)
    data = [
        {"round": number, "way": name, "tokens": tokens} | measure(config, way, tokens)
        for number in range(arguments.rounds)
        for name, way in ways.items()
        for tokens in lengths
    ]
    write_result(
        "memory-shared" if arguments.shared else "memory",
        settings={"config": config, "dtype": "fp32", "rounds": arguments.rounds, "quick": arguments.quick},
        data=data,
        table=markdown_table([record(name, data, lengths) for name in ways]),
        folder=arguments.results,
    )


def measure(config: dict[str, Any], way: dict[str, Any], tokens: int) -> dict[str, Any]:
    """Return the peak bytes of one cell, or the error."""
    ranks = way.get("tp_size", 1)
    workload = Workload(config=config, world=ranks, sequence_length=tokens, steps=2)
    with tempfile.TemporaryDirectory(prefix="trainshed-benchmark-") as root:
        folder, out = Path(root), Path(root, "peak.json")
        write_tokens(folder / "tokens.parquet", rows=workload.steps, length=tokens, config=config)
        try:
            arguments, log = loop_arguments(job_spec(workload, folder, way), folder / "run")
            run_module(
                "benchmarks.training.peak_memory.peak_run", out, *arguments, log=log, ranks=ranks, variables=ALLOCATOR
            )
        except (SpecError, ProgramError) as error:
            return {"peak_bytes": None, "error": str(error)}
        found: dict[str, Any] = json.loads(out.read_bytes())
        return found


def job_spec(workload: Workload, folder: Path, way: dict[str, Any]) -> dict[str, Any]:
    """Return the spec of one cell. Raises SpecError if the spec rejects the option."""
    raw = workload.spec(folder, strategy={name: way[name] for name in _STRATEGY if name in way})
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
