"""audit_run(lines, starts, schedule) -> RunAudit: check of the samples that each optimizer step trained. Pure.

A run may train a step more than once: a new worker group resumes from the newest checkpoint and repeats the steps
after it. The last line of a step counts. Lines of a superseded group do not.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from service.domain.runs.audit_report import Difference, Gap, LossChange, Repeat, RunAudit
from service.domain.runs.sample_epochs import SampleEpochs

MOST_SAMPLES = 1 << 24
"""Maximum number of samples of a dataset whose epochs are checked: the check needs 4 bytes per sample."""
_REMEMBERED = 100_000
"""Maximum number of replaced lines that are kept for comparison."""


@dataclass(frozen=True)
class StepLine:
    """The metrics line of one optimizer step."""

    attempt: int
    epoch: int | None
    """Fencing epoch of the worker group that wrote the line; None if the line has none."""
    time: float
    step: int
    loss: float | None
    samples: tuple[int, ...]


@dataclass(frozen=True)
class GroupStart:
    """The start of a worker group: its first step is the one after `resumed_from`."""

    attempt: int
    epoch: int | None
    time: float
    resumed_from: int
    world: int | None = None


@dataclass(frozen=True)
class Schedule:
    """The steps and samples that a run should train."""

    sources: tuple[int, ...] = ()
    """Number of samples of each source that has its own epochs; empty if unknown."""
    global_batch: int | None = None
    """Samples per optimizer step."""
    end: int | None = None
    """Position in the data at which the run ends, if the spec counts epochs. Only there may a step be short."""
    short_step: int | None = None
    """Step that may be short although `end` is not known."""
    logging_steps: int = 1
    first: int = 0
    """Step before the first step of the run: the step of its parent's checkpoint, or 0."""
    consumed: int | None = 0
    """Number of positions in the data that its parent took; None if unknown."""
    last: int | None = None
    """Last step, if the run has succeeded."""


Lines = Callable[[], Iterable[StepLine]]
"""Function that reads all lines from the start, attempt by attempt, in the order in which they were written."""


def audit_run(lines: Lines, starts: Sequence[GroupStart], schedule: Schedule) -> RunAudit:
    """Audit a run. Reads the lines twice: first for the worker groups, then for their samples."""
    groups = _Groups(starts)
    for line in lines():
        groups.index(line)
    checker = _Checker(groups.list, starts, schedule)
    again = _Groups(starts)
    for line in lines():
        checker.check(line, again.index(line))
    return checker.finish()


@dataclass
class _Group:
    """Consecutive lines of one worker group."""

    attempt: int
    epoch: int | None
    time: float
    """Time of its first line (Unix seconds)."""
    resumed_from: int
    world: int | None

    def is_before(self, start: GroupStart) -> bool:
        """Return whether the other group started after this one trained."""
        if start.attempt != self.attempt:
            return start.attempt > self.attempt
        if start.epoch is not None and self.epoch is not None and start.epoch != self.epoch:
            return start.epoch > self.epoch
        return start.time > self.time


class _Groups:
    """The worker groups of a run's lines. A new attempt or epoch, or a step that does not increase, starts a group."""

    def __init__(self, starts: Sequence[GroupStart]) -> None:
        self._starts = sorted(starts, key=lambda start: (start.attempt, start.time))
        self._used = -1
        self._step = 0
        self._newest: int | None = None
        self.list: list[_Group] = []

    def index(self, line: StepLine) -> int | None:
        """Return the index of the line's group in `list`; None if the group was superseded."""
        last = self.list[-1] if self.list else None
        if last is None or last.attempt != line.attempt:
            self._newest = None
        if line.epoch is not None and self._newest is not None and line.epoch < self._newest:
            return None
        if last is None or last.attempt != line.attempt or self._is_newer(line) or line.step <= self._step:
            self._begin(line)
        self._newest = self._newest if line.epoch is None else line.epoch
        self._step = line.step
        return len(self.list) - 1

    def _is_newer(self, line: StepLine) -> bool:
        return line.epoch is not None and line.epoch != self._newest

    def _begin(self, line: StepLine) -> None:
        found, world, resumed = self._start_of(line), None, line.step - 1
        if found is not None:
            start = self._starts[found]
            self._used, world, resumed = found, start.world, min(start.resumed_from, resumed)
        elif self.list and self.list[-1].attempt == line.attempt:
            world = self.list[-1].world
        self.list.append(_Group(line.attempt, line.epoch, line.time, resumed, world))

    def _start_of(self, line: StepLine) -> int | None:
        """Return the index of the newest start before the line that no earlier group uses."""
        found = None
        for place in range(self._used + 1, len(self._starts)):
            start = self._starts[place]
            same = None in (start.epoch, line.epoch) or start.epoch == line.epoch
            if start.attempt == line.attempt and same and start.time <= line.time:
                found = place
        return found


@dataclass(frozen=True)
class _Replaced:
    """The kept part of a line whose step a later group trains again."""

    attempt: int
    world: int | None
    samples: int
    loss: float | None


def _limits(groups: Sequence[_Group], starts: Sequence[GroupStart]) -> list[float]:
    """Return the last step of each group that counts: the lowest step from which later groups resumed."""
    limits, limit = list[float](), float("inf")
    for group in reversed(groups):
        # A group without lines has discarded steps, too.
        resumed = (start.resumed_from for start in starts if group.is_before(start))
        limits.append(min(limit, min(resumed, default=limit)))
        limit = min(limits[-1], group.resumed_from)
    return limits[::-1]


