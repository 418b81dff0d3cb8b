"""Benchmark harness: interleaved rounds, ratios to a baseline with intervals, and stored results."""

import argparse
import tempfile
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel

from benchmarks.launch import ProgramError
from benchmarks.machine import describe_machine

PEER_PACKAGES = "accelerate", "datasets", "lightning"
"""Packages of the extra `bench`. Without them, the rows of their programs have an error, and the others run."""
RESULTS = Path(__file__).with_name("results")


@dataclass(frozen=True)
class Measured:
    """Result of one run: the compared value, and its raw data."""

    value: float
    raw: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Sample:
    """Result of one variant in one round: a value or an error."""

    variant: str
    round: int
    value: float | None
    error: str | None = None
    raw: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """Comparison of a variant with the baseline over all rounds."""

    variant: str
    median: float | None
    ratio: float | None
    """Median over rounds of (value / the baseline's value of the same round)."""
    low: float | None
    high: float | None
    error: str | None = None

    @property
    def ratio_text(self) -> str:
        """Return the ratio with its interval, and the error, if any."""
        ratio = None if self.ratio is None else f"{self.ratio:.3f} [{self.low:.3f}, {self.high:.3f}]"
        return "; ".join(part for part in (ratio, self.error) if part) or "no baseline to compare with"


class Result(BaseModel):
    """Stored result of a benchmark: table and all raw data."""

    name: str
    date: str
    machine: dict[str, Any]
    settings: dict[str, Any]
    data: list[dict[str, Any]]
    table: str


def interleave(
    variants: Mapping[str, Callable[[], Measured]], rounds: int, say: Callable[[str], None] = print
) -> list[Sample]:
    """Run variants in the order A B C, B C A, C A B …, so that disturbances and order effects affect all equally.

    A variant that has only failed so far is skipped in later rounds.
    """
    samples: list[Sample] = []
    names = list(variants)
    for number in range(rounds):
        first = number % len(names)
        for name in [*names[first:], *names[:first]]:
            tried = [sample for sample in samples if sample.variant == name]
            if tried and all(sample.error for sample in tried):
                continue
            samples.append(_sample(name, number, variants[name]))
            say(f"round {number + 1} of {rounds}, {name}: {samples[-1].error or samples[-1].value}")
    return samples


def _sample(name: str, number: int, measure: Callable[[], Measured]) -> Sample:
    try:
        measured = measure()
    except ProgramError as error:
        return Sample(name, number, None, str(error))
    except Exception as error:  # a peer may fail in any way; its row shows the error
        traceback.print_exc()
        return Sample(name, number, None, f"{type(error).__name__}: {error}")
    return Sample(name, number, measured.value, raw=measured.raw)


def compare(samples: Iterable[Sample], baseline: str) -> list[Row]:
    """Return each variant's median, and the median and 95 % interval of its ratios to the baseline, in sample order."""
    by_variant: dict[str, list[Sample]] = {}
    for sample in samples:
        by_variant.setdefault(sample.variant, []).append(sample)
    base = {sample.round: sample.value for sample in by_variant.get(baseline, [])}
    return [_row(variant, found, base) for variant, found in by_variant.items()]


def _row(variant: str, samples: list[Sample], base: Mapping[int, float | None]) -> Row:
    values = [sample.value for sample in samples if sample.value is not None]
    error = next((sample.error for sample in samples if sample.error), None)
    pairs = [(sample.value, base.get(sample.round)) for sample in samples]
    ratios = [value / other for value, other in pairs if value is not None and other is not None]
    median = float(np.median(values)) if values else None
    if not ratios:
        return Row(variant, median, None, None, None, error)
    return Row(variant, median, float(np.median(ratios)), *bootstrap_interval(ratios), error)


def taken(samples: Iterable[Sample], name: str) -> list[Sample]:
    """Return the samples with the raw number `name` as value; None if a sample does not have it."""
    return [replace(sample, value=sample.raw.get(name)) for sample in samples]


def ratios_of(variant: str, samples: Sequence[Sample]) -> dict[str, str]:
    """Return one variant's ratio to each other variant that has values."""
    others = dict.fromkeys(sample.variant for sample in samples if sample.variant != variant)
    rows = {other: row for other in others for row in compare(samples, other) if row.variant == variant}
    return {other: row.ratio_text for other, row in rows.items() if row.ratio is not None}


