"""Backfill: may a later job start before a blocked one, without a delay of it? Pure."""

from collections.abc import Sequence

from service.domain.queue.entry import QueueEntry
from service.domain.queue.resources import NOISE, Resources

_SUMS = 4096
"""Maximum number of future load states that are considered; beyond it, no job passes another."""


def may_pass(entry: QueueEntry, blocked: QueueEntry, others: Sequence[QueueEntry], *, total: Resources) -> bool:
    """Return whether the blocked job starts no later if this job starts now, whichever jobs end first.

    It could start later if some subset of the other jobs leaves enough for it, but not for both.
    """
    for name, amount in entry.needs.items():
        most = total.get(name, 0.0) - blocked.needs.get(name, 0.0)
        sums = _subset_sums([one.needs.get(name, 0.0) for one in others], most)
        if sums is None or any(load > most - amount + NOISE for load in sums):
            return False
    return True


def _subset_sums(loads: Sequence[float], most: float) -> set[float] | None:
    """Return the sums of all subsets of the loads, up to `most`; None if there are too many sums."""
    sums = {0.0}
    for load in loads:
        if load:
            sums |= {round(one + load, 6) for one in sums if one + load <= most + NOISE}
        if len(sums) > _SUMS:
            return None
    return sums