class _Checker:
    """The check of a run, line by line."""

    def __init__(self, groups: Sequence[_Group], starts: Sequence[GroupStart], schedule: Schedule) -> None:
        self._groups, self._schedule = groups, schedule
        self._limits = _limits(groups, starts)
        self._replaced: dict[int, _Replaced] = {}
        self._repeats: dict[int, int] = {}
        self._step = schedule.first
        self._found = RunAudit()
        self._epochs = self._make_epochs()

    def check(self, line: StepLine, place: int | None) -> None:
        """Check one line of the group at index `place`. Groups that began after the first pass are skipped."""
        if place is not None and place >= len(self._groups):
            return
        self._found.lines += 1
        if place is None:
            self._found.superseded += 1
            return
        self._compare(line, place)
        # A later group resumed before this step, so this training of the step has no effect.
        if line.step > self._limits[place]:
            return
        self._check_gap(line.step)
        self._check_samples(line)
        found = self._found
        found.steps, found.samples = found.steps + 1, found.samples + len(line.samples)
        found.first_step = line.step if found.first_step is None else found.first_step
        self._step = found.last_step = line.step

    def finish(self) -> RunAudit:
        """Return all findings."""
        found, last = self._found, self._schedule.last
        if last is not None and last > self._step:
            self._check_gap(last, last_too=True)
        for place, steps in sorted(self._repeats.items()):
            group = self._groups[place]
            found.repeated.add(Repeat(group.attempt, group.epoch, group.resumed_from, steps), steps)
        for source in self._epochs:
            found.duplicated.extend(source.duplicates)
            found.missing_samples.extend(source.unseen)
        return found

    def _make_epochs(self) -> list[SampleEpochs]:
        plan = self._schedule
        if not plan.sources:
            self._found.notes.append("the run has no training_started event yet; epochs of the data are not checked")
            return []
        if sum(plan.sources) > MOST_SAMPLES:
            self._found.notes.append(f"the dataset has more than {MOST_SAMPLES} samples; its epochs are not checked")
            return []
        if plan.consumed is None or (plan.consumed and len(plan.sources) > 1):
            self._found.notes.append("the run begins inside an epoch of its parent; epochs are not checked")
            return []
        offsets = [sum(plan.sources[:place]) for place in range(len(plan.sources))]
        epochs = [SampleEpochs(size, first) for size, first in zip(plan.sources, offsets, strict=True) if size]
        if plan.consumed:
            epochs[0].skip(plan.consumed)
        return epochs

    def _compare(self, line: StepLine, place: int) -> None:
        """Compare a step with its earlier training."""
        world, found = self._groups[place].world, self._found
        before = self._replaced.pop(line.step, None)
        if before is not None:
            self._repeats[place] = self._repeats.get(place, 0) + 1
            if before.samples != hash(line.samples):
                message = f"other samples than in its earlier training (attempt {before.attempt})"
                found.out_of_order.add(Difference(line.step, line.attempt, message))
            same_size = before.world is not None and before.world == world
            if same_size and before.loss is not None and line.loss is not None and before.loss != line.loss:
                change = LossChange(line.step, line.attempt, line.loss, before.attempt, before.loss)
                found.changed_losses.add(change)
        if line.step > self._limits[place] and len(self._replaced) < _REMEMBERED:
            self._replaced[line.step] = _Replaced(line.attempt, world, hash(line.samples), line.loss)

    def _check_gap(self, step: int, *, last_too: bool = False) -> None:
        """Report the steps between the last counted line and `step` that lack a required line."""
        every, before = self._schedule.logging_steps, self._step
        skipped = step - before - (0 if last_too else 1)
        missing = (step - 1) // every - before // every + (1 if last_too else 0)
        if missing > 0:
            first = min((before // every + 1) * every, step)
            self._found.missing_steps.add(Gap(first, step if last_too else (step - 1) // every * every), missing)
        if skipped > 0:
            self._skip(skipped)

    def _skip(self, steps: int) -> None:
        if len(self._epochs) == 1 and self._schedule.global_batch:
            self._epochs[0].skip(steps * self._schedule.global_batch)
        elif self._epochs:
            self._epochs = []
            self._found.notes.append(f"step {self._step + 1} has no line; epochs of the data are not checked after it")

    def _check_samples(self, line: StepLine) -> None:
        total = sum(self._schedule.sources)
        if total and any(not 0 <= sample < total for sample in line.samples):
            message = f"sample ids outside 0-{total - 1}"
            self._found.out_of_order.add(Difference(line.step, line.attempt, message))
            self._epochs = []
            return
        deficit = self._deficit(line)
        if deficit:
            message = f"{len(line.samples)} samples instead of {self._schedule.global_batch}"
            self._found.out_of_order.add(Difference(line.step, line.attempt, message))
        for source in self._epochs:
            source.take(line.step, [one for one in line.samples if source.first <= one < source.first + source.size])
        if deficit > 0 and len(self._epochs) == 1:
            self._epochs[0].lose(deficit)

    def _deficit(self, line: StepLine) -> int:
        """Return how many samples the step lacks; negative if it has too many."""
        plan = self._schedule
        if plan.global_batch is None:
            return 0
        wanted = plan.global_batch
        if plan.end is not None and plan.consumed is not None:
            before = plan.consumed + (line.step - 1 - plan.first) * plan.global_batch
            wanted = min(wanted, max(plan.end - before, 0))
        deficit = wanted - len(line.samples)
        return 0 if line.step == plan.short_step and deficit > 0 else deficit
