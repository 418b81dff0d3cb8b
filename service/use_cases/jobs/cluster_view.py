"""State that a reconciler keeps about the cluster: the start of an outage, draining hosts, missing capacity."""

from collections.abc import Callable
from dataclasses import dataclass, field

from service.domain.jobs.condition import capacity_reason, clock_time
from service.domain.jobs.head_node import HeadNode, how_to_free, lost_node
from service.domain.jobs.job import Job, JobState
from service.domain.jobs.observation import SubmissionStatus
from service.domain.jobs.reason import Code, Reason
from service.ports import AttemptObservation, Cluster, Node
from train_loop.plan import Capacity, missing_places, no_place, too_big

_SILENT_SECONDS = 10.0
"""Duration of an outage of the cluster before jobs report it."""
_HOUR = 3600.0


@dataclass
class ClusterView:
    """A cluster with earlier observations of it."""

    cluster: Cluster
    clock: Callable[[], float]
    silent_since: float | None = None
    """Start of the outage (Unix seconds); None if the cluster answers."""
    head: HeadNode | None = None
    """Kubernetes node of the newest head that has run a driver."""
    _requested_at: float = 0.0
    """Time of the last request (Unix seconds)."""
    _draining: dict[str, dict[str, float]] = field(default_factory=dict)
    """Draining hosts of each job, with the time of the notice (Unix seconds)."""
    _looked_at: set[str] = field(default_factory=set)
    """Jobs of other reconcilers that were looked at in this outage for the head's node."""

    def status(self, submission_id: str) -> SubmissionStatus:
        """Return the status of a driver, and record whether the cluster answers."""
        requested_at = self.clock()
        found = self.cluster.status(submission_id)
        self._note_answer(requested_at, answered=found is not SubmissionStatus.UNKNOWN)
        return found

    def end_of(self, submission_id: str, status: SubmissionStatus) -> str | None:
        """Return how a driver with this status ended; None if it is alive or if that is unknown."""
        if status.alive or status is SubmissionStatus.UNKNOWN:
            return None
        if status is SubmissionStatus.MISSING:
            return "Ray does not know it any more, as after a restart of the head"
        return self.cluster.end_of(submission_id)

    def probe(self) -> None:
        """Check that the cluster answers, unless a request was sent in the last ten seconds."""
        if abs(self.clock() - self._requested_at) >= _SILENT_SECONDS:
            self.capacity()

    def _note_answer(self, requested_at: float, *, answered: bool) -> None:
        self._requested_at = requested_at
        if answered:
            self.silent_since = None
            self._looked_at.clear()
        elif self.silent_since is None:
            # The outage begins when the request is sent, not when it times out.
            self.silent_since = requested_at

    def unreachable(self) -> Reason | None:
        """Return the reason for jobs if the cluster has not answered for ten seconds."""
        since = self.silent_since
        if since is None or self.clock() - since < _SILENT_SECONDS:
            return None
        url = self.cluster.dashboard(None)
        message = f"Ray{f' at {url}' if url else ''} has not answered since {clock_time(since)}"
        remedy = "running workers continue; check the head node and its network"
        if (lost := lost_node(self.head, silent_seconds=self.clock() - since)) is not None:
            remedy = how_to_free(lost)
        return Reason(Code.CLUSTER_UNREACHABLE, message, remedy)

    def seeks_head(self, job_id: str) -> bool:
        """Return whether the head's node is unknown in an outage, and this job was not looked at for it."""
        seeks = self.head is None and self.unreachable() is not None and job_id not in self._looked_at
        if seeks:
            self._looked_at.add(job_id)
        return seeks

    def note(self, job_id: str, observed: AttemptObservation) -> None:
        """Record the draining hosts of a job, whose next attempt does not report them again, and the head's node."""
        self.note_head(observed.head)
        if observed.draining:
            self._draining.setdefault(job_id, {}).update(observed.draining)

    def note_head(self, head: HeadNode | None) -> None:
        """Record the node of a head that has run a driver."""
        if head is not None:
            self.head = head if self.head is None else max(self.head, head)

    def forget(self, job_id: str) -> None:
        """Drop the state of a finished job."""
        self._draining.pop(job_id, None)

    def capacity(self) -> Capacity | None:
        """Return the capacity without draining nodes, which must get no new workers."""
        requested_at = self.clock()
        found = self.cluster.capacity()
        self._note_answer(requested_at, answered=found is not None)
        if found is None or not found.nodes or not self._draining:
            return found
        nodes = self.cluster.nodes()
        draining = [node for node in nodes or () if self._drains(node)]
        if nodes is None or not draining:
            return found
        staying = tuple(node.total for node in nodes if node.alive and not self._drains(node))
        less = {name: sum(node.total.get(name, 0.0) for node in draining) for name in found.total}
        return Capacity({name: max(amount - less[name], 0.0) for name, amount in found.total.items()}, staying)

    def no_room(self, job: Job, observed: AttemptObservation) -> Reason | None:
        """Return the reason if a job without workers no longer fits the cluster; None if it fits, or if unknown."""
        if job.state not in (JobState.STARTING, JobState.RECOVERING) or observed.ready:
            return None
        capacity = self.cluster.capacity()
        if capacity is None:
            return None
        if no_place(job.size, capacity.nodes, group=job.spec.strategy.peers) is not None:
            # The driver reports the same text a few seconds later, with the start of the wait.
            missing = missing_places(job.size, capacity.nodes)
        elif (short := too_big(job.size, capacity.total)) is not None:
            missing = f"capacity: {short.partition('; ')[0]}"
        else:
            return None
        now, nodes = self.clock(), self.cluster.nodes() or ()
        dead = [node.host for node in nodes if node.ended_at and now - node.ended_at < _HOUR]
        alive = {node.host for node in nodes if node.alive}
        # Ray may list a dead host by its address only, so names from the run and from Ray are never mixed.
        left = [host for host in observed.left if host not in alive] or [host for host in dead if host not in alive]
        return capacity_reason(missing, list(dict.fromkeys(left)))

    def _drains(self, node: Node) -> bool:
        """Return whether a node is draining. A node that joined after the notice is a new one."""
        notices = (hosts.get(node.host) for hosts in self._draining.values())
        return node.alive and any(notice is not None and node.started_at <= notice for notice in notices)
