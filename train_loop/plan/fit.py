"""Comparison of a plan's memory with the memory of nodes and their devices. Pure.

A worker's certain bytes follow from sizes alone: parameters, gradients, optimizer, buffers, and its process. If no
layout of the workers has room for them, the job cannot run. Activations and logits are estimates.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from train_loop.plan.data_facts import LargestRead
from train_loop.plan.layout import Resources, count_places, lay_out
from train_loop.plan.memory.estimate import STATE_PART_BYTES, saves_between_steps
from train_loop.plan.memory.term import DTYPE_BYTES, FROZEN, MemoryTerm
from train_loop.plan.plan import Plan
from train_loop.spec import SCHEDULE_FREE, JobSpec

WORKER_MEMORY_VARIABLE = "TRAINSHED_WORKER_MEMORY_BYTES"
"""Environment variable with the memory of all workers on a host; the service sets it for an embedded Ray."""
PROCESS_BYTES = 560 * 2**20
"""Resident memory of a rank's process without a model, measured with the CUDA build of torch 2.13 on Linux."""
_CUDA_BYTES = 1120 * 2**20
"""Further resident memory of a rank's process with a GPU: 1.7 GB of both were measured on an H200."""
_READER_BYTES = 440 * 2**20
"""Resident memory of a process that prepares data, measured before it reads, with a small tokenizer."""
_ENCODER_BYTES = 780 * 2**20
"""Peak memory of a process that encodes text, measured with rows of 16 KiB and a vocabulary of 150,000 tokens."""
_TRAINER_BYTES, _TRAINER_RATES = 440 * 2**20, (8, 142)
"""Memory of a driver that trains a tokenizer, and bytes for each byte of text: of source code, and of words that never
repeat. From 6.7 (64 MiB) to 15 (4 MiB), and from 110 (8 MiB) to 142 (2 MiB) were measured."""
TOKENIZER_TEXT = 64 * 2**20
"""Maximum characters to train a tokenizer on: more takes much longer and hardly changes its merges."""
_STATE = (FROZEN, "parameters", "optimizer", "ema", "gradients")
_HOST = "memory of the host"
_UNKNOWN = 1 << 62


@dataclass(frozen=True)
class NodeRoom:
    """The resources of a node and the memory that its workers can use, in bytes; None if it is unknown."""

    resources: Resources
    host: int | None = None
    devices: tuple[int, ...] | None = None
    """Memory of each GPU."""
    object_store: int = 0
    """Part of the host memory that Ray's objects may take."""
    limited: bool = False
    """True if each worker may use only the host memory that it reserves."""
    gpu: str | None = None
    """Name of its GPUs, as CUDA reports it; None if it is unknown or if they differ."""


@dataclass(frozen=True)
class MemoryNeed:
    """The memory that each worker needs at the same time, in terms."""

    when: str
    """Phase of the run, as the end of a sentence."""
    host: tuple[MemoryTerm, ...]
    device: tuple[MemoryTerm, ...] = ()

    @property
    def host_bytes(self) -> int:
        """Return the bytes in host memory."""
        return sum(term.bytes for term in self.host)

    @property
    def device_bytes(self) -> int:
        """Return the bytes on the worker's GPU."""
        return sum(term.bytes for term in self.device)


def certain_needs(spec: JobSpec, plan: Plan) -> tuple[MemoryNeed, ...]:
    """Return the certain needs of a run: in a step, at its end, and while its weights are initialised."""
    terms = [term for term in plan.memory if not term.estimated]
    return _need(spec, "in a step", terms), _update(spec, plan), _initialisation(spec, plan)


