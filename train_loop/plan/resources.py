"""Resources that a job reserves, and the check that the cluster has them."""

from collections.abc import Mapping

from train_loop.spec import MEMORY, Problem, ScalingSpec

DATA_CPUS = 1.0
"""CPUs that Ray Data needs in addition to the workers: with one, tasks are slow; with none, the job hangs silently."""


def format_bytes(count: int) -> str:
    """Format a number of bytes in MiB or GiB."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def describe_amount(name: str, amount: float) -> str:
    """Return an amount of a resource in words: "2 CPU", "1.5 GiB of memory"."""
    return f"{format_amount(name, amount)} of memory" if name == MEMORY else f"{amount:g} {name}"


def format_amount(name: str, amount: float) -> str:
    """Format an amount of a resource without its name; memory has a unit."""
    return format_bytes(int(amount)) if name == MEMORY else f"{amount:g}"


def describe_worker(scaling: ScalingSpec) -> str:
    """Return the resources of a worker in words."""
    return " and ".join(
        describe_amount(name, amount) for name, amount in scaling.resources_per_worker.items() if amount
    )


def needed(scaling: ScalingSpec) -> dict[str, float]:
    """Return the resources that all workers together reserve, by Ray's names."""
    return {name: amount * scaling.world for name, amount in scaling.resources_per_worker.items() if amount}


def too_big(scaling: ScalingSpec, total: Mapping[str, float]) -> str | None:
    """Return the reason why the cluster can never hold the workers, as a sentence; None if it can."""
    short = [
        f"{describe_amount(name, amount)} (the cluster has {format_amount(name, total.get(name, 0))})"
        for name, amount in needed(scaling).items()
        if amount > total.get(name, 0) + 1e-9
    ]
    if not short:
        return None
    return (
        f"{scaling.world} workers need {' and '.join(short)}; add nodes, or cancel and submit fewer or smaller workers"
    )


def data_starves(scaling: ScalingSpec, total: Mapping[str, float] | None) -> Problem | None:
    """Return a problem if the workers fit but leave no CPU for Ray Data; None otherwise, or if `total` is None."""
    if total is None:
        return None
    workers, cpus = needed(scaling).get("CPU", 0.0), total.get("CPU", 0.0)
    if workers > cpus or cpus - workers >= DATA_CPUS - 1e-9:
        return None
    each = max(cpus - DATA_CPUS, 0) / scaling.world
    return Problem(
        "/scaling/resources_per_worker",
        f"{scaling.world} workers x {workers / scaling.world:g} CPU take {workers:g} of the cluster's "
        f"{cpus:g} CPUs and leave less than the {DATA_CPUS:g} that Ray Data needs; "
        f"choose at most {each:g} CPU per worker, or fewer workers",
    )
