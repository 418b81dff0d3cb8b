"""Evaluation of a worker group's heartbeats: silent hosts, ended ranks and stalls. It does no I/O."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from signal import Signals
from typing import NamedTuple

from train_loop.liveness.heartbeat import Beat, Phase

_LATE_SECONDS = 3.0
"""A rank whose last heartbeat is older than this is late."""
_DOING = {
    Phase.START: "is starting",
    Phase.DATA: "is reading data",
    Phase.AGREE: "waits for other ranks",
    Phase.TRAIN: "is computing",
    Phase.AFTER: "is recording or evaluating",
    Phase.SAVE: "is saving",
    Phase.END: "is finishing",
}


class Stall(NamedTuple):
    """A stall: ranks that wait for others without progress, or that are all stopped."""

    waiting: tuple[int, ...]
    behind: tuple[int, ...]
    step: int
    """Current step of the ranks behind."""
    seconds: float
    reason: str
    """Activity of the ranks behind, as a sentence."""
    phase: Phase
    """Phase of the rank that is furthest behind."""


@dataclass
class _Rank:
    host: str
    beat: Beat | None = None
    last_seen: float = 0.0
    moved: float = 0.0
    """Time of the last change of step or phase, by the listener's clock."""


@dataclass
class Liveness:
    """State of one worker group by its heartbeats; `now` is always the listener's monotonic clock in seconds."""

    epoch: int
    hosts: Mapping[int, str]
    """Name of the host of each rank."""
    _ranks: dict[int, _Rank] = field(init=False)

    def __post_init__(self) -> None:
        self._ranks = {rank: _Rank(host) for rank, host in self.hosts.items()}

    def record(self, beat: Beat, now: float) -> None:
        """Record a heartbeat. Ignore those of other groups, and those that are not newer than the last."""
        rank = self._ranks.get(beat.rank)
        if rank is None or beat.epoch != self.epoch:
            return
        # Another host of the network may repeat datagrams that it has seen.
        if rank.beat is not None and 0 < beat.sent <= rank.beat.sent:
            return
        if rank.beat is None or (rank.beat.step, rank.beat.phase) != (beat.step, beat.phase):
            rank.moved = now
        rank.beat, rank.last_seen = beat, now

    def skip(self, seconds: float, now: float) -> None:
        """Ignore a period in which the listener itself did not run."""
        for rank in self._ranks.values():
            rank.last_seen, rank.moved = min(rank.last_seen + seconds, now), min(rank.moved + seconds, now)

    def silence(self, now: float) -> dict[str, float]:
        """Return the seconds since each host's last heartbeat; only hosts whose ranks have all sent one before."""
        found = dict[str, list[float]]()
        for rank in self._ranks.values():
            if rank.beat is not None and rank.beat.ended:
                # Its last heartbeat reported its end.
                continue
            found.setdefault(rank.host, []).append(now - rank.last_seen if rank.beat is not None else -1.0)
        return {host: min(seconds) for host, seconds in found.items() if min(seconds) >= 0}

    def late_hosts(self, now: float, *, seconds: float) -> set[str]:
        """Return the hosts that have been silent for more than `seconds`."""
        return {host for host, silent in self.silence(now).items() if silent > seconds}

    def ended(self) -> dict[int, str]:
        """Return the ends of ranks' processes, by rank: "was killed by signal 9 (SIGKILL)"."""
        beats = {number: rank.beat for number, rank in self._ranks.items()}
        return {number: how_ended(beat) for number, beat in beats.items() if beat is not None and beat.ended}

    def out_of_memory(self) -> set[int]:
        """Return the ranks whose processes the kernel killed for lack of memory."""
        return {number for number, rank in self._ranks.items() if rank.beat is not None and rank.beat.out_of_memory}

    def stall(self, now: float, *, seconds: float) -> Stall | None:
        """Return the stall if no rank has progressed for `seconds`: some are behind the others, or all are stopped."""
        ranks = {number: rank for number, rank in self._ranks.items() if rank.beat is not None}
        if len(ranks) < len(self._ranks) or not ranks:
            return None
        still = now - max(rank.moved for rank in ranks.values())
        if still < seconds:
            return None
        places = {number: (rank.beat.step, rank.beat.phase) for number, rank in ranks.items() if rank.beat is not None}
        behind = self._not_running(now) or {number for number, place in places.items() if place == min(places.values())}
        waiting = ranks.keys() - behind
        if not waiting and not all(rank.beat is not None and rank.beat.stopped for rank in ranks.values()):
            # All compute: a step may take as long.
            return None
        step, phase = min(places[number] for number in behind)
        return Stall(tuple(sorted(waiting)), tuple(sorted(behind)), step, still, self._doing(behind, now), phase)

    def without_storage(self, seconds: float) -> dict[str, Beat]:
        """Return the hosts whose storage has failed for more than `seconds`, each with one of its heartbeats."""
        return {
            rank.host: rank.beat
            for rank in self._ranks.values()
            if rank.beat is not None and not rank.beat.ended and rank.beat.storage_seconds > seconds
        }

    def _not_running(self, now: float) -> set[int]:
        return {
            number
            for number, rank in self._ranks.items()
            if rank.beat is not None and (rank.beat.stopped or rank.beat.ended or now - rank.last_seen > _LATE_SECONDS)
        }

    def _doing(self, behind: Collection[int], now: float) -> str:
        number = min(behind)
        rank = self._ranks[number]
        assert rank.beat is not None
        if now - rank.last_seen > _LATE_SECONDS:
            return f"rank {number} on {rank.host} has sent no heartbeat for {now - rank.last_seen:.0f} s"
        if rank.beat.ended:
            return f"rank {number} on {rank.host} {how_ended(rank.beat)}"
        what = "is stopped (SIGSTOP)" if rank.beat.stopped else _DOING[rank.beat.phase]
        return f"rank {number} on {rank.host} {what}"


def how_ended(beat: Beat) -> str:
    """Return the end of a rank's process by its last heartbeat, as the predicate of a sentence."""
    status = beat.status
    if beat.out_of_memory:
        return "was killed by the kernel because its host or container ran out of memory (SIGKILL)"
    if status is None:
        return "ended without an error, as after SIGKILL"
    if status & 0x7F:
        number = status & 0x7F
        name = Signals(number).name if number in set(Signals) else "unknown"
        return f"was killed by signal {number} ({name})"
    return f"exited with code {status >> 8}"
