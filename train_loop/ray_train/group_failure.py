"""Diagnosis of a failed worker group: which ranks died, on which hosts and why. Pure functions."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from train_loop.faults.collective import LOST_CONNECTION, TIMEOUT, contact_lost
from train_loop.faults.ray_reports import TERMINATED
from train_loop.liveness.group import Stall
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
    stall: Stall | None = None
    """Ranks that waited for others when the group failed."""
    without_storage: Collection[str] = ()
    """Hosts whose storage did not answer when the group failed."""
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
    """host_lost, out_of_memory, killed, hung, disconnected or error."""
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
    if evidence.dead and not _aborted(evidence):
        kind = "host_lost" if evidence.lost_hosts else "out_of_memory" if evidence.out_of_memory else "killed"
        return _loss(evidence, evidence.dead, kind, "; ".join(_causes(evidence)))
    contact = {rank: contact_lost(error) for rank, error in evidence.errors.items()}
    first = next((rank for rank in sorted(contact) if contact[rank] is None), None)
    if first is not None:
        # Its peers may only have lost the connection to it.
        return _loss(evidence, evidence.errors, "error", f"rank {first}: {evidence.errors[first]}")
    if evidence.stall is not None or TIMEOUT in contact.values():
        return _loss(evidence, _late(evidence), "hung", _hang(evidence))
    if contact:
        lost = f"{list_ranks(sorted(contact))} lost the connection to other ranks, although none is known to have ended"
        return _loss(evidence, contact, "disconnected", lost)
    return _loss(evidence, (), "error", "unknown")


def _loss(evidence: Evidence, ranks: Iterable[int], kind: str, cause: str) -> Loss:
    ordered = tuple(sorted(ranks))
    hosts = tuple(dict.fromkeys(evidence.hosts[rank] for rank in ordered if rank in evidence.hosts))
    told = kind in ("host_lost", "out_of_memory", "killed")
    return Loss(ordered, hosts, kind, cause, _survivors(evidence, set(ordered)) if told else None)


def _aborted(evidence: Evidence) -> bool:
    """Return whether the dead ranks only waited: NCCL ends a rank by SIGABRT at the timeout of an operation."""
    aborts = all("SIGABRT" in evidence.ended.get(rank, "") for rank in evidence.dead)
    return aborts and evidence.stall is not None and evidence.dead <= {*evidence.stall.waiting}


def _late(evidence: Evidence) -> Collection[int]:
    """Return the ranks that others waited for; the waiting ones if the late ones are not known."""
    return evidence.errors if evidence.stall is None else evidence.stall.behind


def _hang(evidence: Evidence) -> str:
    stall = evidence.stall
    if stall is not None and stall.waiting:
        waited = f"{list_ranks(stall.waiting)} waited for {list_ranks(stall.behind)} until the timeout"
        return f"training hung at step {stall.step}: {waited}; {stall.reason}"
    if stall is not None:
        return f"training hung at step {stall.step}: {stall.reason}"
    waited = f"training hung: {list_ranks(sorted(evidence.errors))} waited for other ranks until the timeout"
    if evidence.without_storage:
        return f"{waited}; storage did not answer on {', '.join(sorted(evidence.without_storage))}"
    silent = sorted(evidence.hosts.keys() - evidence.errors.keys())
    return f"{waited}; {list_ranks(silent)} reported nothing" if silent else f"{waited}; no rank was seen to be late"


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
    # Another error says more than the connections that the death has closed.
    told = next((error for error in alive.values() if contact_lost(error) is None), None)
    if told is None:
        told = LOST_CONNECTION if LOST_CONNECTION in map(contact_lost, alive.values()) else TIMEOUT
    return f"{list_ranks(alive.keys())} reported: {told}"
