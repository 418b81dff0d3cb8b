"""What a reconciler knows of the cluster over time: since when it is silent, which hosts drain, what has no room."""

from collections.abc import Callable
from dataclasses import dataclass, field

from service.domain.condition import capacity_reason, clock_time
from service.domain.decide import Submission
from service.domain.job import Job, JobState
from service.domain.reason import Code, Reason
from service.ports import Cluster, Node, Sighting
from train_loop.plan import Capacity, no_place, too_big

_SILENT_SECONDS = 10.0
"""How long the cluster may be silent before jobs say so."""
_HOUR = 3600.0


@dataclass
class ClusterView:
    """A cluster, with what was observed of it before."""

    cluster: Cluster
    clock: Callable[[], float]
    silent_since: float | None = None
    """Since when the cluster does not answer (Unix seconds); None if it does."""
    _asked: float = 0.0
    """Time of the last request (Unix seconds)."""
    _draining: dict[str, dict[str, float]] = field(default_factory=dict)
    """By job: hosts that will be taken away, and when the notice came."""

    def status(self, submission_id: str) -> Submission:
        """Return what became of a driver, and note whether the cluster answers."""
        asked = self.clock()
        found = self.cluster.status(submission_id)
        self._note_answer(asked, answered=found is not Submission.UNKNOWN)
        return found

    def look(self) -> None:
        """Check that the cluster answers, if it was not asked in the last ten seconds."""
        if abs(self.clock() - self._asked) >= _SILENT_SECONDS:
            self.capacity()

    def _note_answer(self, asked: float, *, answered: bool) -> None:
        self._asked = asked
        if answered:
            self.silent_since = None
        elif self.silent_since is None:
            # It was silent when it was asked, not only when the answer was given up.
            self.silent_since = asked

    def unreachable(self) -> Reason | None:
        """Return the reason of jobs whose cluster has been silent for ten seconds."""
        since = self.silent_since
        if since is None or self.clock() - since < _SILENT_SECONDS:
            return None
        url = self.cluster.dashboard(None)
        message = f"Ray{f' at {url}' if url else ''} does not answer since {clock_time(since)}"
        remedy = "workers that still run go on; check the head node and its network"
        return Reason(Code.CLUSTER_UNREACHABLE, message, remedy)

    def note(self, job_id: str, sighting: Sighting) -> None:
        """Note the hosts that a job expects to lose. Its next attempt does not report the notices of this one."""
        if sighting.draining:
            self._draining.setdefault(job_id, {}).update(sighting.draining)

    def forget(self, job_id: str) -> None:
        """Forget a job that has ended."""
        self._draining.pop(job_id, None)

    def capacity(self) -> Capacity | None:
        """Return what the nodes have that stay. A node that drains must get no new workers."""
        asked = self.clock()
        found = self.cluster.capacity()
        self._note_answer(asked, answered=found is not None)
        if found is None or not found.nodes or not self._draining:
            return found
        nodes = self.cluster.nodes()
        draining = [node for node in nodes or () if self._drains(node)]
        if nodes is None or not draining:
            return found
        staying = tuple(node.total for node in nodes if node.alive and not self._drains(node))
        less = {name: sum(node.total.get(name, 0.0) for node in draining) for name in found.total}
        return Capacity({name: max(amount - less[name], 0.0) for name, amount in found.total.items()}, staying)

    def no_room(self, job: Job, sighting: Sighting) -> Reason | None:
        """Return why a job without workers finds no room for them any more; None if it does, or if nobody knows."""
        if job.state not in (JobState.STARTING, JobState.RECOVERING) or sighting.ready:
            return None
        capacity = self.cluster.capacity()
        if capacity is None:
            return None
        group = job.spec.strategy.ulysses_size
        missing = too_big(job.size, capacity.total) or no_place(job.size, capacity.nodes, group=group)
        if missing is None:
            return None
        now, nodes = self.clock(), self.cluster.nodes() or ()
        dead = [node.host for node in nodes if node.ended_at and now - node.ended_at < _HOUR]
        alive = {node.host for node in nodes if node.alive}
        # The run names its own hosts. Ray may know a dead one by its address alone, so the two are never mixed.
        left = [host for host in sighting.left if host not in alive] or [host for host in dead if host not in alive]
        return capacity_reason(f"room: {missing.partition('; ')[0]}", list(dict.fromkeys(left)))

    def _drains(self, node: Node) -> bool:
        """Return whether a node was to be taken away. One that joined after the notice is another node."""
        notices = (hosts.get(node.host) for hosts in self._draining.values())
        return node.alive and any(notice is not None and node.started_at <= notice for notice in notices)
