"""Plan of the device mesh: the ranks that shard, replicate, and share a sequence."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

T = TypeVar("T")
Role = Literal["replicate", "shard", "data", "sequence", "tensor", "expert"]
"""Task of the ranks of an axis: hold copies or shards of parameters; read other samples, or parts of the same ones.

Those of a tensor axis compute parts of each layer for the same tokens. Those of an expert axis have other experts of
each layer, and compute them for the tokens of all.
"""


@dataclass(frozen=True)
class Axis:
    """An axis of a grid that arranges all ranks."""

    name: str
    role: Role
    size: int
    stride: int = 1
    """Distance between neighbours of a group: the product of the sizes of the axes inside this one."""

    def place(self, rank: int) -> int:
        """Return the place of a global rank along the axis."""
        return rank // self.stride % self.size

    def groups(self, world: int) -> list[range]:
        """Return the groups of ranks that differ only in their place along the axis."""
        span = self.size * self.stride
        return [range(first, first + span, self.stride) for first in range(world) if self.place(first) == 0]


@dataclass(frozen=True)
class MeshPlan:
    """The device mesh of a run: grids of the same ranks for parameters, for those of experts, and for samples.

    `fsdp` counts the ranks that share one copy of the parameters, `ddp` the copies. Ulysses groups of `sp` ranks lie
    inside fsdp, or inside ddp if nothing is sharded. Each place of these axes has `tp` ranks with parts of its layers
    (tensor parallelism). Both are innermost: their ranks are neighbours and see the same samples. Groups of `ep`
    neighbours hold all experts of a layer, and `efsdp` ranks share the same experts (expert parallelism).
    """

    ddp: int
    fsdp: int
    sp: int
    tp: int = 1
    ep: int = 1

    @property
    def parameters(self) -> tuple[Axis, ...]:
        """Return the axes over which parameters are replicated, sharded and split, the outermost first."""
        shards = (Axis("fsdp", "shard", self.fsdp, stride=self.tp), *self._parts)
        if self.ddp == 1:
            return shards
        return Axis("ddp", "replicate", self.ddp, stride=self.fsdp * self.tp), *shards

    @property
    def efsdp(self) -> int:
        """Return the number of ranks that share one copy of an expert's parameters."""
        return self.fsdp * self.tp // self.ep

    @property
    def experts(self) -> tuple[Axis, ...]:
        """Return the axes over which the parameters of experts are replicated, sharded and split, as `parameters`."""
        shards = Axis("efsdp", "shard", self.efsdp, stride=self.ep), Axis("ep", "expert", self.ep)
        if self.ddp == 1:
            return shards
        return Axis("ddp", "replicate", self.ddp, stride=self.fsdp * self.tp), *shards

    @property
    def samples(self) -> tuple[Axis, ...]:
        """Return the axes over which samples and their tokens are split, the outermost first."""
        sequence = Axis("sp", "sequence", self.sp, stride=self.tp)
        return Axis("dp", "data", self.dp, stride=self.peers), sequence, *self._parts

    @property
    def _parts(self) -> tuple[Axis, ...]:
        return () if self.tp == 1 else (Axis("tp", "tensor", self.tp),)

    @property
    def peers(self) -> int:
        """Return the number of ranks with the same samples, which are neighbours."""
        return self.sp * self.tp

    @property
    def world(self) -> int:
        """Return the number of ranks."""
        return self.ddp * self.fsdp * self.tp

    @property
    def dp(self) -> int:
        """Return the number of data-parallel ranks, which are groups of ranks with different samples."""
        return self.world // self.peers

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the mesh of parameters: (fsdp,) or, for HSDP, (ddp, fsdp), and tp if layers are split."""
        return tuple(axis.size for axis in self.parameters)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the axes of `shape`."""
        return tuple(axis.name for axis in self.parameters)

    @property
    def axes(self) -> dict[str, int]:
        """Return the size of every axis, including the Ulysses groups inside fsdp; dp follows from them."""
        experts = () if self.ep == 1 else self.experts
        return {axis.name: axis.size for axis in (*self.parameters, *self.samples, *experts) if axis.role != "data"}

    def leads(self, rank: int) -> bool:
        """Return whether a rank is the first of those with its samples, which reads and counts them."""
        return rank % self.peers == 0

    def data_rank(self, rank: int) -> int:
        """Return the data-parallel rank of a global rank."""
        return self.samples[0].place(rank)

    def sequence_rank(self, rank: int) -> int:
        """Return the rank of a global rank within its Ulysses group."""
        return self.samples[1].place(rank)

    def tensor_rank(self, rank: int) -> int:
        """Return the number of the part of each layer that a global rank has."""
        return rank % self.tp


