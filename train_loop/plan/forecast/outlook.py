"""All that a plan says about a device."""

from dataclasses import dataclass

from train_loop.plan.forecast.devices import Device
from train_loop.plan.forecast.fit import DeviceFit, fit_on
from train_loop.plan.forecast.speed import Throughput, throughput_on, why_no_forecast
from train_loop.plan.forecast.suggest import Suggestion, largest_micro_batch, suggest
from train_loop.plan.plan import Plan
from train_loop.spec import JobSpec


@dataclass(frozen=True)
class Outlook:
    """The memory and the throughput of a plan on a device."""

    device: Device
    fit: DeviceFit
    planned_bytes: int
    """Estimated bytes of tensors at the peak of a step."""
    throughput: Throughput | None
    no_throughput: str | None
    """Why throughput is not estimated; None if it is."""
    largest_micro_batch: int | None
    """Largest per_device_train_batch_size that fits at the same global batch; None if none does."""
    suggestions: tuple[Suggestion, ...] | None = None
    """Changes with which the plan fits, cheapest first; None if they were not asked for."""


def outlook_on(spec: JobSpec, plan: Plan, device: Device, *, suggests: bool = False) -> Outlook:
    """Return the outlook of a plan on a device; with `suggests`, also changes with which it fits."""
    return Outlook(
        device,
        fit_on(spec, plan, device),
        plan.memory_bytes,
        throughput_on(spec, plan, device),
        why_no_forecast(spec, plan, device),
        largest_micro_batch(spec, plan.shape, device),
        tuple(suggest(spec, plan.shape, device)) if suggests else None,
    )
