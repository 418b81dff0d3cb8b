"""Run audit: a correct schedule is clean after any faults, and any wrong sample is found."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.domain.runs.audit import GroupStart, Schedule, StepLine, audit_run
from service.domain.runs.audit_report import LISTED, Gap, Repeat, RunAudit


def order(samples: int, *, epochs: int, seed: int = 0) -> list[int]:
    """Return the sample ids of `epochs` shuffled epochs, one after the other."""
    chance, ids = random.Random(seed), list[int]()
    for _ in range(epochs):
        epoch = list(range(samples))
        chance.shuffle(epoch)
        ids += epoch
    return ids


def steps_of(ids: Sequence[int], batch: int) -> list[tuple[int, ...]]:
    """Return the sorted samples of each step; the last step may be short."""
    return [tuple(sorted(ids[place : place + batch])) for place in range(0, len(ids), batch)]


@dataclass
class History:
    """A run with faults: its lines, its starts, and its schedule."""

    lines: list[StepLine]
    starts: list[GroupStart]
    schedule: Schedule

    def audit(self) -> RunAudit:
        return audit_run(lambda: self.lines, self.starts, self.schedule)


def history(
    samples: int = 20,
    batch: int = 4,
    epochs: int = 2,
    groups: Sequence[tuple[int, int | None, int, int]] = ((1, 1, 0, 999),),
    logging_steps: int = 1,
    seed: int = 0,
) -> History:
    """Return a run of groups, each (attempt, epoch, step resumed from, last step)."""
    wanted = steps_of(order(samples, epochs=epochs, seed=seed), batch)
    lines, starts, time = list[StepLine](), list[GroupStart](), 0.0
    for attempt, epoch, resumed, last in groups:
        time += 1.0
        starts.append(GroupStart(attempt, epoch, time, resumed, world=2))
        for step in range(resumed + 1, min(last, len(wanted)) + 1):
            time += 1.0
            if step % logging_steps == 0 or step == len(wanted):
                lines.append(StepLine(attempt, epoch, time, step, 1.0 / step, wanted[step - 1]))
    plan = Schedule((samples,), batch, end=samples * epochs, logging_steps=logging_steps, last=len(wanted))
    return History(lines, starts, plan)


FAULTS = ((1, 1, 0, 5), (1, 2, 4, 7), (2, 1, 2, 9), (3, 1, 9, 99))


@pytest.mark.parametrize("epoch", [True, False])
def test_audit_of_a_run_with_restarts_is_clean_and_counts_repeats(epoch: bool) -> None:
    run = history(groups=FAULTS)
    if not epoch:
        run.lines = [replace(line, epoch=None) for line in run.lines]
        run.starts = [replace(start, epoch=None) for start in run.starts]
    found = run.audit()
    assert found.clean, found
    assert (found.steps, found.samples, found.first_step, found.last_step) == (10, 40, 1, 10)
    repeats = [(one.attempt, one.resumed_from, one.steps) for one in found.repeated.listed]
    assert (found.repeated.total, repeats) == (6, [(1, 4, 1), (2, 2, 5)])


def test_audit_without_start_events_sees_restarts_in_the_steps() -> None:
    run = history(groups=FAULTS)
    found = audit_run(lambda: run.lines, [], run.schedule)
    assert (found.clean, found.repeated.total) == (True, 6)


def test_audit_ignores_lines_of_a_superseded_group() -> None:
    run = history(groups=((1, 1, 0, 6), (1, 2, 4, 99)))
    late = [replace(line, step=line.step + 1, samples=(0, 0, 0, 0)) for line in run.lines[4:6]]
    found = replace(run, lines=[*run.lines[:8], *late, *run.lines[8:]]).audit()
    assert (found.clean, found.superseded, found.repeated.listed) == (True, 2, [Repeat(1, 2, 4, 2)])


def test_audit_of_late_lines_of_an_earlier_attempt_is_clean() -> None:
    run = history(groups=((1, 1, 0, 9), (2, 1, 5, 99)))
    assert (run.audit().clean, run.audit().steps, run.audit().repeated.total) == (True, 10, 4)


def test_audit_reports_replays_with_other_samples_and_other_losses() -> None:
    run = history(groups=((1, 1, 0, 6), (1, 2, 4, 99)))
    run.lines[5] = replace(run.lines[5], samples=(1, 2, 3, 4), loss=9.0)
    found = run.audit()
    assert [(one.step, one.attempt) for one in found.out_of_order.listed] == [(6, 1)]
    assert [(one.step, one.earlier_loss) for one in found.changed_losses.listed] == [(6, 9.0)]
    resized = replace(run, starts=[replace(run.starts[0], world=4), run.starts[1]])
    assert resized.audit().changed_losses.total == 0


def test_audit_reports_ranges_of_missing_steps_to_the_end_of_the_run() -> None:
    run = history()
    run.lines = [line for line in run.lines if line.step not in (1, 4, 5, 9, 10)]
    found = run.audit()
    assert found.missing_steps.listed == [Gap(1, 1), Gap(4, 5), Gap(9, 10)]
    assert (found.missing_steps.total, found.duplicated.total, found.clean) == (5, 0, False)


def test_audit_with_logging_steps_expects_only_logged_steps() -> None:
    run = history(samples=23, epochs=3, logging_steps=3)
    assert run.audit().clean
    run.lines = [line for line in run.lines if line.step not in (6, 18)]
    assert run.audit().missing_steps.listed == [Gap(6, 6), Gap(18, 18)]


def test_audit_of_a_clone_begins_after_the_parents_step() -> None:
    run = history(samples=22, groups=((1, 1, 3, 99),))
    run.schedule = replace(run.schedule, first=3, consumed=12)
    found = run.audit()
    assert found.clean, found
    run.schedule = replace(run.schedule, first=0, consumed=0)
    assert run.audit().missing_steps.listed == [Gap(1, 3)]


def test_audit_of_a_mixture_checks_each_source() -> None:
    first, second = order(6, epochs=4), [6 + one for one in order(10, epochs=2)]
    ids = [one for pair in zip(first[:20], second, strict=True) for one in pair]
    lines = [StepLine(1, 1, float(n), n, None, samples) for n, samples in enumerate(steps_of(ids, 4), 1)]
    plan = Schedule((6, 10), 4, last=len(lines))
    assert audit_run(lambda: lines, [], plan).clean
    lines[1] = replace(lines[1], samples=(*lines[1].samples[:3], lines[1].samples[2]))
    assert not audit_run(lambda: lines, [], plan).clean


def test_audit_of_an_active_run_ignores_groups_started_meanwhile() -> None:
    run = history(groups=((1, 1, 0, 6), (1, 2, 4, 8)))
    run.schedule = replace(run.schedule, last=None)
    readings = iter([run.lines[:6], run.lines])
    found = audit_run(lambda: next(readings), run.starts[:1], run.schedule)
    assert (found.clean, found.steps, found.lines) == (True, 6, 6)


def test_audit_lists_a_bounded_number_of_findings() -> None:
    run = history(samples=2000, batch=20, epochs=1)
    run.lines = [replace(line, samples=run.lines[0].samples) for line in run.lines]
    found = run.audit()
    assert (found.duplicated.total, len(found.duplicated.listed)) == (1980, LISTED)
    assert len(found.missing_samples.listed) == LISTED


runs = st.tuples(st.integers(1, 40), st.integers(1, 9), st.integers(1, 4), st.integers(0, 9))
cuts = st.lists(st.tuples(st.integers(1, 12), st.integers(0, 12), st.booleans()), max_size=6)


def faulty(shape: tuple[int, int, int, int], faults: list[tuple[int, int, bool]]) -> History:
    """Return a run that is killed repeatedly and resumes some steps before each kill."""
    samples, batch, epochs, seed = shape
    last = -(-samples * epochs // batch)
    groups, attempt, epoch, resumed = list[tuple[int, int | None, int, int]](), 1, 1, 0
    for trained, back, new_attempt in faults:
        reached = min(resumed + trained, last)
        groups.append((attempt, epoch, resumed, reached))
        resumed = max(reached - back, resumed)
        attempt, epoch = (attempt + 1, 1) if new_attempt else (attempt, epoch + 1)
    groups.append((attempt, epoch, resumed, last))
    return history(samples, batch, epochs, groups, seed=seed)


@given(runs, cuts)
def test_audit_of_correct_schedule_with_any_kills_and_resumes_is_clean(
    shape: tuple[int, int, int, int], faults: list[tuple[int, int, bool]]
) -> None:
    found = faulty(shape, faults).audit()
    assert found.clean, found
    assert found.lines == found.steps + found.repeated.total


@given(runs, cuts, st.data())
def test_audit_finds_any_wrong_sample_or_missing_line(
    shape: tuple[int, int, int, int], faults: list[tuple[int, int, bool]], data: st.DataObject
) -> None:
    run = faulty(shape, faults)
    newest = {line.step: place for place, line in enumerate(run.lines)}
    place = data.draw(st.sampled_from(sorted(newest.values())))
    line, kind = run.lines[place], data.draw(st.sampled_from(["lost line", "lost sample", "doubled", "exchanged"]))
    if kind == "lost line":
        run.lines = [one for one in run.lines if one is not line]
    elif kind == "lost sample":
        run.lines[place] = replace(line, samples=line.samples[1:])
    elif kind == "doubled":
        run.lines[place] = replace(line, samples=(*line.samples, line.samples[0]))
    else:
        other = data.draw(st.integers(0, shape[0] - 1))
        changed = tuple(sorted((*line.samples[1:], other)))
        if changed == line.samples:
            return
        run.lines[place] = replace(line, samples=changed)
    assert not run.audit().clean
