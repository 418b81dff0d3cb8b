"""Data preparation in tokens/s: Trainshed against a plain loop over `tokenizers` and Hugging Face `datasets`.

`python -m benchmarks.data.prepare [--rounds N] [--quick] [--megabytes N]`. It also measures the seconds from an
uncached corpus to the first batch. Every run is a separate start that warms up on a small text and prepares the corpus
twice, each time into an empty cache: the first use of memory pages can cost more than the work itself.
"""

import functools
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from benchmarks.data.corpus import write_corpus
from benchmarks.harness import (
    Measured,
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
from benchmarks.launch import ProgramError, run_for_json

OURS = "Trainshed"
LOOP = "`tokenizers` in a loop, nothing written"
DATASETS = "Hugging Face `datasets`, two processes"
LENGTH, BATCH = 2048, 8
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}


def main() -> None:
    """Run the comparison and write its table."""
    parser = command_line(__doc__)
    parser.add_argument("--megabytes", type=int, help="size of the corpus [64; 4 with --quick]")
    arguments = parse(parser)
    megabytes = arguments.megabytes or (4 if arguments.quick else 64)
    with tempfile.TemporaryDirectory(prefix="trainshed-benchmark-") as root:
        facts = write_corpus(Path(root, "corpus"), size=megabytes * 10**6)
        samples = interleave(programs(Path(root)), arguments.rounds)
    write_result(
        "prepare",
        settings=facts
        | {"sequence_length": LENGTH, "batch": BATCH, "rounds": arguments.rounds, "quick": arguments.quick},
        data=samples,
        table=table(samples),
        folder=arguments.results,
    )


def programs(root: Path) -> dict[str, functools.partial[Measured]]:
    """Return the compared programs; each call is one start with empty caches."""
    # Processes of `datasets` already use all cores: more threads in each would compete for them.
    threads = {"TOKENIZERS_PARALLELISM": "true"}
    no_threads = OFFLINE | {"TOKENIZERS_PARALLELISM": "false", "HF_HOME": str(root / "hf")}
    return {
        OURS: functools.partial(one_run, root, "benchmarks.data.prepare_run", LENGTH, BATCH, caches=True),
        LOOP: functools.partial(one_run, root, "benchmarks.peers.tokenizers_loop", LENGTH, variables=threads),
        DATASETS: functools.partial(
            one_run, root, "benchmarks.peers.hf_prepare", LENGTH, BATCH, caches=True, variables=no_threads
        ),
    }


def one_run(
    root: Path,
    module: str,
    *arguments: int,
    caches: bool = False,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> Measured:
    """Return the tokens/s of one program. Raises ProgramError, also if programs differ in their number of tokens."""
    with tempfile.TemporaryDirectory(dir=root, ignore_cleanup_errors=True) as here:
        folders = [root / "corpus", Path(here, "cache")] if caches else [root / "corpus"]
        found = run_for_json(module, *folders, *arguments, here=Path(here), variables=variables)
    reference = root / "tokens"
    if not reference.exists():
        reference.write_text(str(found["tokens"]))
    if found["tokens"] != int(reference.read_text()):
        raise ProgramError(f"it counted {found['tokens']} tokens; expected {reference.read_text()}")
    return Measured(
        found["tokens"] / found["seconds"], found | {"first_rate": found["tokens"] / found["first_seconds"]}
    )


def table(samples: Sequence[Sample]) -> str:
    """Return a Markdown table of tokens/s and seconds to the first batch, with Trainshed's ratios to the others."""
    read, ours = taken(samples, "first_batch"), [sample for sample in samples if sample.variant == OURS]
    streamed = [*taken(ours, "first_batch_through_ray"), *(sample for sample in read if sample.variant != OURS)]
    waits = {row.variant: row.median for row in compare(read, OURS)}
    speed, first, waiting, waiting_for_ray = (
        ratios_of(OURS, found) for found in (samples, taken(samples, "first_rate"), read, streamed)
    )
    return markdown_table(
        [
            {
                "program": row.variant,
                "tokens/s, median": row.error if row.median is None else f"{row.median:,.0f}",
                "Trainshed's ÷ its, median [95 % interval]": speed.get(row.variant),
                "the first time": first.get(row.variant),
                "seconds to the first batch": None if (wait := waits[row.variant]) is None else f"{wait:.2f}",
                "Trainshed's ÷ its": waiting.get(row.variant),
                "the same through Ray Data": waiting_for_ray.get(row.variant),
            }
            for row in compare(samples, OURS)
        ]
    )


if __name__ == "__main__":
    main()
