"""Workers → nodes: which ranks would share one, and whether every worker finds a place."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from train_loop.spec import ScalingSpec

Resources = Mapping[str, float]


@dataclass(frozen=True)
class Capacity:
    """What a cluster has."""

    total: Resources
    nodes: tuple[Resources, ...] = ()
    """What each node has; empty where others may come, of which nobody knows what they have."""


def lay_out(scaling: ScalingSpec, nodes: Sequence[Resources]) -> dict[int, range] | None:
    """The ranks of each node, by its place in `nodes`, that would have some; None where some rank finds no place.

    Ray numbers ranks node by node. PACK takes as few nodes as it can, SPREAD as many.
    """
    places, world, strategy = [_places(scaling, node) for node in nodes], scaling.world, scaling.placement_strategy
    if strategy in ("PACK", "STRICT_PACK"):
        whole = [(count, node) for node, count in enumerate(places) if count >= world]
        counts = [min(whole)] if whole else _largest_first(places)
        counts = counts[:1] if strategy == "STRICT_PACK" else counts
    else:
        most = 1 if strategy == "STRICT_SPREAD" else max(places, default=0)
        even = next((n for n in range(1, most + 1) if sum(min(count, n) for count in places) >= world), most)
        counts = _largest_first(min(count, even) for count in places)
    ranks, first = dict[int, range](), 0
    for count, node in counts:
        last = min(first + count, world)
        if last > first:
            ranks[node] = range(first, last)
        first = last
    return ranks if first == world else None


def _largest_first(counts: Iterable[int]) -> list[tuple[int, int]]:
    """Counts with their places, which break ties."""
    return sorted(((count, place) for place, count in enumerate(counts)), key=lambda pair: (-pair[0], pair[1]))


def no_place(scaling: ScalingSpec, nodes: Sequence[Resources]) -> str | None:
    """Why the nodes can never hold the workers, as a sentence; None where they can, or where nodes are not known."""
    if not nodes or lay_out(scaling, nodes) is not None:
        return None
    each = " and ".join(f"{amount:g} {name}" for name, amount in scaling.resources_per_worker.items() if amount)
    most, strategy = max(_places(scaling, node) for node in nodes), scaling.placement_strategy
    if not most:
        return f"a worker needs {each}, which no single node of the cluster has; add larger nodes, or ask for less"
    if strategy == "STRICT_PACK":
        return (
            f"placement_strategy=STRICT_PACK asks for {scaling.world} workers on one node, and no node has room for "
            f"more than {most}; choose PACK, or fewer workers"
        )
    if strategy == "STRICT_SPREAD":
        apart = sum(_places(scaling, node) > 0 for node in nodes)
        return (
            f"placement_strategy=STRICT_SPREAD asks for a node for each of {scaling.world} workers, and {apart} nodes "
            "have room for one; choose SPREAD, or fewer workers"
        )
    count = sum(_places(scaling, node) for node in nodes)
    return (
        f"{scaling.world} workers need {each} each, and the nodes of the cluster have places for {count} such workers; "
        "add nodes, or ask for fewer or smaller workers"
    )


def _places(scaling: ScalingSpec, node: Resources) -> int:
    """How many workers a node has room for."""
    wanted = [(name, amount) for name, amount in scaling.resources_per_worker.items() if amount]
    return min((int(node.get(name, 0.0) / amount + 1e-9) for name, amount in wanted), default=scaling.world)