def _update(spec: JobSpec, plan: Plan) -> MemoryNeed:
    """Return the need while the optimizer updates the weights, after gathered parameters have been freed."""
    held = (*_STATE, "checkpoint_staging") if saves_between_steps(spec) else _STATE
    terms = {term.name: term for term in plan.memory if term.name in held}
    training, gradients = spec.training, terms["gradients"]
    on_gpu = bool(spec.scaling.resources_per_worker.get("GPU")) and spec.strategy.offload_policy is not True
    part = 0.0
    if training.optimizer == "sgd" and training.weight_decay:
        part = 1.0
    elif training.optimizer in ("adam", "adamw", "muon") and training.reproducible == "any_size" and not on_gpu:
        # Muon updates matrices one after another, and AdamW the rest.
        matrices = plan.shape.trained_matrices if training.optimizer == "muon" else 0
        part = 1 - matrices / plan.shape.trained
    formula = "a copy that torch makes of all gradients or moments that it updates together"
    if training.optimizer in ("lion", SCHEDULE_FREE):
        part, formula = 2 * plan.shape.largest_module / plan.shape.trained, "2 copies of the largest parameter"
    copied = replace(gradients, name="optimizer_step", bytes=int(part * gradients.bytes), formula=formula)
    used = list[MemoryTerm]()
    if terms["optimizer"].place != terms["parameters"].place:
        state = terms["optimizer"].bytes
        size = min(state, STATE_PART_BYTES * state // max(gradients.bytes, 1))
        used.append(MemoryTerm("optimizer_part", size, "the part of the offloaded optimizer state that is in use"))
    return _need(spec, "while the optimizer updates the weights", [*terms.values(), copied, *used])


def estimated_need(spec: JobSpec, plan: Plan) -> MemoryNeed:
    """Return the needs of a step with the estimated terms."""
    need = _need(spec, "in a step, with activations", plan.memory)
    if not need.device:
        return need
    staged = sum(term.bytes for term in need.host if term.name == "checkpoint_staging")
    cuda = MemoryTerm(
        "cuda", _CUDA_BYTES + staged // 4, "CUDA's libraries + a quarter of staging in pinned pages", "host"
    )
    return replace(need, host=(*need.host, cuda))


def fits(spec: JobSpec, need: MemoryNeed, nodes: Sequence[NodeRoom]) -> bool:
    """Return whether some layout of the workers has enough memory; unknown memory counts as enough.

    If the nodes lack other resources for all workers, only one worker is compared: nodes may join later.
    """
    if not nodes or _is_small(spec, need, nodes):
        return True
    scaling, group = spec.scaling, spec.strategy.peers
    if lay_out(scaling, [node.resources for node in nodes], group=group) is None:
        scaling, group = scaling.at(1), 1
        if not any(count_places(scaling, node.resources) for node in nodes):
            return True
    with_memory = {**scaling.resources_per_worker, _HOST: float(need.host_bytes)}
    wanted = scaling.model_copy(update={"resources_per_worker": with_memory})
    return lay_out(wanted, [_with_memory(node, need) for node in nodes], group=group) is not None


def _is_small(spec: JobSpec, need: MemoryNeed, nodes: Sequence[NodeRoom]) -> bool:
    """Return whether memory is enough on each node, however many workers it gets; this is quick on many nodes."""
    return all(
        need.host_bytes * min(count_places(spec.scaling, node.resources), spec.scaling.world) <= _or_unknown(node.host)
        and need.device_bytes <= min(node.devices or (), default=_UNKNOWN)
        for node in nodes
    )


def _with_memory(node: NodeRoom, need: MemoryNeed) -> dict[str, float]:
    """Return a node's resources with its memory, and only the GPUs that are large enough."""
    found = {**node.resources, _HOST: float(_or_unknown(node.host))}
    if node.devices and need.device_bytes:
        large = sum(device >= need.device_bytes for device in node.devices)
        found["GPU"] = min(found.get("GPU", 0.0), float(large))
    return found


def unknown_memory(spec: JobSpec, need: MemoryNeed, nodes: Sequence[NodeRoom]) -> bool:
    """Return whether a fit depends on memory that is not known."""
    known = [replace(node, host=node.host or 0, devices=node.devices or _no_devices(spec)) for node in nodes]
    return not nodes or not fits(spec, need, known)


def _no_devices(spec: JobSpec) -> tuple[int, ...]:
    return (0,) if spec.scaling.resources_per_worker.get("GPU") else ()


def _or_unknown(memory: int | None) -> int:
    return _UNKNOWN if memory is None else memory


def _need(spec: JobSpec, when: str, terms: Iterable[MemoryTerm]) -> MemoryNeed:
    process = MemoryTerm("process", PROCESS_BYTES, "the rank's process without a model", "host")
    on_gpu = bool(spec.scaling.resources_per_worker.get("GPU"))
    found = [term for term in terms if term.bytes]
    host = [term for term in found if term.place == "host" or not on_gpu]
    return MemoryNeed(when, (*host, process), tuple(term for term in found if term.place == "device" and on_gpu))


def _initialisation(spec: JobSpec, plan: Plan) -> MemoryNeed:
    """Return the need while weights get their first values: each rank draws every module whole, on its host."""
    terms = [term for term in plan.memory if term.name in (FROZEN, "parameters")]
    if spec.model.config is not None:
        size = DTYPE_BYTES[spec.model.master_dtype]
        drawn = size * plan.shape.largest_module
        formula = f"{size} bytes x the largest module, which each rank draws whole"
        terms.append(MemoryTerm("random_module", drawn, formula, "host"))
    return _need(spec, "while its weights are initialised", terms)


def task_bytes(spec: JobSpec, largest: LargestRead | None = None) -> int:
    """Return the memory of a task that prepares the largest part of the data; Ray Data runs up to one task per CPU."""
    base = _ENCODER_BYTES if spec.data.reads_text else _READER_BYTES
    return base if largest is None else max(base, _READER_BYTES + largest.row_bytes) + largest.group_bytes


def tokenizer_bytes(spec: JobSpec, largest: LargestRead | None) -> tuple[int, int]:
    """Return the likely and the largest memory of a tokenizer's training, which the driver runs; 0 without training."""
    if not spec.data.reads_text or spec.model.tokenizer or spec.model.path or largest is None:
        return 0, 0
    text = min(largest.corpus, TOKENIZER_TEXT)
    likely, most = _TRAINER_RATES
    return _TRAINER_BYTES + likely * text, _TRAINER_BYTES + most * text


def crowded_preparation(task: int, nodes: Sequence[NodeRoom]) -> tuple[int, int] | None:
    """Return tasks and host memory of the first node on which preparation may lack memory; None if there is none."""
    # Tasks reserve their memory on nodes that limit their workers.
    known = ((int(node.resources.get("CPU", 0.0)), node.host) for node in nodes if not node.limited)
    return next(((tasks, host) for tasks, host in known if host is not None and tasks * task > host), None)


def no_preparation(task: int, nodes: Sequence[NodeRoom]) -> bool:
    """Return whether no node has the memory of a single task that prepares data."""
    hosts = [_or_unknown(node.host) for node in nodes if node.resources.get("CPU", 0.0) >= 1]
    return bool(hosts) and max(hosts) < task


def overfull_node(spec: JobSpec, need: MemoryNeed, nodes: Sequence[NodeRoom]) -> tuple[int, int] | None:
    """Return workers and host memory of a node that the default layout fills beyond its memory; None if it fits."""
    ranks = lay_out(spec.scaling, [node.resources for node in nodes], group=spec.strategy.peers)
    for place, mine in (ranks or {}).items():
        host = nodes[place].host
        if host is not None and len(mine) * need.host_bytes > host:
            return len(mine), host
    return None
