"""Preemption in the queue: which jobs of lower priority give their resources to a blocked job. Pure."""

from collections.abc import Sequence

from service.domain.jobs.job import JobState
from service.domain.queue.entry import QueueEntry
from service.domain.queue.resources import Resources, add_up, shortage, subtract

_RUNNING = (JobState.STARTING, JobState.RUNNING, JobState.RECOVERING)
_STOPPING = (JobState.PAUSING, JobState.CANCELLING)


def choose_victims(
    entry: QueueEntry, holders: Sequence[QueueEntry], *, held: Resources, total: Resources
) -> list[QueueEntry]:
    """Return the jobs to preempt: lowest priority first, then newest. Empty if preemption cannot free enough."""
    lower = [one for one in holders if one.priority < entry.priority]
    # Jobs that are stopping already free their resources without preemption.
    held = subtract(held, [one.needs for one in lower if one.state in _STOPPING])
    chosen: list[QueueEntry] = []
    for one in sorted((one for one in lower if one.state in _RUNNING), key=lambda one: (one.priority, -one.since)):
        if shortage(entry.needs, total, held) is None:
            break
        held = subtract(held, [one.needs])
        chosen.append(one)
    if shortage(entry.needs, total, held) is not None:
        return []
    return _needed_victims(chosen, entry.needs, held=held, total=total)


def _needed_victims(
    chosen: Sequence[QueueEntry], needs: Resources, *, held: Resources, total: Resources
) -> list[QueueEntry]:
    """Return the victims that are needed: a large one, chosen late, may make smaller ones unnecessary."""
    kept: list[QueueEntry] = []
    for one in chosen:
        spared = add_up([held, one.needs])
        if shortage(needs, total, spared) is None:
            held = spared
        else:
            kept.append(one)
    return kept
