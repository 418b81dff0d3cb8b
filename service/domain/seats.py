"""Which nodes the workers of running jobs sit on, as far as it can be told. Pure."""

from collections.abc import Iterable, Mapping

from service.domain.ticket import Resources, Ticket
from train_loop.plan import Capacity, lay_out


class Seats:
    """Each job laid out on what others have left, as its driver places it; unknown as soon as one finds no place."""

    def __init__(self, cluster: Capacity, holders: Iterable[Ticket]) -> None:
        self._free: list[dict[str, float]] = [dict(node) for node in cluster.nodes]
        self._known = bool(self._free)
        self._taken: dict[str, tuple[Resources, Mapping[int, range]]] = {}
        for ticket in holders:
            self.take(ticket)

    def take(self, ticket: Ticket) -> None:
        """Seat a job, instead of where it sits, if it does."""
        self._leave(ticket.id)
        ranks = lay_out(ticket.scaling, self._free, group=ticket.group) if self._known else None
        if ranks is None:
            self._known = False
            return
        self._taken[ticket.id] = ticket.scaling.resources_per_worker, ranks
        self._change(ticket.id, -1)

    def fits(self, ticket: Ticket) -> bool:
        """Whether a job finds places, its own among them; also where nobody can tell."""
        if not self._known:
            return True
        self._change(ticket.id, +1)
        ranks = lay_out(ticket.scaling, self._free, group=ticket.group)
        self._change(ticket.id, -1)
        return ranks is not None

    def _leave(self, job_id: str) -> None:
        self._change(job_id, +1)
        self._taken.pop(job_id, None)

    def _change(self, job_id: str, sign: int) -> None:
        each, ranks = self._taken.get(job_id, ({}, {}))
        for node, mine in ranks.items():
            for name, amount in each.items():
                self._free[node][name] = self._free[node].get(name, 0.0) + sign * amount * len(mine)
