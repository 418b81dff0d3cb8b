"""The forecast of a run's throughput on a device: an interval, its parts in seconds, and assumptions. Pure.

The fast end takes the high ends of all rates, and exchanges behind computation. The slow end takes the low ends, and
exchanges that nothing hides. A test compares intervals with published and measured steps; the ranges below are those
of kernels and links, and not a fit of these steps.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from train_loop.plan.forecast.devices import Device
from train_loop.plan.forecast.work import (
    Exchange,
    Range,
    attention_flops,
    exchanges,
    float8_flops,
    host_bytes,
    matrix_flops,
    memory_bytes,
    restoring_bytes,
    started_layers,
    state_bytes,
    total,
    update_bytes,
)
from train_loop.plan.mesh import Axis
from train_loop.plan.model.config import WITHOUT_ATTENTION
from train_loop.plan.plan import Plan
from train_loop.spec import SCHEDULE_FREE, BudgetSpec, JobSpec

_FLASH, _MASKED = (0.2, 0.7), (0.12, 0.45)
"""Part of the peak that attention kernels reach: older ones to FlashAttention 3, and those with a mask."""
_MEMORY = (0.6, 0.9)
_WITHIN, _ACROSS = (0.5, 0.85), (0.3, 0.85)
"""Part of a link's bandwidth that exchanges reach: within a host, and between hosts."""
_PINNED, _PAGED = (0.4, 0.8), (0.1, 0.4)
"""Part of the bandwidth between GPU and host that copies reach, with pinned memory and without."""
_LAYER_SECONDS = Range(0.05e-3, 0.5e-3)
"""Seconds that a core needs to start the kernels of a layer's pass; computation cannot be faster."""
_SHARE_OF_HOST, _OF_CORE = Range(25e9, 50e9), Range(4e9, 12e9)
"""Bytes per second of host memory: a GPU's share of a host's, and the rate of a core."""
_PERCENT = 100


@dataclass(frozen=True)
class Part:
    """Seconds of a worker that one kind of work takes in an optimizer step."""

    name: str
    seconds: Range


@dataclass(frozen=True)
class Throughput:
    """The forecast of a step on a device."""

    step_seconds: Range
    tokens_per_second: Range
    """Tokens of full rows that all workers train together; the least belongs to the longest step."""
    parts: tuple[Part, ...]
    assumptions: tuple[str, ...]

    @property
    def typical(self) -> float:
        """Return tokens per second in the middle of the interval, by which changes are ordered."""
        return math.sqrt(self.tokens_per_second.least * self.tokens_per_second.most)


def why_no_forecast(spec: JobSpec, plan: Plan, device: Device) -> str | None:
    """Return why there is no forecast of throughput, as a sentence; None if there is one."""
    shape, dtype = plan.shape, spec.strategy.param_dtype
    reasons = (
        (spec.code is not None, "own code has other work than a decoder, which no formula here counts"),
        (shape.active is not None, "the load of experts decides, and no measured run supports an interval yet"),
        (spec.model.masked is not None, "no measured run of an encoder supports an interval yet"),
        (shape.model_type in WITHOUT_ATTENTION, "no formula here counts the work of recurrent layers"),
        (shape.whole_scores, "attention that computes whole matrices of scores has no measured run"),
        (bool(spec.strategy.precision), "modules with another dtype (precision) have no measured run"),
        (spec.training.deterministic, "deterministic algorithms have no measured run"),
        (
            dtype == "fp32" and spec.strategy.matmul_precision != "highest",
            "fp32 products in TF32 or bf16 (matmul_precision) have no measured run",
        ),
        (spec.training.optimizer == "muon", "the work of muon's orthogonal updates is not counted"),
        (
            (optimizer := spec.training.optimizer) in ("lion", SCHEDULE_FREE),
            f"no measured run of {optimizer} supports an interval yet",
        ),
        (device.peak(dtype) is None, f"{device.title} has no kernels in {dtype}; choose fp16 or fp32"),
        (
            spec.strategy.float8 is not None and device.peak("float8") is None,
            f"{device.title} has no kernels in float8; remove float8",
        ),
        (
            device.network is None and plan.mesh.world > device.domain,
            f"the network between hosts of {device.domain} {device.title} is unknown",
        ),
    )
    return next((f"throughput is not estimated: {reason}" for holds, reason in reasons if holds), None)


def throughput_on(spec: JobSpec, plan: Plan, device: Device) -> Throughput | None:
    """Return the forecast of a plan on a device; None if `why_no_forecast` has a reason."""
    if why_no_forecast(spec, plan, device) is not None:
        return None
    micro, optimizer = _micro_batch(spec, plan, device), _optimizer(spec, plan, device)
    times = plan.batch.accumulation
    step = _seconds(spec, plan, micro).times(times).plus(optimizer)
    tokens = plan.batch.global_batch * spec.data.sequences * spec.data.sequence_length
    parts = [Part(name, seconds.times(times)) for name, seconds in micro.items()]
    return Throughput(
        step,
        Range(tokens / step.most, tokens / step.least),
        tuple(part for part in (*parts, Part("optimizer", optimizer)) if part.seconds.most),
        tuple(_assumptions(spec, plan, device)),
    )


