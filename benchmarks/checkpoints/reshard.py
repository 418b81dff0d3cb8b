"""Seconds to load a checkpoint with another world size or mesh: Trainshed, which verifies it, against `dcp.load`.

`python -m benchmarks.checkpoints.reshard [--rounds N] [--quick]`. Checkpoints of one rank, of two ranks and of two
ranks with Ulysses are each loaded by another of these shapes, from disk and from memory. All programs alternate within
a start.
"""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.checkpoints.reshard_run import WAYS
from benchmarks.harness import Sample, command_line, compare, markdown_table, parse, write_result
from benchmarks.launch import loop_arguments, run_for_json, run_loop
from benchmarks.workload import SMALL, TOY, Workload

PLAIN, OURS, HASHES = WAYS
TURNS = 3
SHAPES: dict[str, dict[str, Any]] = {
    "1 rank": {"world": 1},
    "FSDP 2": {"world": 2},
    "FSDP 2 x SP 2": {"world": 2, "sp": 2},
}
CASES = [("FSDP 2", "1 rank"), ("1 rank", "FSDP 2"), ("FSDP 2", "FSDP 2 x SP 2"), ("FSDP 2 x SP 2", "FSDP 2")]
LARGE = SMALL | {"hidden_size": 768, "intermediate_size": 2304, "head_dim": 96, "vocab_size": 8192}
"""76 million parameters: checkpoints of 0.9 GB."""


def main() -> None:
    """Save each shape once, load it in other shapes, and write the table."""
    arguments = parse(command_line(__doc__))
    config, cases = (TOY, CASES[:1]) if arguments.quick else (LARGE, CASES)
    found: dict[tuple[str, ...], list[Sample]] = {}
    with tempfile.TemporaryDirectory(prefix="trainshed-benchmark-") as root:
        saved = {shape: save(config, shape, Path(root)) for shape in dict.fromkeys(before for before, _ in cases)}
        for number in range(arguments.rounds):
            for before, after in cases:
                for place, samples in load(config, saved[before], after, Path(root), number).items():
                    found.setdefault((before, after, place), []).extend(samples)
                    print(f"round {number + 1}, {before} → {after}, {place}: {[one.value for one in samples]}")
    write_result(
        "reshard",
        settings={"rounds": arguments.rounds, "quick": arguments.quick, "turns": TURNS, "config": config},
        data=[{"case": case, "sample": sample.__dict__} for case, samples in found.items() for sample in samples],
        table=markdown_table([record(case, samples) for case, samples in found.items()]),
        folder=arguments.results,
    )


def spec_of(config: dict[str, Any], shape: str, folder: Path) -> tuple[dict[str, Any], int]:
    """Return the spec of a one-step run in a shape, and its number of ranks; all shapes use the same tokens."""
    world, sp = SHAPES[shape]["world"], SHAPES[shape].get("sp", 1)
    workload = Workload(config=config, world=world, rows_per_rank=1, sequence_length=64, steps=2)
    if not (folder / "tokens.parquet").exists():
        Workload(config=config, world=2, rows_per_rank=1, sequence_length=64, steps=2).write(folder)
    batch = {"global_batch_size": 2, "max_steps": 1}
    return workload.spec(folder, training=batch, strategy={"ulysses_size": sp}, checkpoint={"save_final": True}), world


def save(config: dict[str, Any], shape: str, root: Path) -> Path:
    """Train and save one step in a shape; return the run directory."""
    spec, ranks = spec_of(config, shape, root / "workload")
    run_dir = root / f"saved {shape}"
    run_loop(spec, run_dir, ranks=ranks)
    return run_dir


def load(config: dict[str, Any], saved: Path, shape: str, root: Path, number: int) -> dict[str, list[Sample]]:
    """Return the median seconds of every program in one start, by location of the files. Raises ProgramError."""
    spec, ranks = spec_of(config, shape, root / "workload")
    (file, *_), _ = loop_arguments(spec, root / "loading")
    found = run_for_json("benchmarks.checkpoints.reshard_run", file, saved, TURNS, here=root, ranks=ranks)
    return {
        place: [
            Sample(way, number, float(np.median(seconds)), raw={"seconds": seconds}) for way, seconds in ways.items()
        ]
        for place, ways in found.items()
    }


def record(case: tuple[str, ...], samples: list[Sample]) -> dict[str, Any]:
    """Return a table row."""
    plain, ours, hashes = compare(samples, PLAIN)
    return {
        **dict(zip(("saved by", "loaded by", "files in"), case, strict=True)),
        "`dcp.load`, seconds, median": f"{plain.median:.3f}",
        "Trainshed, verified": f"{ours.median:.3f}",
        "of it SHA-256": f"{hashes.median:.3f}",
        "ratio, median [95 % interval]": ours.ratio_text,
    }


if __name__ == "__main__":
    main()
