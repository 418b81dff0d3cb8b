"""Layout of workers on nodes: the ranks of each node, and the check that the nodes hold all workers."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from train_loop.plan.arrange import Arrangement, arrange, count_splits
from train_loop.plan.mesh import divisors
from train_loop.plan.resources import DATA_CPUS, describe_worker
from train_loop.spec import ScalingSpec, StrategySpec

Resources = Mapping[str, float]
_NOISE = 1e-9
_ALL_TO_ALL, _EACH_LAYER = "all-to-all is", "exchanges in each layer are"
AUTOSCALED_VARIABLE = "TRAINSHED_AUTOSCALED"
"""Environment variable of drivers if nodes may join on demand (the operator set TRAINSHED_CLUSTER_LIMIT)."""


@dataclass(frozen=True)
class Capacity:
    """The resources of a cluster."""

    total: Resources
    nodes: tuple[Resources, ...] = ()
    """Resources of each node; empty if nodes of unknown size may join."""


def lay_out(
    scaling: ScalingSpec, nodes: Sequence[Resources], *, group: int = 1, whole: int = 1
) -> dict[int, range] | None:
    """Return the ranks of each node that runs some, by its index in `nodes`; None if the nodes cannot hold the workers.

    `group` is the number of peers: as few groups as possible cross nodes. Groups of `whole`, a multiple, cross none if
    possible. Some node keeps the CPU that Ray Data needs, if any layout allows that. This function also places
    the worker groups of a job, so the placement matches the plan.
    """
    found = _arranged(scaling, nodes, group, whole)
    if found is None:
        return None
    ranks, first = dict[int, range](), 0
    for node, count in found:
        ranks[node] = range(first, first + count)
        first += count
    return ranks


def splits(ranks: Mapping[int, range], group: int) -> int:
    """Return the number of groups of peers of a layout that cross nodes."""
    return count_splits([(node, len(mine)) for node, mine in ranks.items()], group)


def why_split(
    scaling: ScalingSpec,
    nodes: Sequence[Resources],
    *,
    group: int,
    name: str = "ulysses_size",
    peers: int = 0,
    allows: Callable[[str, int], bool] = lambda setting, size: True,
    whole: int = 1,
) -> str | None:
    """Return the reason why groups of workers cross nodes, and remedies, as a sentence; None if none does.

    `name` is that of the setting with their size. The layout keeps `peers` together, and groups of `whole` if it can;
    peers=0: the groups are those of peers. `allows` returns whether the job can have another size of this setting, or
    of num_workers.
    """
    ranks = lay_out(scaling, nodes, group=peers or group, whole=whole) if nodes else None
    if ranks is None or not (crossing := splits(ranks, group)):
        return None
    places = [count for count in (count_places(scaling, node) for node in nodes) if count]
    held = sum(count // group for count in places)
    kinds = {
        "ulysses_size": ("Ulysses groups", _ALL_TO_ALL),
        "tp_size": ("tensor parallel groups", _EACH_LAYER),
        "ep_size": ("expert parallel groups", _ALL_TO_ALL),
    }
    kind, exchange = kinds.get(name, (f"groups of {name} workers", _EACH_LAYER))
    head = f"{crossing} of {scaling.world // group} {kind} cross nodes, where their {exchange} slow: "
    if scaling.placement_strategy == "STRICT_SPREAD":
        return f"{head}placement_strategy=STRICT_SPREAD puts one worker on a node; choose SPREAD or PACK"

    def keeps_whole(workers: int, size: int) -> bool:
        found = lay_out(scaling.at(workers), nodes, group=peers or size, whole=whole)
        return found is not None and not splits(found, size)

    smaller = (
        f"{name}={size}" for size in divisors(group)[-2::-1] if allows(name, size) and keeps_whole(scaling.world, size)
    )
    fewer = (
        f"{workers} workers"
        for workers in range(min(held * group, scaling.world - 1) // group * group, 0, -group)
        if allows("num_workers", workers) and keeps_whole(workers, group)
    )
    choices = [*islice(smaller, 1), *islice(fewer, 1)]
    if peers and held * group >= scaling.world:
        choices.append(f"resources_per_worker with which each node holds a multiple of {group} workers")
        return (
            f"{head}workers are placed as {' + '.join(str(len(own)) for own in ranks.values())}, because only those "
            f"with the same samples are kept together; choose {' or '.join(choices)}"
        )
    choose = f"choose {' or '.join(choices)}, or " if choices else ""
    return (
        f"{head}nodes with places for {_places(scaling, nodes)} workers hold {held} whole groups of {name}={group}; "
        f"{choose}add a node with places for {group} workers"
    )


def shards_per_node(strategy: StrategySpec, scaling: ScalingSpec, nodes: Sequence[Resources]) -> int:
    """Return the fsdp_size that `node` stands for: that of the largest equal shard groups of which none crosses nodes.

    Raises ValueError if nodes are not known, lack places, or hold no group of several workers.
    """
    if not nodes:
        raise ValueError(
            "fsdp_size=node needs the nodes of the cluster, which are not known; write the number of workers of a node"
        )
    if lay_out(scaling, nodes) is None:
        raise ValueError(
            f"fsdp_size=node needs nodes with {missing_places(scaling, nodes)}; add nodes, or write the number of "
            "workers of a node"
        )
    unit, world = strategy.peers, scaling.world
    found = max(_groups_within_nodes(scaling, nodes, unit), default=0) // strategy.tp_size
    if found <= 1 < world:
        raise ValueError(
            f"fsdp_size=node finds no equal groups of several workers: nodes with places for {_places(scaling, nodes)} "
            f"workers hold none of those into which {world} workers divide, in multiples of {unit}; choose another "
            "number of workers, sharding_strategy: NO_SHARD, or 0 to shard over all of them"
        )
    return found


def _groups_within_nodes(scaling: ScalingSpec, nodes: Sequence[Resources], unit: int) -> list[int]:
    """Return the sizes of equal groups, multiples of `unit`, of which the nodes hold all workers without a split."""
    most = 1 if scaling.placement_strategy == "STRICT_SPREAD" else scaling.world
    places = [min(count_places(scaling, node), most) for node in nodes]
    sizes = [size for size in divisors(scaling.world) if size % unit == 0]
    return [size for size in sizes if sum(count // size for count in places) * size >= scaling.world]


def why_gathers_cross(strategy: StrategySpec, scaling: ScalingSpec, nodes: Sequence[Resources]) -> str | None:
    """Return a sentence if groups that gather each layer cross nodes, with a remedy if there is one; None otherwise."""
    ranks = lay_out(scaling, nodes, group=strategy.peers, whole=strategy.whole_group) if nodes else None
    size = strategy.gathering(scaling.world)
    if ranks is None or not (crossing := splits(ranks, size)):
        return None
    placed = " + ".join(str(len(mine)) for mine in ranks.values())
    head = (
        f"{crossing} of {scaling.world // size} FSDP groups of {size} workers cross nodes, where gathers of each layer "
        f"are slow: workers are placed as {placed}; "
    )
    inside = max(_groups_within_nodes(scaling, nodes, strategy.peers), default=0) // strategy.tp_size
    if inside > 1:
        return f"{head}fsdp_size: node (here {inside}) shards inside nodes, if a worker has memory for larger shards"
    return f"{head}only more workers on each node avoid it"


def _places(scaling: ScalingSpec, nodes: Sequence[Resources]) -> str:
    """Return the number of workers that each node has room for, as a phrase."""
    counts = Counter(count for count in (count_places(scaling, node) for node in nodes) if count)
    return " + ".join(f"{count}" + (f" (x {times} nodes)" if times > 1 else "") for count, times in counts.items())


def missing_places(scaling: ScalingSpec, nodes: Sequence[Resources]) -> str:
    """Return the room that nodes without space for a worker group lack, as a phrase for a message."""
    each = describe_worker(scaling)
    places = sorted((count_places(scaling, node) for node in nodes), reverse=True)
    if scaling.placement_strategy == "STRICT_PACK":
        most = max(places, default=0)
        return f"{scaling.world} workers with {each} each on one node; the largest room is for {most}"
    if scaling.placement_strategy == "STRICT_SPREAD":
        return f"a node each for {scaling.world} workers with {each}; {sum(map(bool, places))} nodes have room for one"
    return f"{scaling.world} workers with {each} each; the nodes have room for {sum(places)}"


def no_place(scaling: ScalingSpec, nodes: Sequence[Resources], *, group: int = 1) -> str | None:
    """Return the reason why the nodes can never run the job, as a sentence; None if they can or are not known."""
    if not nodes:
        return None
    if _arranged(scaling, nodes, group) is not None:
        return None
    each = describe_worker(scaling)
    most, strategy = max(count_places(scaling, node) for node in nodes), scaling.placement_strategy
    if not most:
        return f"a worker needs {each}, which no single node of the cluster has; add larger nodes, or ask for less"
    if strategy == "STRICT_PACK":
        return (
            f"placement_strategy=STRICT_PACK asks for {scaling.world} workers on one node, and no node has room for "
            f"more than {most}; choose PACK, or fewer workers"
        )
    if strategy == "STRICT_SPREAD":
        apart = sum(count_places(scaling, node) > 0 for node in nodes)
        return (
            f"placement_strategy=STRICT_SPREAD asks for a node for each of {scaling.world} workers, and {apart} nodes "
            "have room for one; choose SPREAD, or fewer workers"
        )
    count = sum(count_places(scaling, node) for node in nodes)
    return (
        f"{scaling.world} workers need {each} each, and the nodes of the cluster have places for {count} such workers; "
        "add nodes, or ask for fewer or smaller workers"
    )


def _arranged(scaling: ScalingSpec, nodes: Sequence[Resources], group: int, whole: int = 1) -> Arrangement | None:
    places = [count_places(scaling, node) for node in nodes]
    found = arrange(places, scaling.world, strategy=scaling.placement_strategy, group=group, whole=whole)
    if found is None or _keeps_data_cpu(scaling, nodes, found):
        return found
    others: dict[tuple[int, int], Arrangement] = {}
    for index, node in enumerate(nodes):
        kept = {**node, "CPU": node.get("CPU", 0.0) - DATA_CPUS}
        change = places[index], count_places(scaling, kept)
        # Nodes of the same size give layouts of the same shape.
        if kept["CPU"] < -_NOISE or change in others:
            continue
        fewer = [*places[:index], change[1], *places[index + 1 :]]
        other = arrange(fewer, scaling.world, strategy=scaling.placement_strategy, group=group, whole=whole)
        if other is not None:
            others[change] = other
    return min(others.values(), key=lambda other: (count_splits(other, group), len(other)), default=found)


def _keeps_data_cpu(scaling: ScalingSpec, nodes: Sequence[Resources], found: Arrangement) -> bool:
    """Return whether a node keeps a whole CPU: a Ray Data task cannot use parts of several nodes."""
    each, counts = scaling.resources_per_worker.get("CPU", 0.0), dict(found)
    free = (node.get("CPU", 0.0) - each * counts.get(index, 0) for index, node in enumerate(nodes))
    return any(cpus >= DATA_CPUS - _NOISE for cpus in free)


def why_no_data_cpu(scaling: ScalingSpec, nodes: Sequence[Resources], *, group: int = 1) -> str | None:
    """Return a sentence if no node keeps a whole CPU for Ray Data; None if a node does."""
    found = _arranged(scaling, nodes, group) if nodes else None
    if found is None or _keeps_data_cpu(scaling, nodes, found):
        return None
    each = scaling.resources_per_worker.get("CPU", 0.0)
    return (
        f"{scaling.world} workers with {each:g} CPU each leave no node with the {DATA_CPUS:g} CPU that a task of Ray "
        "Data needs, so that ranks read their rows themselves; add a node, or ask for less CPU per worker"
    )


def count_places(scaling: ScalingSpec, node: Resources) -> int:
    """Return the number of workers that a node has room for."""
    wanted = [(name, amount) for name, amount in scaling.resources_per_worker.items() if amount]
    return min((max(int(node.get(name, 0.0) / amount + _NOISE), 0) for name, amount in wanted), default=scaling.world)


def list_ranks(ranks: Collection[int]) -> str:
    """Return ranks as a phrase: "rank 2", "ranks 0 and 1", "ranks 0-3"; "ranks" if there are none."""
    ordered = sorted(ranks)
    if not ordered:
        return "ranks"
    if len(ordered) == 1:
        return f"rank {ordered[0]}"
    if ordered == list(range(ordered[0], ordered[-1] + 1)) and len(ordered) > 2:
        return f"ranks {ordered[0]}-{ordered[-1]}"
    return f"ranks {', '.join(map(str, ordered[:-1]))} and {ordered[-1]}"
