"""What is known of a broken worker group → which ranks died, on which hosts, and why, as sentences. Pure."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from train_loop.plan import list_ranks


@dataclass(frozen=True)
class Evidence:
    """What is known of a broken worker group."""

    hosts: Mapping[int, str]
    """Host of each rank."""
    lost_hosts: Mapping[str, str] = field(default_factory=dict)
    """Hosts that are gone, and how that was noticed."""
    ended: Mapping[int, str] = field(default_factory=dict)
    """Ranks whose processes ended, and how: "was killed by signal 9 (SIGKILL)"."""
    out_of_memory: Collection[int] = ()
    """Those of them that the kernel killed for lack of memory."""
    unreachable: Mapping[int, str] = field(default_factory=dict)
    """Ranks that Ray reports as dead, with its message."""
    errors: Mapping[int, str] = field(default_factory=dict)
    """What ranks that are alive have raised, one line each."""
    cut_off: str | None = None
    """The controller's host, if all of several other hosts are silent: then it is the one without a network."""

    @property
    def has_cause(self) -> bool:
        """Whether the cause is known; errors and lost connections to ranks can have any."""
        return bool(self.lost_hosts or self.ended or self.cut_off)

    @property
    def dead(self) -> set[int]:
        """The ranks that died; empty if all of them only raised errors."""
        on_lost_hosts = {rank for rank, host in self.hosts.items() if host in self.lost_hosts}
        return on_lost_hosts | self.ended.keys() | self.unreachable.keys()


@dataclass(frozen=True)
class Loss:
    """Why a worker group broke."""

    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    kind: str
    """host_lost, out_of_memory, killed or error."""
    cause: str
    """Sentences: "host node3 was lost (ranks 2 and 3)"."""
    survivors: str | None
    """What the other ranks reported, as one sentence."""


def explain(evidence: Evidence) -> Loss:
    """Return which ranks died and why; of a group in which nobody died, the ranks that failed."""
    if evidence.cut_off is not None:
        others = ", ".join(sorted(set(evidence.hosts.values()) - {evidence.cut_off}))
        cause = f"host {evidence.cut_off} was cut off from {others}"
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
        how = evidence.ended.get(rank) or f"died: {evidence.unreachable[rank]}"
        found.append(f"rank {rank} on {host} {how}")
    return found


def _survivors(evidence: Evidence, dead: Collection[int]) -> str | None:
    alive = {rank: error for rank, error in sorted(evidence.errors.items()) if rank not in dead}
    if not alive:
        return None
    return f"{list_ranks(alive.keys())} reported: {next(iter(alive.values()))}"
