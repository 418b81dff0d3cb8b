"""Nodes of the cluster with their state (alive, draining or dead), their jobs and their last failure."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from service.domain.access.roles import Principal, Role
from service.domain.jobs.condition import clock_time
from service.domain.jobs.head_node import how_to_free
from service.domain.jobs.job import Job, JobState
from service.errors import ClusterUnreachable
from service.ports import EMPTY_SUMMARY, JobQuery, Loss, Node, RunSummary
from service.use_cases.jobs.jobs import Jobs
from train_loop.run_dir import storage_failed

NodeState = Literal["alive", "draining", "dead"]
_HOLDING = (JobState.STARTING, JobState.RUNNING, JobState.RECOVERING, JobState.PAUSING, JobState.CANCELLING)
_MOST_JOBS = 10_000
_HOUR = 3600.0
_TOLD_WITHIN = 60.0
"""Seconds after the end of a node within which jobs report that they lost it."""


@dataclass(frozen=True)
class NodeView:
    """A node with the facts that jobs report about its host. Times are Unix seconds."""

    node: Node
    state: NodeState
    since: float
    jobs: tuple[str, ...]
    """Jobs with workers on the node that the caller may see."""
    last_failure: Loss | None


@dataclass(frozen=True)
class _Running:
    """A job that holds resources, with the summary of its run directory."""

    job: Job
    summary: RunSummary
    visible: bool


def list_nodes(caller: Principal, jobs: Jobs) -> list[NodeView]:
    """Return the live nodes, head first, then the nodes that died in the last hour. Raises ClusterUnreachable."""
    nodes, now = jobs.cluster.nodes(), jobs.clock()
    if nodes is None:
        url, since = jobs.cluster.dashboard(None), jobs.queue.silent_since
        lost = jobs.queue.lost_node(now)
        remedy = {} if lost is None else {"remedy": how_to_free(lost)}
        began = clock_time(now if since is None else since)
        raise ClusterUnreachable(f"Ray{f' at {url}' if url else ''}", began, **remedy)
    running = list(_running(caller, jobs))
    alive = sorted((node for node in nodes if node.alive), key=lambda node: (not node.is_head, node.host, node.id))
    dead = [node for node in nodes if not node.alive]
    recent = [node for node in dead if now - (node.ended_at or 0.0) <= _HOUR and not _replaced(node, alive)]
    shown = [*alive, *sorted(recent, key=lambda node: -(node.ended_at or 0.0))]
    return [_view(node, running, [one for one in dead if _same_host(one, node)]) for node in shown]


def _running(caller: Principal, jobs: Jobs) -> Iterator[_Running]:
    for job in jobs.store.page(JobQuery(states=_HOLDING, limit=_MOST_JOBS)):
        if job.attempts:
            yield _Running(job, _summary(jobs, job), caller.has_role(Role.VIEWER, job.spec.project))


def _summary(jobs: Jobs, job: Job) -> RunSummary:
    """Return the summary of a run directory; an empty one while its storage is unavailable."""
    try:
        return jobs.run_dirs.summary(job.run_dir)
    except Exception as error:
        if not storage_failed(error):
            raise
        return EMPTY_SUMMARY


def _view(node: Node, running: Sequence[_Running], died: Iterable[Node]) -> NodeView:
    visible = [one for one in running if one.visible]
    on_it = tuple(one.job.id for one in visible if node.alive and node.host in one.summary.hosts)
    losses = [one.summary.losses[node.host] for one in visible if node.host in one.summary.losses]
    losses += [Loss(one.ended_at or 0.0, one.message or "the node died") for one in died]
    if node.ended_at is not None:
        # A host may have died more than once in the hour: each row shows its own failure.
        losses = [loss for loss in losses if loss.time <= node.ended_at + _TOLD_WITHIN]
    last = max(losses, key=lambda loss: loss.time, default=None)
    notices = (one.summary.draining.get(node.host) for one in running)
    notice = max((time for time in notices if time is not None and node.started_at <= time), default=None)
    if not node.alive:
        return NodeView(node, "dead", node.ended_at or 0.0, (), last)
    if notice is not None:
        return NodeView(node, "draining", notice, on_it, last)
    return NodeView(node, "alive", node.started_at, on_it, last)


def _replaced(dead: Node, alive: Iterable[Node]) -> bool:
    """Return whether the host of a dead node has joined again."""
    return any(_same_host(one, dead) and one.started_at >= (dead.ended_at or 0.0) for one in alive)


def _same_host(one: Node, other: Node) -> bool:
    return one.host == other.host or (bool(one.address) and one.address == other.address)
