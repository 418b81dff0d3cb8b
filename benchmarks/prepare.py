"""Text → samples: tokens/s of our preparing, against a plain loop over `tokenizers`, and Hugging Face `datasets`.

`python -m benchmarks.prepare [--rounds N] [--quick] [--megabytes N]`. And the seconds from a corpus of which nothing is
cached to the first batch. Every run is a start of its own, which warms up on a little text, and prepares the corpus
twice, each time into an empty cache: memory that a machine hands out for the first time can cost more than its use.
"""

import functools
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from benchmarks.corpus import write_corpus
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
from benchmarks.launch import ProgramError, ask_module

OURS = "Trainshed"
LOOP = "`tokenizers` in a loop, nothing written"
DATASETS = "Hugging Face `datasets`, two processes"
LENGTH, BATCH = 2048, 8
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}


def main() -> None:
    """Run the comparison and write its table."""
    parser = command_line(__doc__)
    parser.add_argument("--megabytes", type=int, help="size of the corpus (64; of a toy, 4)")
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
    """What is compared; each call is one start with caches of its own."""
    # Processes of `datasets` already use all cores, and threads in each would only get in each other's way.
    threads = {"TOKENIZERS_PARALLELISM": "true"}
    no_threads = OFFLINE | {"TOKENIZERS_PARALLELISM": "false", "HF_HOME": str(root / "hf")}
    return {
        OURS: functools.partial(one_run, root, "benchmarks.prepare_run", LENGTH, BATCH, caches=True),
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
    """Tokens/s of one program; of the tokens that the corpus has in all of them. Raises ProgramError."""
    with tempfile.TemporaryDirectory(dir=root, ignore_cleanup_errors=True) as here:
        folders = [root / "corpus", Path(here, "cache")] if caches else [root / "corpus"]
        found = ask_module(module, *folders, *arguments, here=Path(here), variables=variables)
    reference = root / "tokens"
    if not reference.exists():
        reference.write_text(str(found["tokens"]))
    if found["tokens"] != int(reference.read_text()):
        raise ProgramError(f"it made {found['tokens']} tokens of the corpus, and the first {reference.read_text()}")
    return Measured(
        found["tokens"] / found["seconds"], found | {"first_rate": found["tokens"] / found["first_seconds"]}
    )


def table(samples: Sequence[Sample]) -> str:
    """Markdown: tokens/s and seconds to the first batch, and how ours stand to each of the others."""
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
