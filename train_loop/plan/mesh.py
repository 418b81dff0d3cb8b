"""Plan of the device mesh: the ranks that shard, replicate, and share a sequence."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class MeshPlan:
    """The device mesh of a run, ddp outermost and sp innermost.

    `fsdp` counts the ranks that share one copy of the parameters. Ulysses groups lie inside it, or inside ddp if
    nothing is sharded. Ranks of one Ulysses group are neighbours and see the same samples.
    """

    ddp: int
    fsdp: int
    sp: int

    @property
    def world(self) -> int:
        """Return the number of ranks."""
        return self.ddp * self.fsdp

    @property
    def dp(self) -> int:
        """Return the number of data-parallel ranks, which are Ulysses groups with different samples."""
        return self.world // self.sp

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the mesh shape for FSDP2: (fsdp,) or, for HSDP, (ddp, fsdp)."""
        return (self.fsdp,) if self.ddp == 1 else (self.ddp, self.fsdp)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the axes of `shape`."""
        return ("fsdp",) if self.ddp == 1 else ("ddp", "fsdp")

    @property
    def axes(self) -> dict[str, int]:
        """Return the size of every axis, including the Ulysses groups inside fsdp."""
        return dict(zip(self.names, self.shape, strict=True)) | {"sp": self.sp}

    def data_rank(self, rank: int) -> int:
        """Return the data-parallel rank of a global rank."""
        return rank // self.sp

    def sequence_rank(self, rank: int) -> int:
        """Return the rank of a global rank within its Ulysses group."""
        return rank % self.sp


def groups_across_hosts(mesh: MeshPlan, hosts: Sequence[T]) -> dict[range, tuple[T, ...]]:
    """Return the Ulysses groups on several hosts, as ranges of ranks; `hosts` lists the host of each rank."""
    groups = (range(first, first + mesh.sp) for first in range(0, mesh.world, mesh.sp))
    found = {group: tuple(dict.fromkeys(hosts[rank] for rank in group)) for group in groups}
    return {group: names for group, names in found.items() if len(names) > 1}


def plan_mesh(*, world: int, fsdp_size: int, ulysses_size: int, sharded: bool = True) -> MeshPlan:
    """Plan the mesh by ROLL's rule: fsdp_size <= 1 or >= world is one fsdp dimension, anything else is HSDP.

    Without sharding every rank is a replica. Raises ValueError with rule, value and remedy if the degrees do not divide
    each other.
    """
    if not sharded:
        if world % ulysses_size:
            raise ValueError(
                f"ulysses_size={ulysses_size} does not divide the {world} workers; choose {one_of(divisors(world))}"
            )
        return MeshPlan(ddp=world, fsdp=1, sp=ulysses_size)
    fsdp = world if fsdp_size <= 1 or fsdp_size >= world else fsdp_size
    if world % fsdp:
        raise ValueError(
            f"fsdp_size={fsdp_size} does not divide the {world} workers; choose {one_of(divisors(world))}, "
            "or 0 to shard over all of them"
        )
    if fsdp % ulysses_size:
        raise ValueError(
            f"ulysses_size={ulysses_size} does not divide the {fsdp} ranks of an fsdp group; "
            f"choose {one_of(divisors(fsdp))}"
        )
    return MeshPlan(ddp=world // fsdp, fsdp=fsdp, sp=ulysses_size)


def check_reshard(reshard: bool | int | None, mesh: MeshPlan) -> None:
    """Raise ValueError if parameters would be resharded to groups that do not divide an fsdp group."""
    if isinstance(reshard, bool) or reshard is None:
        return
    fits = [d for d in divisors(mesh.fsdp) if 1 < d < mesh.fsdp]
    if reshard not in fits:
        choices = one_of([*map(str, fits), "true", "false"])
        raise ValueError(
            f"reshard_after_forward={reshard} is not a smaller group that divides the {mesh.fsdp} ranks of an fsdp "
            f"group; choose {choices}"
        )


def divisors(n: int) -> list[int]:
    """Return all divisors of n, ascending."""
    return [d for d in range(1, n + 1) if n % d == 0]


def one_of(values: Sequence[int | str]) -> str:
    """Return values as a phrase for a choice, such as `1, 2 or 4`."""
    return " or ".join(filter(None, [", ".join(map(str, values[:-1])), str(values[-1])]))
