"""admit(tickets, cluster, rules) -> Admission: who starts, who makes room, and what the others wait for. Pure.

Jobs start by priority, then by age, all of their workers at once. What a job that is due lacks is kept for it: one
behind it may pass only where that cannot make it wait longer, however long anybody runs.
"""

import math
from collections.abc import Iterable, Iterator, Sequence

from service.domain.board import Admission
from service.domain.job import JobState
from service.domain.reason import Code, Reason
from service.domain.rules import Quota, Rules, Use
from service.domain.seats import Seats
from service.domain.ticket import Resources, Ticket, add_up, queue_order
from train_loop.plan import Capacity, data_starves, no_place, too_big
from train_loop.spec import ScalingSpec

_NOISE = 1e-9
_SUMS = 4096
"""Loads that the running jobs may come to which are told apart; with more of them nobody passes."""


def never_fits(scaling: ScalingSpec, cluster: Capacity | None, *, group: int = 1) -> str | None:
    """Why the cluster as it is can never hold the job; None where it can, or where nobody knows."""
    if cluster is None:
        return None
    starves = data_starves(scaling, cluster.total)
    said = too_big(scaling, cluster.total) or (starves.message if starves else None)
    return said or no_place(scaling, cluster.nodes, group=group)


def admit(
    tickets: Iterable[Ticket],
    cluster: Capacity | None,
    rules: Rules,
    *,
    now: float = 0.0,
    unreachable: Reason | None = None,
) -> Admission:
    """Decide about every ticket at once; `cluster` is what there is, None where it is silent.

    `unreachable` is the reason of waiting jobs if the cluster has been silent for some time.
    """
    everybody = sorted(tickets, key=queue_order)
    waiting = [ticket for ticket in everybody if ticket.waits]
    if cluster is None:
        unknown = Reason(Code.CLUSTER_UNREACHABLE, "the cluster is not reachable yet; the job starts once it answers")
        return Admission(waits={ticket.id: unreachable or unknown for ticket in waiting})
    books = _Books(cluster, rules, [ticket for ticket in everybody if ticket.holds])
    for ticket in waiting:
        books.decide(ticket)
    resizes = dict(books.shrink()) or dict(books.grow(now))
    return Admission(tuple(books.starts), books.workers, books.preempts, resizes, books.waits)