def groups_across_hosts(mesh: MeshPlan, hosts: Sequence[T], role: Role = "sequence") -> dict[range, tuple[T, ...]]:
    """Return the groups of a role on several hosts, as ranges of ranks; `hosts` lists the host of each rank."""
    axes = (*mesh.samples, *mesh.parameters, *(mesh.experts if mesh.ep > 1 else ()))
    groups = [group for axis in axes if axis.role == role for group in axis.groups(mesh.world)]
    found = {group: tuple(dict.fromkeys(hosts[rank] for rank in group)) for group in groups}
    return {group: names for group, names in found.items() if len(names) > 1}


def plan_mesh(
    *, world: int, fsdp_size: int, ulysses_size: int, tp_size: int = 1, ep_size: int = 1, sharded: bool = True
) -> MeshPlan:
    """Plan the mesh by ROLL's rule: fsdp_size <= 1 or >= all ranks is one fsdp dimension, anything else is HSDP.

    Ranks that split layers count as one. Without sharding every one is a replica. Raises ValueError with rule, value
    and remedy if the degrees do not divide each other.
    """
    if world % tp_size:
        raise ValueError(f"tp_size={tp_size} does not divide the {world} workers; choose {one_of(divisors(world))}")
    whole = world // tp_size
    workers = f"{whole} workers" if tp_size == 1 else f"{whole} groups of tp_size={tp_size} workers"
    if not sharded:
        if whole % ulysses_size:
            raise ValueError(
                f"ulysses_size={ulysses_size} does not divide the {workers}; choose {one_of(divisors(whole))}"
            )
        return _with_experts(MeshPlan(ddp=whole, fsdp=1, sp=ulysses_size, tp=tp_size), ep_size)
    fsdp = whole if fsdp_size <= 1 or fsdp_size >= whole else fsdp_size
    if whole % fsdp:
        raise ValueError(
            f"fsdp_size={fsdp_size} does not divide the {workers}; choose {one_of(divisors(whole))}, "
            "or 0 to shard over all of them"
        )
    if fsdp % ulysses_size:
        raise ValueError(
            f"ulysses_size={ulysses_size} does not divide the {fsdp} ranks of an fsdp group; "
            f"choose {one_of(divisors(fsdp))}"
        )
    return _with_experts(MeshPlan(ddp=whole // fsdp, fsdp=fsdp, sp=ulysses_size, tp=tp_size), ep_size)


def _with_experts(mesh: MeshPlan, size: int) -> MeshPlan:
    """Return a mesh whose ranks share experts in groups of `size`, which lie inside fsdp x tp. Raises ValueError."""
    ranks = mesh.fsdp * mesh.tp
    fits = [ep for ep in divisors(ranks) if ep % mesh.tp == 0]
    if size not in (1, *fits):
        multiple = "" if mesh.tp == 1 else f", and be a multiple of tp_size={mesh.tp}"
        raise ValueError(
            f"ep_size={size} must divide the workers of a copy of the model, fsdp x tp = {ranks}{multiple}; choose "
            f"{one_of(fits)}, or another number of workers"
        )
    return replace(mesh, ep=size)


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


def check_efsdp(size: int, mesh: MeshPlan) -> None:
    """Raise ValueError if the number of ranks that share each expert is given, and not the one that follows."""
    if size not in (0, mesh.efsdp):
        raise ValueError(
            f"efsdp_size={size} contradicts ep_size={mesh.ep}: the {mesh.fsdp * mesh.tp} workers that hold a copy of "
            f"the model are efsdp x ep, so efsdp is {mesh.efsdp}; remove efsdp_size, or change ep_size"
        )


def divisors(n: int) -> list[int]:
    """Return all divisors of n, ascending."""
    return [d for d in range(1, n + 1) if n % d == 0]


def one_of(values: Sequence[int | str]) -> str:
    """Return values as a phrase for a choice, such as `1, 2 or 4`."""
    return " or ".join(filter(None, [", ".join(map(str, values[:-1])), str(values[-1])]))
