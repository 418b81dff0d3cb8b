"""Planning by pure arithmetic: mesh, batches and steps, memory, and placement on nodes. Torch-free."""

from train_loop.plan.batch import START, BatchPlan, Origin, check_schedule, plan_batch, plan_samples, plan_steps
from train_loop.plan.data_facts import LargestRead, Preview, SampleCount
from train_loop.plan.devices import device_problems, forgotten_gpu
from train_loop.plan.fit import (
    WORKER_MEMORY_VARIABLE,
    NodeRoom,
    certain_needs,
    crowded_preparation,
    estimated_need,
    fits,
    no_preparation,
    overfull_node,
    task_bytes,
    unknown_memory,
)
from train_loop.plan.layout import (
    AUTOSCALED_VARIABLE,
    Capacity,
    lay_out,
    list_ranks,
    missing_places,
    no_place,
    splits,
    why_no_data_cpu,
    why_split,
)
from train_loop.plan.memory import MASK_BYTES, MemoryTerm, chunk_rows, mask_bytes
from train_loop.plan.mesh import MeshPlan, groups_across_hosts, plan_mesh
from train_loop.plan.plan import Plan, plan_job, plan_sizes
from train_loop.plan.remedies import memory_advice, memory_remedies, memory_terms
from train_loop.plan.reserve import reservation_problem, reservations
from train_loop.plan.resources import (
    DATA_CPUS,
    data_starves,
    describe_amount,
    format_amount,
    format_bytes,
    needed,
    too_big,
)
from train_loop.plan.savings import cheapest_change, describe_terms, memory_problem, plans_that_fit
from train_loop.plan.shape import NEEDED, ModelShape, ParameterCounts, read_shape
from train_loop.plan.tree import ReductionTree, allowed_workers, shards_of

__all__ = [
    "AUTOSCALED_VARIABLE",
    "DATA_CPUS",
    "MASK_BYTES",
    "NEEDED",
    "START",
    "WORKER_MEMORY_VARIABLE",
    "BatchPlan",
    "Capacity",
    "LargestRead",
    "MemoryTerm",
    "MeshPlan",
    "ModelShape",
    "NodeRoom",
    "Origin",
    "ParameterCounts",
    "Plan",
    "Preview",
    "ReductionTree",
    "SampleCount",
    "allowed_workers",
    "certain_needs",
    "cheapest_change",
    "check_schedule",
    "chunk_rows",
    "crowded_preparation",
    "data_starves",
    "describe_amount",
    "describe_terms",
    "device_problems",
    "estimated_need",
    "fits",
    "forgotten_gpu",
    "format_amount",
    "format_bytes",
    "groups_across_hosts",
    "lay_out",
    "list_ranks",
    "mask_bytes",
    "memory_advice",
    "memory_problem",
    "memory_remedies",
    "memory_terms",
    "missing_places",
    "needed",
    "no_place",
    "no_preparation",
    "overfull_node",
    "plan_batch",
    "plan_job",
    "plan_mesh",
    "plan_samples",
    "plan_sizes",
    "plan_steps",
    "plans_that_fit",
    "read_shape",
    "reservation_problem",
    "reservations",
    "shards_of",
    "splits",
    "task_bytes",
    "too_big",
    "unknown_memory",
    "why_no_data_cpu",
    "why_split",
]