class _Books:
    """Who holds what, while the queue is gone through from its front."""

    def __init__(self, cluster: Capacity, rules: Rules, holders: Sequence[Ticket]) -> None:
        self.starts: list[str] = []
        self.workers: dict[str, int] = {}
        self.preempts: dict[str, str] = {}
        self.waits: dict[str, Reason] = {}
        self._cluster, self._total = cluster, cluster.total
        self._rules = rules
        self._holders: list[Ticket] = []
        self._held: Resources = {}
        self._used: dict[str, Use] = {}
        self._blocked: list[Ticket] = []
        self._refused: list[tuple[Resources, Ticket]] = []
        self._over_quota: set[str] = set()
        self._place = 0
        self._seats: Seats | None = None
        for ticket in holders:
            self._hold(ticket)

    def decide(self, ticket: Ticket) -> None:
        """Start the next in the order, one that is elastic as large as there is room for, or say why it waits."""
        if ticket.sizes:
            most = self._most_workers(ticket)
            larger = (ticket.at(workers) for workers in reversed(ticket.sizes[1:]) if workers <= most)
            ticket = next(filter(self._may_start, larger), ticket.at(ticket.sizes[0]))
        reason = self._why_wait(ticket)
        if reason is not None:
            self.waits[ticket.id] = reason
            return
        self.starts.append(ticket.id)
        self._hold(ticket)
        if ticket.sizes:
            self.workers[ticket.id] = ticket.scaling.world

    def shrink(self) -> Iterator[tuple[str, int]]:
        """The elastic jobs whose workers have no room any more, and how many of them would have some."""
        for ticket in self._holders:
            if ticket.state not in (JobState.STARTING, JobState.RECOVERING) or ticket.id in self.starts:
                continue
            others = _less(self._held, [ticket.needs])
            if self._has_room(ticket, others):
                continue
            for workers in reversed(ticket.sizes):
                smaller = ticket.at(workers)
                if workers < ticket.scaling.world and self._has_room(smaller, others):
                    self._held = add_up([others, smaller.needs])
                    yield ticket.id, workers
                    break

    def grow(self, now: float) -> Iterator[tuple[str, int]]:
        """The elastic jobs that have room for more workers, which nobody waits for, and how many they would have."""
        if self._blocked or self.preempts:
            return
        for ticket in self._holders:
            if ticket.state is not JobState.RUNNING or now - ticket.since < self._rules.resize_seconds:
                continue
            others = _less(self._held, [ticket.needs])
            for workers in reversed(ticket.sizes):
                larger = ticket.at(workers)
                if workers <= ticket.scaling.world:
                    break
                more = self._used[ticket.project].with_workers(larger, instead_of=ticket)
                if self._over(ticket, more) is None and self._has_room(larger, others) and self._has_places(larger):
                    self._held, self._used[ticket.project] = add_up([others, larger.needs]), more
                    if self._seats is not None:
                        self._seats.take(larger)
                    yield ticket.id, workers
                    break

    def _may_start(self, ticket: Ticket) -> bool:
        """Whether it could start now; nothing is said or kept of it if not."""
        more = self._used.get(ticket.project, Use()).plus(ticket)
        return (
            ticket.project not in self._over_quota
            and self._over(ticket, more) is None
            and self._has_room(ticket, self._held)
            and self._has_places(ticket)
            and self._who_holds_back(ticket) is None
        )

    def _most_workers(self, ticket: Ticket) -> float:
        """More of them have no room, whatever else is asked of it: a look at one number instead of at every size."""
        each = ((name, amount) for name, amount in ticket.scaling.resources_per_worker.items() if amount)
        free = ((self._total.get(name, 0.0) - self._held.get(name, 0.0) + _NOISE, amount) for name, amount in each)
        return min((left / amount for left, amount in free), default=math.inf)

    def _has_room(self, ticket: Ticket, held: Resources) -> bool:
        """Whether the cluster has what it needs beside what is held, and a node for each of its workers."""
        return (
            _shortage(ticket.needs, self._total, held) is None
            and never_fits(ticket.scaling, self._cluster, group=ticket.group) is None
        )

    def _has_places(self, ticket: Ticket) -> bool:
        """Whether its workers find places between those of the others, as far as it can be told where those sit."""
        if self._seats is None:
            # Only those who may choose ask, and a thousand jobs are not seated in no time.
            self._seats = Seats(self._cluster, self._holders)
        return self._seats.fits(ticket)

    def _hold(self, ticket: Ticket) -> None:
        self._holders.append(ticket)
        self._held = add_up([self._held, ticket.needs])
        self._used[ticket.project] = self._used.get(ticket.project, Use()).plus(ticket)
        if self._seats is not None:
            self._seats.take(ticket)

    def _why_wait(self, ticket: Ticket) -> Reason | None:
        # Only what can never start blocks nobody.
        if never := never_fits(ticket.scaling, self._cluster, group=ticket.group):
            what, _, remedy = never.partition("; ")
            return Reason(Code.UNSCHEDULABLE, what, remedy)
        if never := self._over(ticket, Use().plus(ticket)):
            return Reason(Code.UNSCHEDULABLE, never, "raise the quota, or cancel and submit fewer or smaller workers")
        self._place += 1
        if ticket.project in self._over_quota:
            before = f"number {self._place} in the queue; another job of project {ticket.project} is before it"
            return Reason(Code.QUOTA, before, "it starts when another job of the project ends")
        if over := self._over(ticket, self._used.get(ticket.project, Use()).plus(ticket)):
            self._over_quota.add(ticket.project)
            return Reason(Code.QUOTA, over, "it starts when another job of the project ends")
        if shortage := _shortage(ticket.needs, self._total, self._held):
            return self._block(ticket, shortage)
        first = self._who_holds_back(ticket)
        if first is None:
            return None
        self._blocked.append(ticket)
        return Reason(Code.QUEUE, f"number {self._place} in the queue; {first.id} is before it and waits for more room")

    def _block(self, ticket: Ticket, shortage: str) -> Reason:
        if self._rules.preemption and not self._blocked:
            self.preempts = {victim.id: ticket.id for victim in self._victims(ticket)}
        self._blocked.append(ticket)
        if self.preempts and ticket.id in self.preempts.values():
            shortage += f"; {', '.join(self.preempts)} of lower priority will make room"
        place = "next in the queue" if self._place == 1 else f"number {self._place} in the queue"
        return Reason(Code.CAPACITY, f"{place}; waits for {shortage}")

    def _over(self, ticket: Ticket, after: Use) -> str | None:
        """Which quota of its project is broken by so much."""
        quotas = self._rules.quotas
        quota = quotas.get(ticket.project, quotas.get("*", Quota()))
        for name, most, then in (
            ("jobs", quota.jobs, after.jobs),
            ("workers", quota.workers, after.workers),
            ("GPUs", quota.gpus, after.gpus),
        ):
            if most is not None and then > most + _NOISE:
                return f"project {ticket.project} may have {most:g} {name} at once, and with this job it has {then:g}"
        return None

    def _who_holds_back(self, ticket: Ticket) -> Ticket | None:
        """The first of those that wait for room whom the job would make wait longer."""
        if not self._rules.backfill:
            return self._blocked[0] if self._blocked else None
        # Whoever is as large as one that was refused, or larger, makes the same one wait.
        for smaller, before in self._refused:
            if all(ticket.needs.get(name, 0.0) >= amount for name, amount in smaller.items()):
                return before
        found = (one for place, one in enumerate(self._blocked) if not self._may_pass(ticket, one, place))
        if (first := next(found, None)) is not None:
            self._refused.append((ticket.needs, first))
        return first

    def _may_pass(self, ticket: Ticket, blocked: Ticket, place: int) -> bool:
        """Whether the one that waits starts no later if this one starts now, whichever jobs end first.

        Later it would start if some of those that hold anything, left alone, held so much that it fits beside them, and
        does not beside this one too.
        """
        for name, amount in ticket.needs.items():
            most = self._total.get(name, 0.0) - blocked.needs.get(name, 0.0)
            loads = [one.needs.get(name, 0.0) for one in (*self._holders, *self._blocked[:place])]
            sums = _subset_sums(loads, most)
            if sums is None or any(load > most - amount + _NOISE for load in sums):
                return False
        return True

    def _victims(self, ticket: Ticket) -> list[Ticket]:
        """Of the running jobs of lower priority, the least and newest whose room is enough; none where it is not."""
        lower = [one for one in self._holders if one.priority < ticket.priority]
        # What is on its way out makes room without being asked.
        held = _less(self._held, [one.needs for one in lower if one.state in _LEAVING])
        chosen: list[Ticket] = []
        for one in sorted((one for one in lower if one.state in _RUNNING), key=lambda one: (one.priority, -one.since)):
            if _shortage(ticket.needs, self._total, held) is None:
                break
            held = _less(held, [one.needs])
            chosen.append(one)
        if _shortage(ticket.needs, self._total, held) is not None:
            return []
        return _needed_victims(chosen, ticket.needs, self._total, held)


