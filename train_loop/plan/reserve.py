"""The host memory that each worker reserves where its node limits it to that: on an embedded Ray. Pure.

The reservations of all jobs together stay below the memory of the node, so that no number of jobs takes it down.
"""

from collections.abc import Mapping, Sequence

from train_loop.plan.data_facts import LargestRead
from train_loop.plan.fit import NodeRoom, certain_needs, estimated_need, task_bytes, tokenizer_bytes
from train_loop.plan.forecast.micro_batch import sized
from train_loop.plan.plan import Plan, plan_job
from train_loop.plan.resources import format_bytes
from train_loop.spec import AUTO, MEMORY, JobSpec, Problem

_HELPER_BYTES = 1536 * 2**20
"""Memory of a job's other processes: driver, controller, and tasks of Ray Data."""
_SPARE_BYTES = 320 * 2**20
"""Memory of a spare worker: 300 MiB were measured. Its resident 436 MiB include pages that all processes share."""
_MARGIN = 2
"""Factor of the estimated terms, which depend on the model's code and on kernels."""
_SHARE = 0.97
"""Maximum part of a node that is reserved beyond certain needs: a node may have less memory after an update."""
_UNIT = 64 * 2**20
"""Reservations are multiples of it."""


def reservations(
    spec: JobSpec, plans: Mapping[int, Plan], largest: LargestRead | None, nodes: Sequence[NodeRoom]
) -> dict[int, int]:
    """Return the bytes that each worker reserves, by number of workers; empty if no node limits its workers."""
    memory = max((node.host for node in nodes if node.limited and node.host is not None), default=None)
    if memory is None:
        return {}
    return {workers: _reservation(spec.at(workers), plan, largest, memory) for workers, plan in plans.items()}


def _reservation(spec: JobSpec, plan: Plan, largest: LargestRead | None, memory: int) -> int:
    """Return the bytes that each worker reserves: those of the spec, or the need, at most a share of the node."""
    if given := spec.scaling.resources_per_worker.get(MEMORY):
        return int(given)
    world, least = spec.scaling.world, certain_bytes(spec, plan)
    whole = _whole_share(spec, plan)
    estimated = estimated_need(*whole).host_bytes - certain_needs(*whole)[0].host_bytes
    wanted = least + _MARGIN * estimated + (_HELPER_BYTES + _spare_bytes(spec)) // world
    # The preparation of a job runs before its ranks.
    preparation = max(task_bytes(spec, largest), tokenizer_bytes(spec, largest)[0])
    wanted = max(wanted, -(-preparation // world))
    # A job that is alone always starts.
    return max(least, min(-(-wanted // _UNIT) * _UNIT, int(_SHARE * memory) // world))


def _whole_share(spec: JobSpec, plan: Plan) -> tuple[JobSpec, Plan]:
    """Return spec and plan of the largest micro-batch that workers may choose, unchanged for a number in the spec."""
    if spec.training.per_device_train_batch_size != AUTO:
        return spec, plan
    largest = sized(spec, plan.batch.per_data_rank)
    return largest, plan_job(largest, plan.shape)


def task_reservation(spec: JobSpec, largest: LargestRead | None) -> int:
    """Return the bytes that a task of preparation reserves: at most those of the job's workers, which start later.

    With a larger reservation, a task could wait until other jobs end.
    """
    return min(task_bytes(spec, largest), int(spec.scaling.resources_per_worker[MEMORY]) * spec.scaling.world)


def _spare_bytes(spec: JobSpec) -> int:
    return (spec.scaling.world + 1) * _SPARE_BYTES if spec.failure.spare_workers else 0


def certain_bytes(spec: JobSpec, plan: Plan) -> int:
    """Return the host memory that a worker needs for certain."""
    return max(need.host_bytes for need in certain_needs(spec, plan))


def reservation_problem(spec: JobSpec, plans: Mapping[int, Plan], nodes: Sequence[NodeRoom]) -> Problem | None:
    """Return the problem of a spec whose `memory` is less than its workers need on nodes that limit them to it."""
    given = spec.scaling.resources_per_worker.get(MEMORY)
    if not given or not plans or not any(node.limited for node in nodes):
        return None
    least = min(certain_bytes(spec.at(workers), plan) for workers, plan in plans.items())
    if given >= least:
        return None
    return Problem(
        "/scaling/resources_per_worker",
        f"memory: {given:.0f} is the limit of each worker on embedded Ray, and each needs at least {least} bytes "
        f"({format_bytes(least)}); raise it, or leave it out",
    )
