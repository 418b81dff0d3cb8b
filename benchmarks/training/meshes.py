"""Steps of Trainshed and of transformers' own plans in turn, on several meshes of the same ranks."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
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
from benchmarks.training.turns import OURS, median, take_turns
from benchmarks.workload import Workload

THEIRS = "transformers"
Counts = Sequence[Mapping[str, Any]]
"""What `Traffic` counted in a step, by rank."""
Columns = Callable[[Workload, Counts, Mapping[str, Counts]], dict[str, str | None]]
"""Return the further columns of a mesh; the last argument has the counts of all meshes that ran."""


def compare_meshes(
    name: str,
    description: str | None,
    *,
    meshes: Mapping[int, Mapping[str, Workload]],
    toy: Mapping[str, Any],
    columns: Columns,
) -> None:
    """Run the comparison of the command line, and write its table.

    `meshes` has workloads by ranks and mesh, the first of each the baseline; `--quick` changes them as `toy` says.
    """
    parser = command_line(description)
    parser.add_argument("--ranks", type=int, choices=meshes, default=2, help="number of ranks [%(default)s]")
    arguments = parse(parser, rounds=6)
    workloads = {
        mesh: workload.model_copy(update=toy if arguments.quick else {})
        for mesh, workload in meshes[arguments.ranks].items()
    }
    samples = interleave(
        {mesh: functools.partial(one_start, workload) for mesh, workload in workloads.items()}, arguments.rounds
    )
    write_result(
        name if arguments.ranks == 2 else f"{name}-ranks-{arguments.ranks}",
        settings={mesh: workload.model_dump() for mesh, workload in workloads.items()}
        | {"rounds": arguments.rounds, "quick": arguments.quick},
        data=samples,
        table=table(workloads, samples, columns),
        folder=arguments.results,
    )


def one_start(workload: Workload, peer: str = "benchmarks.peers.hf_distributed") -> Measured:
    """Return Trainshed's median step, with that of a peer's module in the raw data. Raises ProgramError."""
    turns = take_turns(workload, peer)
    raw = {THEIRS: median(workload, turns.theirs), **turns._asdict()}
    return Measured(median(workload, turns.ours), raw)


def table(workloads: Mapping[str, Workload], samples: Sequence[Sample], columns: Columns) -> str:
    """Return a Markdown table with a row for each mesh."""
    of_mesh = {mesh: [one for one in samples if one.variant == mesh] for mesh in workloads}
    ran = {mesh: next((one for one in found if one.value is not None), None) for mesh, found in of_mesh.items()}
    counts = {mesh: [rank["ours"] for rank in one.raw["traffic"]] for mesh, one in ran.items() if one is not None}
    first = next(iter(workloads))
    to_first = {row.variant: row.ratio_text for row in compare(samples, first)}
    records = []
    for mesh, workload in workloads.items():
        further = columns(workload, counts[mesh], counts) if mesh in counts else {}
        records.append({"mesh": mesh, **_steps(of_mesh[mesh]), f"Trainshed's to {first}": to_first[mesh], **further})
    return markdown_table(records)


def _steps(samples: Sequence[Sample]) -> dict[str, str | None]:
    both = [replace(one, variant=THEIRS) for one in taken(samples, THEIRS)]
    theirs, ours = compare([*both, *(replace(one, variant=OURS) for one in samples)], THEIRS)
    return {
        f"{THEIRS}, seconds a step": seconds_text(theirs),
        OURS: seconds_text(ours),
        "ratio, median [95 % interval]": ours.ratio_text,
    }


def seconds_text(row: Row) -> str | None:
    """Return a row's median in seconds; None if it has none."""
    return None if row.median is None else f"{row.median:.4f}"


def mean_bytes(counts: Counts, *kinds: str) -> float:
    """Return the bytes that a rank moves in a step by some kinds of collectives, or by all; a mean over ranks."""
    moved = [sum(rank["bytes"].get(kind, 0) for kind in kinds or rank["bytes"]) for rank in counts]
    return float(np.mean(moved))


def megabytes(moved: float, expected: float) -> str | None:
    """Return the bytes of a step, and their ratio to those of the formula; None if there are none."""
    return f"{moved / 1e6:.2f} ({moved / expected:.3f})" if moved and expected else None
