"""Workers → cluster: what a job takes of a cluster, and whether it can ever have it."""

from collections.abc import Mapping

from train_loop.spec import Problem, ScalingSpec

DATA_CPUS = 1.0
"""CPUs that Ray Data needs beside the workers: one task at a time is slow, none at all is a silent standstill."""


def needed(scaling: ScalingSpec) -> dict[str, float]:
    """Resources that all workers together reserve, by Ray's names."""
    return {name: amount * scaling.world for name, amount in scaling.resources_per_worker.items() if amount}


def too_big(scaling: ScalingSpec, total: Mapping[str, float]) -> str | None:
    """Why the cluster can never hold the workers, as a sentence with numbers; None where it can."""
    short = [
        f"{amount:g} {name} where the cluster has {total.get(name, 0):g}"
        for name, amount in needed(scaling).items()
        if amount > total.get(name, 0) + 1e-9
    ]
    if not short:
        return None
    return (
        f"{scaling.world} workers need {' and '.join(short)}; add nodes, or cancel and submit fewer or smaller workers"
    )


def data_starves(scaling: ScalingSpec, total: Mapping[str, float] | None) -> Problem | None:
    """The problem with workers that fit but leave no CPU for Ray Data; None where there is none, or nothing known."""
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
