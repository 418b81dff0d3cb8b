"""Diagnosis of a failed worker group: which ranks died, on which hosts and why. Pure functions."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from train_loop.faults.ray_reports import TERMINATED
from train_loop.plan import list_ranks


@dataclass(frozen=True)
class Evidence:
    """Observations of a failed worker group."""

    hosts: Mapping[int, str]
    """Host of each rank."""
    lost_hosts: Mapping[str, str] = field(default_factory=dict)
    """Lost hosts, with the reason."""
    ended: Mapping[int, str] = field(default_factory=dict)
    """Ranks whose processes ended, with the reason: "was killed by signal 9 (SIGKILL)"."""
    out_of_memory: Collection[int] = ()
    """Ended ranks that the kernel killed for lack of memory."""
    unreachable: Mapping[int, str] = field(default_factory=dict)
    """Ranks that Ray reports as dead, with their ends: "died: its node has died"."""
    errors: Mapping[int, str] = field(default_factory=dict)
    """Errors of ranks that are alive, one line each."""
    cut_off: str | None = None
    """Name of the controller's host if all of several other hosts are silent: its network has failed then."""

    @property
    def has_cause(self) -> bool:
        """Return whether the cause is known. Errors and lost connections alone do not identify it."""
        return bool(self.lost_hosts or self.ended or self.cut_off)

    @property
    def dead(self) -> set[int]:
        """Return the dead ranks; empty if ranks only raised errors."""
        on_lost_hosts = {rank for rank, host in self.hosts.items() if host in self.lost_hosts}
        return on_lost_hosts | self.ended.keys() | self.unreachable.keys()


@dataclass(frozen=True)
class Loss:
    """The cause of a worker group's failure."""

    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    kind: str
    """host_lost, out_of_memory, killed or error."""
    cause: str
    """Text such as "host node3 was lost (ranks 2 and 3)"."""
    survivors: str | None
    """Error that the other ranks reported, as text."""


def explain(evidence: Evidence) -> Loss:
    """Return the dead ranks and the cause, or the failed ranks if none died."""
    if evidence.cut_off is not None:
        others = ", ".join(sorted(set(evidence.hosts.values()) - {evidence.cut_off}))
        cause = f"host {evidence.cut_off} was disconnected from {others}"
        return Loss(tuple(sorted(evidence.hosts)), (evidence.cut_off,), "host_lost", cause, None)
    dead = evidence.dead or set(evidence.errors)
    ranks = tuple(sorted(dead))
    hosts = tuple(dict.fromkeys(evidence.hosts[rank] for rank in ranks if rank in evidence.hosts))
    if not evidence.dead:
        first = next(iter(sorted(evidence.errors)), None)
        cause = "unknown" if first is None else f"rank {first}: {evidence.errors[first]}"
        return Loss(ranks, hosts, "error", cause, None)
    kind = "host_lost" if evidence.lost_hosts else "out_of_memory" if evidence.out_of_memory else "killed"
    return Loss(ranks, hosts, kind, "; ".join(_causes(evidence)), _survivors(evidence, dead))


def _causes(evidence: Evidence) -> list[str]:
    found = list[str]()
    for host, how in evidence.lost_hosts.items():
        its_ranks = [rank for rank, place in evidence.hosts.items() if place == host]
        found.append(f"host {host} was lost ({list_ranks(its_ranks)}{', ' if how else ''}{how})")
    for rank in sorted(evidence.dead):
        host = evidence.hosts.get(rank, "an unknown host")
        if host in evidence.lost_hosts:
            continue
        by_ray = evidence.unreachable.get(rank)
        end = by_ray if by_ray == TERMINATED else evidence.ended.get(rank) or by_ray
        found.append(f"rank {rank} on {host} {end}")
    return found


def _survivors(evidence: Evidence, dead: Collection[int]) -> str | None:
    alive = {rank: error for rank, error in sorted(evidence.errors.items()) if rank not in dead}
    if not alive:
        return None
    return f"{list_ranks(alive.keys())} reported: {next(iter(alive.values()))}"
