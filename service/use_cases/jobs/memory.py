"""The memory of a job's workers compared with that of the cluster's nodes: problems and warnings. Pure."""

from collections.abc import Sequence
from dataclasses import replace

from train_loop.plan import (
    LargestRead,
    NodeRoom,
    Plan,
    certain_needs,
    crowded_preparation,
    describe_terms,
    estimated_need,
    fits,
    format_bytes,
    memory_remedies,
    no_preparation,
    overfull_node,
    task_bytes,
    tokenizer_bytes,
    unknown_memory,
)
from train_loop.spec import AnyJobSpec, JobSpec, Problem

_REMEDIES = 3
_SMALL_BYTES = 1 << 30
"""Need of a worker below which unknown memory is not worth a warning: Ray itself takes about as much on a node."""


def preparation_problem(spec: JobSpec, largest: LargestRead | None, nodes: Sequence[NodeRoom]) -> Problem | None:
    """Return the problem of a cluster on which no task that prepares data has enough memory; None if there is none."""
    least, most = task_bytes(spec), task_bytes(spec, largest)
    if not no_preparation(most, nodes):
        return None
    room = format_bytes(max(node.host for node in nodes if node.host is not None))
    needs = f"needs about {{}} of host memory, and no node has more than {room} for workers"
    if largest is None or no_preparation(least, nodes):
        message = f"a task that prepares the data {needs.format(format_bytes(least))}; add a node with more memory"
        return Problem("/data", message)
    part, remedy = _describe(largest)
    message = f"{largest.file} has {part}, for which preparation {needs.format(format_bytes(most))}; {remedy}"
    return Problem(largest.pointer, message)


def _describe(largest: LargestRead) -> tuple[str, str]:
    """Return the large part of a file in words, and a remedy."""
    if largest.group_bytes > largest.row_bytes:
        return f"rows that take {format_bytes(largest.batch)} where they are decoded together", "write shorter rows"
    if largest.format == "text":
        return f"{format_bytes(largest.row)} of text, which are one row", "split the file, or write JSON lines"
    kind = "a line" if largest.format == "jsonl" else "rows"
    return f"{kind} of {format_bytes(largest.row)}", "write shorter rows"


def memory_warnings(job: AnyJobSpec, plan: Plan, largest: LargestRead | None, nodes: Sequence[NodeRoom]) -> list[str]:
    """Return the warnings about the memory of a job at its largest size: unknown, likely too small, or crowded."""
    spec = job.run
    needs = certain_needs(spec, plan)
    most = max(needs, key=lambda need: (need.device_bytes, need.host_bytes))
    on_gpu = bool(spec.scaling.resources_per_worker.get("GPU"))
    small = max(most.host_bytes, most.device_bytes) < _SMALL_BYTES
    if not small and any(unknown_memory(spec, need, nodes) for need in needs):
        sizes = [describe_terms(most, on_device=False)]
        sizes += [describe_terms(most, on_device=True)] if on_gpu else []
        return [
            "the memory of the nodes is not known, so the model may not fit: each worker needs at least "
            f"{' and '.join(sizes)}"
        ]
    crowded = _crowded(task_bytes(spec, largest), nodes)
    return [*_likely(job, plan, nodes), *crowded, *_unseen(largest, nodes), *_tokenizer(spec, largest, nodes)]


def _likely(job: AnyJobSpec, plan: Plan, nodes: Sequence[NodeRoom]) -> list[str]:
    """Return a warning if a step needs more than the nodes have, by the estimate or in the default layout."""
    spec = job.run
    need = estimated_need(spec, plan)
    less = [replace(one, host=None if one.host is None else max(one.host - one.object_store, 0)) for one in nodes]
    if not fits(spec, need, less):
        on_gpu = bool(need.device) and fits(spec, replace(need, device=()), less)
        changes = memory_remedies(job, "device" if on_gpu else "host", plan.shape)
        remedies = "; ".join(changes[:_REMEDIES])
        return [
            f"a worker may run out of memory: {need.when}, each needs about {describe_terms(need, on_device=on_gpu)}, "
            f"beside {format_bytes(max(node.object_store for node in nodes))} for Ray's objects; remedies, cheapest "
            f"first: {remedies}"
        ]
    full = overfull_node(spec, need, less)
    if full is None:
        return []
    workers, host = full
    return [
        f"the layout puts {workers} workers with about {format_bytes(need.host_bytes)} each on a node with "
        f"{format_bytes(host)}, although the cluster has enough; add memory: {need.host_bytes} to "
        "scaling.resources_per_worker, so that they are placed by memory"
    ]


def _unseen(largest: LargestRead | None, nodes: Sequence[NodeRoom]) -> list[str]:
    """Return a warning if the files may have JSON lines, as yet unseen, for which no node has enough memory."""
    if largest is None or not no_preparation(largest.unseen_bytes, nodes):
        return []
    return [
        f"not all JSON lines were read: one of {format_bytes(largest.unseen)} would need about "
        f"{format_bytes(largest.unseen_bytes)} of host memory in preparation, and no node has as much for workers"
    ]


def _tokenizer(spec: JobSpec, largest: LargestRead | None, nodes: Sequence[NodeRoom]) -> list[str]:
    """Return a warning if no node may have enough memory to train a tokenizer."""
    about, most = tokenizer_bytes(spec, largest)
    if not no_preparation(most, nodes):
        return []
    return [
        f"training of a tokenizer takes about {format_bytes(about)} of host memory, and up to {format_bytes(most)} if "
        "words hardly repeat; no node has as much for workers: name a tokenizer in model.tokenizer"
    ]


def _crowded(task: int, nodes: Sequence[NodeRoom]) -> list[str]:
    crowded = crowded_preparation(task, nodes)
    if crowded is None:
        return []
    tasks, host = crowded
    return [
        f"preparation runs up to {tasks} tasks of about {format_bytes(task)} on a node with "
        f"{format_bytes(host)} for workers, and Ray ends and repeats tasks that do not fit; give Ray fewer CPUs there"
    ]
