"""Amounts of resources by name, e.g. CPU and GPU. Pure."""

from collections.abc import Iterable, Mapping

from train_loop.plan import describe_amount, format_amount
from train_loop.spec import MEMORY

Resources = Mapping[str, float]
NOISE = 1e-9
"""Tolerance of comparisons: sums of fractions are not exact."""


def add_up(parts: Iterable[Resources]) -> Resources:
    """Sum resources by name."""
    total: dict[str, float] = {}
    for part in parts:
        for name, amount in part.items():
            total[name] = total.get(name, 0.0) + amount
    return total


def subtract(whole: Resources, parts: Iterable[Resources]) -> Resources:
    """Return the resources that remain without the parts."""
    taken = add_up(parts)
    return {name: amount - taken.get(name, 0.0) for name, amount in whole.items()}


def shortage(needs: Resources, total: Resources, held: Resources) -> str | None:
    """Return which needed resources are not free, with the numbers; None if all are."""
    short = [
        f"{describe_amount(name, amount)} ({format_amount(name, held.get(name, 0))} of the cluster's "
        f"{format_amount(name, total.get(name, 0))} are {'reserved' if name == MEMORY else 'in use'})"
        for name, amount in needs.items()
        if amount > total.get(name, 0) - held.get(name, 0) + NOISE
    ]
    return " and ".join(short) or None
