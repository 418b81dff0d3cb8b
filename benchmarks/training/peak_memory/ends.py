"""Peak memory and time of a step with embeddings and head in FSDP's root unit, and as separate units.

`python -m benchmarks.training.peak_memory.ends [--ranks N] [--rounds N] [--quick]`. The vocabulary has 150,000 tokens,
as those of recent models. A step is a forward and a backward pass in fp32. The steps of all ways alternate in the same
ranks: in one start for peaks, whose allocator returns freed memory, and in another for times.
"""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness import Sample, command_line, compare, markdown_table, parse, write_result
from benchmarks.launch import run_for_json
from benchmarks.training.peak_memory.options import ALLOCATOR
from benchmarks.workload import SMALL, TOY

VOCABULARY = 150_000
CONFIG = SMALL | {"vocab_size": VOCABULARY, "num_hidden_layers": 6}
MODELS: dict[str, dict[str, Any]] = {
    "untied": {"tie_word_embeddings": False},
    "tied": {"tie_word_embeddings": True},
}
ROOT = "in the root unit"
UNITS: dict[str, dict[str, bool]] = {
    ROOT: {"wrap_embeddings": False, "wrap_lm_output": False},
    "embeddings a unit": {"wrap_embeddings": True, "wrap_lm_output": False},
    "head a unit": {"wrap_embeddings": False, "wrap_lm_output": True},
    "both units": {"wrap_embeddings": True, "wrap_lm_output": True},
}
TIED = {name: UNITS[name] for name in (ROOT, "both units")}
"""Tied embeddings are one unit together."""
WARM_UP = 1
"""Steps of each way that are not counted."""


def main() -> None:
    """Measure each way of each model and write the table."""
    parser = command_line(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    arguments = parse(parser, rounds=8)
    config, length = (TOY, 32) if arguments.quick else (CONFIG, 64)
    ways = {"untied": UNITS, "tied": TIED}
    data = [
        sample
        for model, own in MODELS.items()
        for sample in measure(model, config | own, ways[model], length, ranks=arguments.ranks, steps=arguments.rounds)
    ]
    write_result(
        "ends" if arguments.ranks == 2 else f"ends-ranks-{arguments.ranks}",
        settings={"config": config, "sequence_length": length, "dtype": "fp32", "steps": arguments.rounds},
        data=data,
        table=markdown_table([one for model, policies in ways.items() for one in records(model, policies, data)]),
        folder=arguments.results,
    )


def measure(
    model: str, config: dict[str, Any], policies: Mapping[str, Any], length: int, *, ranks: int, steps: int
) -> list[Sample]:
    """Return a sample of each way and step, with peak bytes and the bytes that a rank moves. Raises ProgramError."""
    settings = {"config": config, "length": length, "policies": policies, "steps": steps + WARM_UP}
    module, text = "benchmarks.training.peak_memory.ends_run", json.dumps(settings)
    with tempfile.TemporaryDirectory(prefix="trainshed-benchmark-") as root:
        times = run_for_json(module, text, here=Path(root), ranks=ranks)
        peaks = run_for_json(module, text, here=Path(root), ranks=ranks, variables=ALLOCATOR)
    return [
        Sample(
            name,
            number,
            seconds,
            raw={
                "model": model,
                "peak_bytes": min(peaks[name]["peak_bytes"][WARM_UP:]),
                "moved_bytes": sum(times[name]["traffic"]["bytes"].values()),
            },
        )
        for name in policies
        for number, seconds in enumerate(times[name]["seconds"][WARM_UP:])
    ]


def records(model: str, policies: Mapping[str, Any], data: list[Sample]) -> list[dict[str, str | None]]:
    """Return the table rows of a model."""
    samples = [one for one in data if one.raw["model"] == model]
    rows = {row.variant: row for row in compare(samples, ROOT)}
    raw = {name: next(one.raw for one in samples if one.variant == name) for name in policies}
    return [
        {
            "embeddings and head": f"{model}, {name}",
            "peak of a step, MiB": f"{raw[name]['peak_bytes'] / 2**20:,.0f}",
            "ratio of peaks": f"{raw[name]['peak_bytes'] / raw[ROOT]['peak_bytes']:.2f}",
            "moved, MB a rank": f"{raw[name]['moved_bytes'] / 1e6:,.0f}",
            "step, s, median": f"{rows[name].median:.3f}",
            "ratio of steps, median [95 % interval]": rows[name].ratio_text,
        }
        for name in policies
    ]


if __name__ == "__main__":
    main()
