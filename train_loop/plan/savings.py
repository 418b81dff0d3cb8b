"""The cheapest change of a spec with which its workers fit the memory of a cluster. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from train_loop.plan.fit import MemoryNeed, NodeRoom, certain_needs, fits
from train_loop.plan.layout import count_places
from train_loop.plan.model.shape import ModelShape
from train_loop.plan.plan import Plan, plan_job
from train_loop.plan.resources import data_starves, format_bytes
from train_loop.spec import MOST_WORKERS, AnyJobSpec, Problem, SpecError, override

Patch = Mapping[str, Mapping[str, Any]]
_TERMS = 5


@dataclass(frozen=True)
class Change:
    """Overrides of a spec, and the need of a worker with them."""

    patch: Patch
    need: MemoryNeed

    def __str__(self) -> str:
        return describe_patch(self.patch)


def describe_patch(patch: Patch) -> str:
    """Return the fields of a patch as they are written in a spec, without those that it removes."""
    fields = [
        f"{part}.{name}: {_yaml(value)}"
        for part, one in patch.items()
        for name, value in one.items()
        if value is not None
    ]
    return " and ".join(fields)


def plans_that_fit(spec: AnyJobSpec, plans: Mapping[int, Plan], nodes: Sequence[NodeRoom]) -> dict[int, Plan]:
    """Return the plans of the numbers of workers whose certain memory some layout on the nodes holds."""
    return {workers: plan for workers, plan in plans.items() if _first_lack(spec.at(workers), plan, nodes) is None}


def memory_problem(
    spec: AnyJobSpec, plans: Mapping[int, Plan], shape: ModelShape, nodes: Sequence[NodeRoom]
) -> Problem | None:
    """Return the problem of a job that fits the nodes with no number of workers; None if it fits with one."""
    if not plans or plans_that_fit(spec, plans, nodes):
        return None
    most = max(plans)
    need = _first_lack(spec.at(most), plans[most], nodes)
    assert need is not None
    pointer = "/model/config" if spec.model.path is None else "/model/path"
    workers = f"each of {most} workers" if most > 1 else "the worker"
    return Problem(
        pointer,
        f"the model does not fit: {need.when}, {workers} needs {_lacks(spec.at(most), need, nodes)}; "
        f"{_remedy(spec, shape, nodes)}",
    )


def cheapest_change(spec: AnyJobSpec, shape: ModelShape, nodes: Sequence[NodeRoom]) -> Change | None:
    """Return the cheapest change with which the spec is accepted on the nodes; None if there is none."""
    choices = [valid for one in _choices(spec, nodes) if (valid := [p for p in one if _plan(spec, shape, p)])]
    subsets = (chosen for count in range(1, len(choices) + 1) for chosen in combinations(choices, count))
    for patch in (patch for chosen in subsets for patch in _products(chosen)):
        found = _plan(spec, shape, patch)
        if found is not None and _is_accepted(*found, nodes):
            changed, plan = found
            return Change(patch, certain_needs(changed.run, plan)[0])
    return None


def describe_terms(need: MemoryNeed, *, on_device: bool) -> str:
    """Return the bytes of a need on a device or host, with its largest terms."""
    terms, total = (need.device, need.device_bytes) if on_device else (need.host, need.host_bytes)
    largest = sorted(terms, key=lambda term: -term.bytes)[:_TERMS]
    where = "GPU" if on_device else "host"
    return (
        f"{format_bytes(total)} of {where} memory "
        f"({', '.join(f'{term.name} {format_bytes(term.bytes)}' for term in largest)})"
    )


def _first_lack(spec: AnyJobSpec, plan: Plan, nodes: Sequence[NodeRoom]) -> MemoryNeed | None:
    return next((need for need in certain_needs(spec.run, plan) if not fits(spec.run, need, nodes)), None)


def _lacks(spec: AnyJobSpec, need: MemoryNeed, nodes: Sequence[NodeRoom]) -> str:
    """Return the memory that a worker needs and that of the nodes that could run it, as a phrase."""
    able = [node for node in nodes if count_places(spec.scaling, node.resources)]
    devices = [device for node in able for device in node.devices or ()]
    if need.device_bytes > max(devices, default=need.device_bytes):
        return f"{describe_terms(need, on_device=True)}, and the largest GPU has {format_bytes(max(devices))}"
    # Nodes or GPUs that are large enough may be too few.
    hosts = [node.host for node in able if node.host is not None]
    if hosts and need.host_bytes > min(hosts) // spec.scaling.world:
        many = f"{len(hosts)} nodes have together" if len(hosts) > 1 else "the node has"
        return f"{describe_terms(need, on_device=False)}, and {many} {format_bytes(sum(hosts))} for workers"
    large = sum(device >= need.device_bytes for device in devices)
    return f"{describe_terms(need, on_device=True)}, and {large} GPUs are that large"


def _remedy(spec: AnyJobSpec, shape: ModelShape, nodes: Sequence[NodeRoom]) -> str:
    found = cheapest_change(spec, shape, nodes)
    on_gpu = bool(spec.scaling.resources_per_worker.get("GPU"))
    if found is not None:
        size = format_bytes(found.need.device_bytes if on_gpu else found.need.host_bytes)
        return f"cheapest change that fits: {found}, with {size} per worker"
    return "no setting makes it fit on these nodes; choose a smaller model, or add nodes with more memory"


def _choices(spec: AnyJobSpec, nodes: Sequence[NodeRoom]) -> list[list[Patch]]:
    """Return the changes that save memory, cheapest first; each is a list of values, in this order."""
    strategy, on_gpu = spec.strategy, bool(spec.scaling.resources_per_worker.get("GPU"))
    most = spec.scaling.bounds[1]
    choices: list[tuple[bool, Patch]] = [
        (not on_gpu and strategy.save_mode != "sync", {"strategy": {"async_save_ckpt": False}}),
        (strategy.sharding_strategy == "NO_SHARD" and most > 1, {"strategy": {"sharding_strategy": "FULL_SHARD"}}),
        (strategy.gradient_sync == "last", {"strategy": {"gradient_sync": "every"}}),
        (1 < strategy.shards < most, {"strategy": {"fsdp_size": 0}}),
        (strategy.offload_policy is not True and on_gpu, {"strategy": {"offload_policy": True}}),
        (spec.trains and spec.run.training.optimizer == "adamw", {"training": {"optimizer": "adamw_8bit"}}),
    ]
    found = [[patch] for helps, patch in choices if helps]
    if more := _more_workers(spec, nodes):
        found.append(more)
    if spec.trains and spec.run.model.master_dtype == "fp32":
        found.append([{"model": {"master_dtype": "bf16"}}])
    return found


def _more_workers(spec: AnyJobSpec, nodes: Sequence[NodeRoom]) -> list[Patch]:
    """Return doubled numbers of workers for which the nodes have room by their other resources."""
    fewest, most = spec.scaling.bounds
    room = min(sum(count_places(spec.scaling.at(most), node.resources) for node in nodes), MOST_WORKERS)
    sizes = [most << doublings for doublings in range(1, MOST_WORKERS.bit_length()) if most << doublings <= room]
    if not spec.scaling.elastic:
        return [{"scaling": {"num_workers": size}} for size in sizes]
    return [{"scaling": {"num_workers": {"min": fewest, "max": size}}} for size in sizes]


def _products(chosen: Sequence[Sequence[Patch]]) -> Iterator[Patch]:
    """Yield the merged patches of one value of each change; at most one change has several values."""
    for place in range(max(map(len, chosen))):
        yield merge_patches([values[min(place, len(values) - 1)] for values in chosen])


def merge_patches(patches: Sequence[Patch]) -> Patch:
    """Return one patch with the fields of all; later ones win."""
    whole: dict[str, dict[str, Any]] = {}
    for patch in patches:
        for part, fields in patch.items():
            whole[part] = {**whole.get(part, {}), **fields}
    return whole


def _plan(spec: AnyJobSpec, shape: ModelShape, patch: Patch) -> tuple[AnyJobSpec, Plan] | None:
    """Return a changed spec at its largest number of workers, with its plan; None if it breaks a rule."""
    try:
        changed = override(spec, patch)
        largest = changed.at(changed.scaling.bounds[1])
        return largest, plan_job(largest, shape)
    except SpecError:
        return None


def _is_accepted(spec: AnyJobSpec, plan: Plan, nodes: Sequence[NodeRoom]) -> bool:
    total = {"CPU": sum(node.resources.get("CPU", 0.0) for node in nodes)}
    return data_starves(spec.scaling, total) is None and _first_lack(spec, plan, nodes) is None


def _yaml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {_yaml(one)}" for name, one in value.items()) + "}"
    return str(value).lower() if isinstance(value, bool) else str(value)
