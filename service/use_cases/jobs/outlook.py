"""Outlook of a plan on a device: a named one, or the device of the cluster's nodes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

from service.errors import InvalidRequest
from train_loop.plan import Device, NodeRoom, Outlook, Plan, RankMemory, Resources, device_named, device_of, outlook_on
from train_loop.spec import AnyJobSpec, Problem, ScalingSpec


@dataclass(frozen=True)
class DeviceQuestion:
    """A caller's question about devices."""

    device: str | None = None
    """Name of a device in the table; None for that of the cluster, if it is known."""
    suggests: bool = False
    """True to list changes with which the plan fits."""

    @property
    def named(self) -> Device | None:
        """Return the device that the caller names; None if it names none. Raises InvalidRequest for an unknown one."""
        try:
            return None if self.device is None else device_named(self.device)
        except ValueError as error:
            raise InvalidRequest([Problem("/query/device", str(error))]) from error


def find_outlook(question: DeviceQuestion, spec: AnyJobSpec, plan: Plan, nodes: Sequence[NodeRoom]) -> Outlook | None:
    """Return the outlook of a plan on the device; None if no device is named or known. Raises InvalidRequest."""
    named, on_gpu = question.named, bool(spec.scaling.resources_per_worker.get("GPU"))
    if not spec.trains:
        if named is not None or question.suggests:
            rule = "forecasts are those of training, and the job trains nothing; leave out device and suggest"
            raise InvalidRequest([Problem("/query/device", rule)])
        return None
    if named is not None and not on_gpu:
        rule = "the workers of the spec request no GPU; add GPU: 1 to scaling.resources_per_worker"
        raise InvalidRequest([Problem("/query/device", rule)])
    device = named or (_device_of_nodes(nodes) if on_gpu else None)
    if device is None:
        if question.suggests:
            rule = "no GPU of the cluster is known; name a device"
            raise InvalidRequest([Problem("/query/suggest", rule)])
        return None
    return outlook_on(spec.run, plan, device, suggests=question.suggests)


def hosts_of(device: Device, scaling: ScalingSpec) -> list[Resources]:
    """Return the hosts that the workers need, each with a worker per GPU of the device's domain."""
    host = {name: amount * device.domain for name, amount in scaling.resources_per_worker.items()}
    return [host] * ceil(scaling.world / device.domain)


def find_memory(
    question: DeviceQuestion, spec: AnyJobSpec, nodes: Sequence[NodeRoom], reserved: int | None
) -> RankMemory | None:
    """Return the memory of a worker, as the worker measures it: that of its GPU, or its reservation on a host.

    None if it is not known before the workers run. Raises InvalidRequest.
    """
    if not spec.scaling.resources_per_worker.get("GPU"):
        return None if reserved is None else RankMemory("cpu", reserved, on_gpu=False)
    device = question.named or _device_of_nodes(nodes)
    return None if device is None else RankMemory(device.name, device.memory, on_gpu=True)


def _device_of_nodes(nodes: Sequence[NodeRoom]) -> Device | None:
    """Return the smallest device of the nodes that have any; None if one of them is not in the table."""
    with_gpus = [node for node in nodes if node.devices]
    found = [_device_of_node(node) for node in with_gpus]
    known = [device for device in found if device is not None]
    return min(known, key=lambda device: device.memory) if known and len(known) == len(found) else None


def _device_of_node(node: NodeRoom) -> Device | None:
    if node.gpu is None or not node.devices or (device := device_of(node.gpu)) is None:
        return None
    return replace(device, memory=min(node.devices), domain=len(node.devices))