def _micro_batch(spec: JobSpec, plan: Plan, device: Device) -> dict[str, Range]:
    """Return the seconds of each kind of work in a micro-batch."""
    peak, attention = device.peak(spec.strategy.param_dtype) or 1.0, attention_flops(spec, plan)
    products, sent = matrix_flops(spec, plan), exchanges(spec, plan)
    # Products in float8 as those in the compute dtype that take the same time.
    products -= float8_flops(spec, plan) * (1 - peak / (device.peak("float8") or peak))
    slow = _MASKED if attention.masked else _FLASH
    return {
        "matrix_products": Range(products, products).over(peak, device.efficiency),
        "attention": Range(attention.least, attention.most).over(peak, (slow[0], _FLASH[1])),
        "memory_traffic": memory_bytes(spec, plan).over(device.bandwidth, _MEMORY),
        "kernel_starts": _LAYER_SECONDS.times(started_layers(spec, plan)),
        "exchange_of_parameters": total(*(_on_link(one, device) for one in sent if one.hidden)),
        "exchange_of_activations": total(*(_on_link(one, device) for one in sent if not one.hidden)),
        "host_transfer": host_bytes(spec, plan).over(device.host_link, _to_host(spec)),
    }


def _seconds(spec: JobSpec, plan: Plan, micro: dict[str, Range]) -> Range:
    """Return the seconds of a micro-batch: the slow end hides no exchange."""
    computing = total(*(micro[name] for name in ("matrix_products", "attention", "memory_traffic")))
    sent, moved, exposed = (
        micro[name] for name in ("exchange_of_parameters", "host_transfer", "exchange_of_activations")
    )
    starts = micro["kernel_starts"]
    return Range(
        max(computing.least, sent.least, moved.least, starts.least) + exposed.least,
        max(computing.most, starts.most) + sent.most + moved.most + exposed.most,
    )


def _optimizer(spec: JobSpec, plan: Plan, device: Device) -> Range:
    """Return the seconds of an optimizer step: its bytes in the memory of the GPU, or of the host if offloaded."""
    work = update_bytes(spec, plan)
    if spec.strategy.offload_policy is not True:
        moved = state_bytes(spec, plan)
        return work.over(device.bandwidth, _MEMORY).plus(Range(moved, moved).over(device.host_link, _to_host(spec)))
    rate = _host_rate(spec)
    return Range(work.least / rate.most, work.most / rate.least)


def _to_host(spec: JobSpec) -> tuple[float, float]:
    return _PINNED if spec.strategy.pin_memory else _PAGED


def _host_rate(spec: JobSpec) -> Range:
    """Return the bytes per second that a worker's cores read and write in host memory."""
    cores = spec.scaling.resources_per_worker.get("CPU", 1.0) or 1.0
    return Range(*(min(whole, cores * core) for whole, core in zip(_SHARE_OF_HOST, _OF_CORE, strict=True)))


def _on_link(sent: Exchange, device: Device) -> Range:
    rate, parts = _link(sent.axis, device)
    return Range(sent.size, sent.size).over(rate, parts)


def _link(axis: Axis, device: Device) -> tuple[float, tuple[float, float]]:
    """Return the bandwidth of an axis and the part of it that is reached, if neighbours fill one host after another.

    Members of a group on one host share what arrives from other hosts, and so the network of all of them.
    """
    together = max(device.domain // axis.stride, 1)
    if axis.size <= together:
        return device.link, _WITHIN
    network = device.network or 0.0
    return min(device.link, together * network) if together > 1 else network, _ACROSS


def _assumptions(spec: JobSpec, plan: Plan, device: Device) -> Iterator[str]:
    dtype, mesh = spec.strategy.param_dtype, plan.mesh
    yield (
        f"matrix products reach {_percent(device.efficiency)} of {(device.peak(dtype) or 0) / 1e12:g} TFLOP/s in "
        f"{dtype}, attention {_percent(_FLASH)}, or {_percent(_MASKED)} with a mask"
    )
    if spec.strategy.float8 is not None:
        yield (
            f"products of float8 layers reach the same part of {(device.peak('float8') or 0) / 1e12:g} TFLOP/s; "
            "rounding reads and writes operands once to several times"
        )
    if spec.model.quantize_base is not None:
        moved = restoring_bytes(spec, plan).times(1e-9)
        yield (
            f"{spec.model.quantize_base} weights are restored in each pass, which moves {moved.least:,.0f} to "
            f"{moved.most:,.0f} GB for each micro-batch; no measured run of quantised weights has been compared"
        )
    yield f"other operations use {_percent(_MEMORY)} of {device.bandwidth / 1e9:,.0f} GB/s of memory"
    if spec.data.packing:
        yield "rows are full, with short documents at the fast end and one document at the slow end"
    else:
        yield "rows are full; padding is computed, too, and counts as tokens here"
    if mesh.world > 1:
        yield (
            f"exchanges use {_percent(_WITHIN)} of {device.link / 1e9:g} GB/s within a host, hidden by computation at "
            "the fast end only"
        )
    if mesh.world > device.domain:
        network = (device.network or 0) / 1e9
        yield (
            f"hosts have {device.domain} GPUs each, with {network:g} GB/s a GPU between hosts, of which "
            f"{_percent(_ACROSS)} are reached"
        )
    if spec.strategy.offload_policy or spec.model.gradient_checkpointing == "offload":
        yield f"GPU and host exchange {_percent(_to_host(spec))} of {device.host_link / 1e9:g} GB/s"
    if isinstance(spec.model.gradient_checkpointing, BudgetSpec):
        yield f"torch.compile repeats {1 - spec.model.gradient_checkpointing.budget:.0%} of each layer's forward pass"
    if spec.strategy.offload_policy is True:
        rate = _host_rate(spec).times(1e-9)
        yield f"the optimizer on the host reads and writes {rate.least:g} to {rate.most:g} GB/s a worker"
    yield "data, evaluation and checkpoints do not delay steps"


def _percent(parts: tuple[float, float]) -> str:
    return " to ".join(f"{part * _PERCENT:.0f}" for part in parts) + " %"
