"""Peak memory and time of a step with embeddings and head in FSDP's root unit, and as units of their own.

`python -m benchmarks.training.peak_memory.ends [--rounds N] [--quick]`. The vocabulary has 150,000 tokens, as those of
recent models. Each cell runs in separate processes: one run for the peak, whose allocator returns freed memory, and one
for the time.
"""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import (
    Measured,
    Row,
    Sample,
    command_line,
    compare,
    interleave,
    markdown_table,
    parse,
    taken,
    write_result,
)
from benchmarks.launch import loop_arguments, run_for_json, run_loop
from benchmarks.training.peak_memory.options import ALLOCATOR
from benchmarks.workload import SMALL, TOY, Workload, write_tokens

VOCABULARY = 150_000
CONFIG = SMALL | {"vocab_size": VOCABULARY, "num_hidden_layers": 6}
STEPS, MEMORY_STEPS, WARM_UP = 8, 2, 2
MODELS: dict[str, dict[str, Any]] = {
    "untied": {"tie_word_embeddings": False},
    "tied": {"tie_word_embeddings": True},
}
BOTH = {"wrap_embeddings": True, "wrap_lm_output": True}
ROOT = "in the root unit"
UNITS: dict[str, dict[str, bool]] = {
    ROOT: {"wrap_embeddings": False, "wrap_lm_output": False},
    "embeddings a unit": {"wrap_embeddings": True, "wrap_lm_output": False},
    "head a unit": {"wrap_embeddings": False, "wrap_lm_output": True},
    "both units": BOTH,
}
TIED = {name: UNITS[name] for name in (ROOT, "both units")}
"""Tied embeddings are one unit together."""


def main() -> None:
    """Measure each way of each model and write the table."""
    parser = command_line(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    arguments = parse(parser, rounds=5)
    config = TOY if arguments.quick else CONFIG
    length = 32 if arguments.quick else 64
    samples = {
        model: interleave(
            {
                name: lambda config=config | own, policy=policy: measure(config, policy, length, arguments.ranks)  # type: ignore[misc]
                for name, policy in (UNITS if model == "untied" else TIED).items()
            },
            arguments.rounds,
        )
        for model, own in MODELS.items()
    }
    write_result(
        "ends" if arguments.ranks == 2 else f"ends-ranks-{arguments.ranks}",
        settings={"config": config, "sequence_length": length, "dtype": "fp32", "rounds": arguments.rounds},
        data=[{"model": model} | vars(one) for model, found in samples.items() for one in found],
        table=markdown_table([one for model, found in samples.items() for one in records(model, found)]),
        folder=arguments.results,
    )


def measure(config: dict[str, Any], policy: dict[str, bool], length: int, ranks: int) -> Measured:
    """Return the median step of one run in seconds, and the peak bytes of another. Raises ProgramError."""
    workload = Workload(config=config, world=ranks, sequence_length=length, steps=STEPS, first_counted=WARM_UP)
    with tempfile.TemporaryDirectory(prefix="trainshed-benchmark-") as root:
        folder = Path(root)
        write_tokens(folder / "tokens.parquet", rows=STEPS * ranks, length=length, config=config)
        raw = workload.spec(folder)
        raw["strategy"] = {"wrap_policy": policy}
        lines = run_loop(raw, folder / "run", ranks=ranks)
        raw["training"] |= {"max_steps": MEMORY_STEPS}
        spec, _ = loop_arguments(raw, folder / "peak")
        found = run_for_json(
            "benchmarks.training.peak_memory.peak_run", *spec, here=folder, ranks=ranks, variables=ALLOCATOR
        )
    seconds = [line["step_seconds"] for line in lines][WARM_UP:]
    return Measured(float(np.median(seconds)), found | {"seconds": seconds})


def records(model: str, samples: list[Sample]) -> list[dict[str, str | None]]:
    """Return the table rows of a model."""
    peaks = {row.variant: row for row in compare(taken(samples, "peak_bytes"), ROOT)}
    return [record(model, time, peaks[time.variant]) for time in compare(samples, ROOT)]


def record(model: str, time: Row, peak: Row) -> dict[str, str | None]:
    """Return the table row of one way."""
    return {
        "embeddings": f"{model}, {time.variant}",
        "peak of a step, MiB": None if peak.median is None else f"{peak.median / 2**20:,.0f}",
        "ratio of the peak": peak.ratio_text,
        "step, s": None if time.median is None else f"{time.median:.3f}",
        "ratio of the step, median [95 % interval]": time.ratio_text,
    }


if __name__ == "__main__":
    main()
