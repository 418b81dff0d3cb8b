"""Record of a monitored worker group: what was observed and reported of it so far."""

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from train_loop.liveness.group import Liveness, Stall
from train_loop.ray_train.group_failure import Evidence

_LATE_SECONDS = 2.5
"""Seconds of silence after which a host counts as the cause of a failure."""


@dataclass(frozen=True)
class GroupFailure:
    """A failure of the group that Ray has reported."""

    at: float
    """Time of the report, by the monitor's clock."""
    errors: Mapping[int, str]
    """Errors of ranks that are alive."""
    unreachable: Mapping[int, str]
    """Ranks that Ray reports as dead, with their ends."""
    extra: Mapping[str, Any]
    """More fields for the event."""
    stall: Stall | None = None
    """Ranks that waited for others at that time."""


@dataclass
class GroupRecord:
    """Observations of a worker group, and the reports that were made of them."""

    liveness: Liveness
    silent: set[str] = field(default_factory=set)
    lost: dict[str, str] = field(default_factory=dict)
    stall: Stall | None = None
    """Last reported stall, while it lasts."""
    without_storage: set[str] = field(default_factory=set)
    out_of_memory: set[int] = field(default_factory=set)
    """Ranks that the kernel killed for lack of memory."""
    closing: bool = False
    probe: threading.Thread | None = None
    failure: GroupFailure | None = None
    reported: bool = False
    """True after the failure was reported."""
    _ended_before_closing: dict[int, str] = field(default_factory=dict)

    def close(self) -> None:
        """Record that the group's processes are being terminated: they end from now on."""
        self._ended_before_closing = self.ended()
        self.closing = True

    def ended(self) -> dict[int, str]:
        """Return the ranks that have died by themselves, with the reason."""
        ended = self.liveness.ended()
        if not self.closing:
            return ended
        # A rank that Ray reports as dead died before its group was closed, even if its last heartbeat came later.
        dead = self.failure.unreachable if self.failure is not None else {}
        return self._ended_before_closing | {rank: how for rank, how in ended.items() if rank in dead}

    def evidence(self, failure: GroupFailure, now: float, *, own_host: str) -> Evidence:
        """Return the observations that explain a failure."""
        late = set() if self.closing else self.liveness.late_hosts(now, seconds=_LATE_SECONDS)
        others = set(self.liveness.hosts.values()) - {own_host}
        return Evidence(
            self.liveness.hosts,
            lost_hosts=dict.fromkeys(late - {own_host}, "") | self.lost,
            ended=self.ended(),
            out_of_memory=self.out_of_memory,
            unreachable=failure.unreachable,
            errors=failure.errors,
            stall=failure.stall,
            without_storage=self.without_storage,
            cut_off=own_host if len(others) > 1 and others <= late else None,
        )