_RUNNING = (JobState.STARTING, JobState.RUNNING, JobState.RECOVERING)
_LEAVING = (JobState.PAUSING, JobState.CANCELLING)


def _needed_victims(chosen: Sequence[Ticket], needs: Resources, total: Resources, held: Resources) -> list[Ticket]:
    """Those without whom it would not fit: a large one that came last may have made small ones needless."""
    kept: list[Ticket] = []
    for one in chosen:
        spared = add_up([held, one.needs])
        if _shortage(needs, total, spared) is None:
            held = spared
        else:
            kept.append(one)
    return kept


def _shortage(needs: Resources, total: Resources, held: Resources) -> str | None:
    short = [
        f"{amount:g} {name} ({held.get(name, 0):g} of the cluster's {total.get(name, 0):g} are taken)"
        for name, amount in needs.items()
        if amount > total.get(name, 0) - held.get(name, 0) + _NOISE
    ]
    return " and ".join(short) or None


def _subset_sums(loads: Sequence[float], most: float) -> set[float] | None:
    """What any of the loads may come to together, up to `most`; None where there are too many to tell."""
    sums = {0.0}
    for load in loads:
        if load:
            sums |= {round(one + load, 6) for one in sums if one + load <= most + _NOISE}
        if len(sums) > _SUMS:
            return None
    return sums


def _less(whole: Resources, parts: Iterable[Resources]) -> Resources:
    taken = add_up(parts)
    return {name: amount - taken.get(name, 0.0) for name, amount in whole.items()}
