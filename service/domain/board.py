"""What a look at the queue came to."""

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from service.domain.reason import Reason
from service.domain.ticket import Ticket
from train_loop.plan import Capacity


@dataclass(frozen=True)
class Admission:
    """What is to be done about the queue."""

    starts: tuple[str, ...] = ()
    """Jobs that start now."""
    workers: Mapping[str, int] = field(default_factory=dict)
    """How many workers the elastic ones of them get."""
    preempts: Mapping[str, str] = field(default_factory=dict)
    """Jobs that make room, and for whom."""
    resizes: Mapping[str, int] = field(default_factory=dict)
    """Running elastic jobs that are to have another number of workers."""
    waits: Mapping[str, Reason] = field(default_factory=dict)
    """Why the others wait, in their order."""

    @property
    def acts(self) -> bool:
        """Whether there is anything to be done."""
        return bool(self.starts or self.preempts or self.resizes)

    @cached_property
    def places(self) -> Mapping[str, int]:
        """The place of each that waits, from 1."""
        return {job_id: place for place, job_id in enumerate(self.waits, start=1)}


@dataclass
class Board:
    """What the last look at the queue came to, for whoever asks why a job waits, and what it was made from."""

    admission: Admission = field(default_factory=Admission)
    mark: Hashable = None
    tickets: Mapping[str, Ticket] = field(default_factory=dict)
    cluster: Capacity | None = None
    elastic: bool = False
    waits: bool = False
    silent_since: float | None = None
    """Since when the cluster does not answer (Unix seconds); None if it does."""

    unreachable: bool = False
    """Whether it has not answered for ten seconds."""

    def read(self, mark: Hashable, tickets: Iterable[Ticket]) -> None:
        """Take note of the tickets that there are at this mark."""
        self.mark, self.tickets = mark, {ticket.id: ticket for ticket in tickets}
        self.elastic = any(ticket.sizes and ticket.holds for ticket in self.tickets.values())
        self.waits = any(ticket.waits for ticket in self.tickets.values())
