"""Seconds from opening the data to the first batch for a resume at a late step, against one at an early step.

`python -m benchmarks.data.resume [--rounds N] [--quick]`. It compares Trainshed, Hugging Face, and the order of samples
alone. Every round starts each program once, which opens both steps alternately several times, from the page cache.
"""

import functools
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.data.prepare import OFFLINE
from benchmarks.data.streams import write_samples
from benchmarks.harness import (
    Measured,
    Row,
    Sample,
    command_line,
    compare,
    interleave,
    markdown_table,
    parse,
    ratios_of,
    taken,
    write_result,
)
from benchmarks.launch import run_for_json

OURS, RAY = "Trainshed, torchrun", "Trainshed, Ray Data"
ORDER = "Trainshed, a step's sample ids alone"
PROGRAMS = {
    OURS: ("benchmarks.data.resume_run", "local"),
    RAY: ("benchmarks.data.resume_run", "ray"),
    ORDER: ("benchmarks.data.resume_run", "order"),
    "`datasets`, streaming, shuffled, skip(n)": ("benchmarks.peers.hf_resume", "skip"),
    "`datasets`, streaming, shuffled, load_state_dict": ("benchmarks.peers.hf_resume", "state"),
    "Hugging Face Trainer's skip_first_batches": ("benchmarks.peers.hf_resume", "trainer"),
}
STEPS = (100, 10_000)
SAMPLES = (10, 10_000_000)
"""Early and late sample for the order alone."""
BATCH, LENGTH = 8, 64
_STEPS_LEFT = 4200
"""Steps after the late step: more than Ray Data plans at once."""
PAIRS = 5
"""Pairs of openings in one start."""


def main() -> None:
    """Run the comparison and write its table."""
    arguments = parse(command_line(__doc__))
    steps = (10, 100) if arguments.quick else STEPS
    pairs = 1 if arguments.quick else PAIRS
    count = (steps[1] + (100 if arguments.quick else _STEPS_LEFT)) * BATCH
    with tempfile.TemporaryDirectory(prefix="trainshed-benchmark-") as root:
        write_samples(Path(root, "samples"), samples=count, length=LENGTH)
        runs = {
            name: functools.partial(one_run, Path(root), *program, SAMPLES if name == ORDER else steps, pairs)
            for name, program in PROGRAMS.items()
        }
        samples = interleave(runs, arguments.rounds)
    write_result(
        "resume",
        settings={"steps": steps, "samples_of_order": SAMPLES, "samples": count, "sequence_length": LENGTH}
        | {"batch": BATCH, "pairs": pairs, "rounds": arguments.rounds, "quick": arguments.quick},
        data=samples,
        table=table(samples, steps),
        folder=arguments.results,
    )


def one_run(root: Path, module: str, way: str, places: tuple[int, int], pairs: int) -> Measured:
    """Measure one start; the value is the seconds at the late step. Raises ProgramError."""
    variables = OFFLINE | {"HF_HOME": str(root / "hf")}
    with tempfile.TemporaryDirectory(dir=root, ignore_cleanup_errors=True) as here:
        found = run_for_json(module, root / "samples", way, BATCH, pairs, *places, here=Path(here), variables=variables)
    return Measured(found["late"], found)


def table(samples: Sequence[Sample], steps: tuple[int, int]) -> str:
    """Return a Markdown table of the seconds at both steps, their ratio, and Trainshed's ratios at the late step."""
    service = ratios_of(RAY, [sample for sample in samples if sample.variant not in (OURS, ORDER)])
    torchrun = ratios_of(OURS, [sample for sample in samples if sample.variant not in (RAY, ORDER)])
    return markdown_table(
        [
            {
                "program": name,
                f"seconds to the first batch at step {steps[0]:,}": seconds(early.median),
                f"at step {steps[1]:,}": seconds(late.median),
                "ratio, median [95 % interval]": late.ratio_text,
                f"{OURS} ÷ it, at step {steps[1]:,}": torchrun.get(name),
                f"{RAY} ÷ it": service.get(name),
            }
            for name in PROGRAMS
            for early, late in [both_places(samples, name)]
        ]
    )


def both_places(samples: Sequence[Sample], name: str) -> tuple[Row, Row]:
    """Return the rows of one program at the early and the late step, the late compared with the early one."""
    found = [sample for sample in samples if sample.variant == name]
    places = [replace(sample, variant=place) for place in ("early", "late") for sample in taken(found, place)]
    early, late = compare(places, "early")
    return early, late


def seconds(value: float | None) -> str | None:
    """Format seconds, or microseconds for short times."""
    if value is None:
        return None
    return f"{value:.3f}" if value > 1e-3 else f"{value * 1e6:.0f} µs"


if __name__ == "__main__":
    main()
