"""Check of an elastic job: can it shrink when the cluster loses a node? Pure."""

from collections.abc import Mapping, Sequence

from service.domain.queue.admission import never_fits
from service.domain.queue.resources import NOISE
from train_loop.plan import DATA_CPUS, Capacity, describe_amount, one_of
from train_loop.spec import ScalingSpec, StrategySpec

_SIZES = ("ep_size", "tp_size", "ulysses_size", "fsdp_size")
"""Settings of a strategy whose sizes divide the workers."""


def cannot_shrink(
    scaling: ScalingSpec, strategy: StrategySpec, sizes: Sequence[int], cluster: Capacity | None
) -> str | None:
    """Return why an elastic job cannot resume with fewer workers after the loss of a node; None if it can.

    Also None if the size is fixed, if nodes are unknown, or if only one node can hold workers.
    """
    if len(sizes) == 1:
        return f"the job can never shrink: {sizes[0]} is the only number of workers {_limits(scaling, strategy)}"
    useful = [node for node in cluster.nodes if _holds_a_worker(scaling, node)] if sizes and cluster else []
    if cluster is None or len(useful) < 2:
        return None
    fatal = [node for node in useful if not _fits(scaling, sizes, _without(cluster, node))]
    if not fatal:
        return None
    smallest = scaling.at(sizes[0])
    which = "a node" if len(fatal) == len(useful) else f"a node with {_amounts(smallest, fatal[0])}"
    return (
        f"the job cannot shrink when {which} is lost: {_arithmetic(smallest, _without(cluster, fatal[0]))}; ask for "
        "fewer or smaller workers, or add a node"
    )


def _limits(scaling: ScalingSpec, strategy: StrategySpec) -> str:
    """Return what leaves a job only one number of workers, with a remedy, as the end of a sentence."""
    fewest, most = scaling.bounds
    if fewest == most:
        return "in scaling.num_workers; choose a smaller min or a larger max"
    chosen = [name for name in _SIZES if getattr(strategy, name) > 1]
    remedy = f"a smaller {one_of(chosen)}" if chosen else "a global_batch_size that other numbers of workers divide"
    return f"from {fewest} to {most} that strategy, batch and memory allow; widen num_workers, or choose {remedy}"


def _holds_a_worker(scaling: ScalingSpec, node: Mapping[str, float]) -> bool:
    needed = scaling.resources_per_worker.items()
    return all(node.get(name, 0.0) >= amount - NOISE for name, amount in needed)


def _fits(scaling: ScalingSpec, sizes: Sequence[int], cluster: Capacity) -> bool:
    return any(never_fits(scaling.at(size), cluster) is None for size in sizes)


def _without(cluster: Capacity, node: Mapping[str, float]) -> Capacity:
    place = cluster.nodes.index(node)
    nodes = cluster.nodes[:place] + cluster.nodes[place + 1 :]
    return Capacity({name: sum(node.get(name, 0.0) for node in nodes) for name in cluster.total}, nodes)


def _amounts(scaling: ScalingSpec, node: Mapping[str, float]) -> str:
    needed = (name for name, amount in scaling.resources_per_worker.items() if amount)
    return " and ".join(describe_amount(name, node.get(name, 0.0)) for name in needed)


def _arithmetic(scaling: ScalingSpec, rest: Capacity) -> str:
    """Return why the smallest size does not fit, with the numbers."""
    for name, amount in scaling.resources_per_worker.items():
        data, have = (DATA_CPUS if name == "CPU" else 0.0), rest.total.get(name, 0.0)
        if amount and scaling.world * amount + data > have + NOISE:
            extra = f" + {data:g} CPU for Ray Data" if data else ""
            need = f"{scaling.world} x {describe_amount(name, amount)}{extra}"
            return f"its smallest size needs {need} > {describe_amount(name, have)} on the other nodes"
    return (never_fits(scaling, rest) or "").partition("; ")[0]