def bootstrap_interval(
    values: Sequence[float], *, level: float = 0.95, draws: int = 10_000, seed: int = 0
) -> tuple[float, float]:
    """Return the percentile bootstrap interval of the median (Efron, 1979)."""
    drawn = np.random.default_rng(seed).choice(values, (draws, len(values)))
    low, high = np.quantile(np.median(drawn, axis=1), [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def ratio_table(rows: Sequence[Row], *, what: str, baseline: str) -> str:
    """Return a Markdown table with the median of `what`, and the ratio with its interval."""
    return markdown_table(
        [
            {
                "program": row.variant,
                f"{what}, median": None if row.median is None else f"{row.median:.4f}",
                f"ratio to {baseline}, median [95 % interval]": row.ratio_text,
            }
            for row in rows
        ]
    )


def pair_record(ranks: int, rows: Sequence[Row], names: tuple[str, str]) -> dict[str, Any]:
    """Return the table row of a baseline and of one variant, both in seconds, by number of ranks."""
    baseline, variant = rows
    seconds = {name: f"{row.median:.4f}" for name, row in zip(names, (baseline, variant), strict=True)}
    return {"ranks": ranks, **seconds, "ratio, median [95 % interval]": variant.ratio_text}


def markdown_table(records: Sequence[Mapping[str, Any]]) -> str:
    """Return a Markdown table of records. Its columns are all their keys; missing values are dashes."""
    head = list(dict.fromkeys(key for record in records for key in record))
    cells = [[_cell(record.get(key)) for key in head] for record in records]
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, ["---"] * len(head), *cells])


def _cell(value: Any) -> str:
    return "–" if value is None else " ".join(str(value).replace("|", "/").split())


def write_result(
    name: str, *, settings: Mapping[str, Any], data: Iterable[Any], table: str, folder: Path = RESULTS
) -> Path:
    """Write <date>-<name>.json with all data, and <name>.md with the table; return the path of the JSON file.

    Raises SystemExit after that if a program has failed that is installed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    now = datetime.now(UTC)
    result = Result(
        name=name,
        date=now.isoformat(timespec="seconds"),
        machine=describe_machine(),
        settings=dict(settings),
        data=[item if isinstance(item, dict) else asdict(item) for item in data],
        table=table,
    )
    file = folder / f"{now:%Y-%m-%d}-{name}.json"
    file.write_text(result.model_dump_json(indent=1) + "\n")
    machine = result.machine
    where = f"{machine['device'] or machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB"
    foot = f"{result.date[:10]} · {where} · commit {machine['commit']} · raw data: `{file.name}`"
    (folder / f"{name}.md").write_text(f"{table}\n\n{foot}\n")
    print(f"{table}\n\n{foot}")
    if failed := failures(result.data):
        raise SystemExit(f"{name}: {'; '.join(failed)}")
    return file


def failures(data: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the errors of samples, without those of peers that are not installed."""
    samples = [item.get("sample", item) for item in data]
    found = {one["variant"]: one["error"] for one in samples if one.get("error") and "variant" in one}
    return [f"{variant}: {error}" for variant, error in found.items() if not _lacks_peer(error)]


def _lacks_peer(error: str) -> bool:
    return any(f"No module named '{package}'" in error for package in PEER_PACKAGES)


def command_line(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the common options of all benchmarks."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--rounds", type=int, help="interleaved rounds")
    parser.add_argument("--quick", action="store_true", help="run one round of toy size, as a smoke test")
    parser.add_argument("--results", type=Path, help=f"folder for results [{RESULTS}; temporary with --quick]")
    return parser


def parse(parser: argparse.ArgumentParser, *, rounds: int = 10) -> argparse.Namespace:
    """Parse this process's arguments; the default of --rounds is `rounds`, or 1 with --quick."""
    arguments = parser.parse_args()
    if arguments.rounds is None:
        arguments.rounds = 1 if arguments.quick else rounds
    if arguments.results is None:
        # Toy results must not replace real ones.
        arguments.results = Path(tempfile.mkdtemp(prefix="trainshed-results-")) if arguments.quick else RESULTS
    return arguments
