"""Run audit of a job: read its events and metrics lines, and check which samples its steps trained."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

from service.domain.jobs.job import Job
from service.domain.runs.audit import GroupStart, Schedule, StepLine, audit_run
from service.domain.runs.audit_report import RunAudit
from service.domain.runs.json_lines import Line, number
from service.errors import NotAudited
from service.ports import Cancellation, Cursor, LogSource, RunDirs
from service.use_cases.runs.streams import Numbered, Reader, read_lines
from train_loop.plan import Origin, plan_samples


@dataclass
class _Facts:
    """Facts about a run's schedule, from its events."""

    starts: list[GroupStart]
    samples: int = 0
    sources: tuple[int, ...] = ()
    global_batch: int | None = None
    steps: int | None = None
    last: int | None = None


def audit_job(run_dirs: RunDirs, job: Job, cancellation: Cancellation) -> RunAudit:
    """Audit a job. Reads its run directory line by line. Raises NotAudited, CallCancelled."""
    if not job.spec.run.training.audit_samples:
        raise NotAudited(job.id)
    read = partial(_lines, run_dirs, job.run_dir, cancellation)
    facts = _read_events(read("events"))
    return audit_run(lambda: _step_lines(read("metrics")), facts.starts, _schedule(run_dirs, job, facts))


def _schedule(run_dirs: RunDirs, job: Job, facts: _Facts) -> Schedule:
    training, mixed = job.spec.run.training, sum(one.weight is not None for one in job.spec.data.sources) > 1
    by_epochs, first = training.epochs is not None, job.parent.step if job.parent else 0
    consumed = _consumed(run_dirs, job, facts.samples, mixed=mixed)
    end = None
    if by_epochs and not mixed and facts.samples and (training.max_steps is None or consumed is not None):
        origin = Origin(step=first, consumed=consumed or 0)
        end = plan_samples(training, samples=facts.samples, global_batch=facts.global_batch or 1, origin=origin)
    return Schedule(
        sources=facts.sources if mixed else (facts.samples,) if facts.samples else (),
        global_batch=facts.global_batch,
        end=end,
        short_step=facts.steps if by_epochs and mixed else None,
        logging_steps=training.logging_steps,
        first=first,
        consumed=consumed,
        last=facts.last,
    )


def _consumed(run_dirs: RunDirs, job: Job, samples: int, *, mixed: bool) -> int | None:
    """Return the number of data positions that the parent's checkpoint consumed; None if unknown."""
    if job.parent is None:
        return 0
    parent = run_dirs.parent(job.run_dir)
    if parent is None or (mixed and parent.same_order):
        return None
    position = parent.manifest.position
    return position.epoch * samples + position.samples if parent.same_order else 0


def _lines(
    run_dirs: RunDirs, run_dir: str, cancellation: Cancellation, kind: Literal["events", "metrics"]
) -> Iterator[Numbered]:
    for found in read_lines(Reader(run_dirs, run_dir, LogSource(kind)), Cursor()):
        cancellation.check()
        yield found


def _read_events(events: Iterator[Numbered]) -> _Facts:
    facts = _Facts([])
    for found in events:
        line, attempt = found.line, found.cursor.attempt
        if line.get("event") == "prepared":
            facts.sources = _source_sizes(line) or facts.sources
        elif line.get("event") == "training_started":
            facts.starts.append(_start(line, attempt))
            facts.samples = _whole(line, "samples") or facts.samples
            facts.global_batch = _whole(line, "global_batch") or facts.global_batch
            facts.steps = _whole(line, "steps") or facts.steps
        elif line.get("event") == "training_ended" and line.get("result") == "succeeded":
            facts.last = _whole(line, "step") or facts.last
    return facts


def _start(line: Line, attempt: int) -> GroupStart:
    time, resumed = number(line, "time") or 0.0, _whole(line, "resumed_from") or 0
    return GroupStart(attempt, _whole(line, "epoch"), time, resumed, _whole(line, "world"))


def _source_sizes(line: Line) -> tuple[int, ...]:
    sources = line.get("sources")
    sizes = [_whole(one, "samples") for one in sources if isinstance(one, dict)] if isinstance(sources, list) else []
    return tuple(size or 0 for size in sizes)


def _step_lines(metrics: Iterator[Numbered]) -> Iterator[StepLine]:
    """Parse the metrics lines that have samples; steps without such a line count as missing."""
    for found in metrics:
        line = found.line
        step, samples = _whole(line, "step"), line.get("samples")
        if step is None or not isinstance(samples, list):
            continue
        ids = tuple(one for one in samples if isinstance(one, int))
        time, loss = number(line, "time") or 0.0, number(line, "loss")
        yield StepLine(found.cursor.attempt, _whole(line, "epoch"), time, step, loss, ids)


def _whole(line: Line, name: str) -> int | None:
    value = number(line, name)
    return None if value is None else int(value)
