"""Placement of the workers of running jobs on nodes, if it is known. Pure."""

from collections.abc import Iterable, Mapping

from service.domain.queue.entry import QueueEntry
from service.domain.queue.resources import Resources
from train_loop.plan import Capacity, lay_out


class Placement:
    """A simulated placement of jobs, one after another, by the layout that their drivers use.

    The placement is unknown as soon as one job does not fit.
    """

    def __init__(self, cluster: Capacity, holders: Iterable[QueueEntry]) -> None:
        self._free: list[dict[str, float]] = [dict(node) for node in cluster.nodes]
        self._known = bool(self._free)
        self._reserved: dict[str, tuple[Resources, Mapping[int, range]]] = {}
        for entry in holders:
            self.reserve(entry)

    def reserve(self, entry: QueueEntry) -> None:
        """Place a job. This replaces its earlier placement, if it has one."""
        self._release(entry.id)
        ranks = lay_out(entry.scaling, self._free, group=entry.group) if self._known else None
        if ranks is None:
            self._known = False
            return
        self._reserved[entry.id] = entry.scaling.resources_per_worker, ranks
        self._change(entry.id, -1)

    def fits(self, entry: QueueEntry) -> bool:
        """Return whether the nodes can hold a job; its own places count as free. True if the placement is unknown."""
        if not self._known:
            return True
        self._change(entry.id, +1)
        ranks = lay_out(entry.scaling, self._free, group=entry.group)
        self._change(entry.id, -1)
        return ranks is not None

    def _release(self, job_id: str) -> None:
        self._change(job_id, +1)
        self._reserved.pop(job_id, None)

    def _change(self, job_id: str, sign: int) -> None:
        each, ranks = self._reserved.get(job_id, ({}, {}))
        for node, mine in ranks.items():
            for name, amount in each.items():
                self._free[node][name] = self._free[node].get(name, 0.0) + sign * amount * len(mine)
