"""The whole plan of a job, or all problems that prevent one."""

import itertools
import math
from dataclasses import dataclass

from train_loop.plan.batch import BatchPlan, plan_batch
from train_loop.plan.memory.estimate import averaged_bytes
from train_loop.plan.memory.term import MemoryTerm
from train_loop.plan.memory.worker import inference_terms, training_terms
from train_loop.plan.mesh import MeshPlan, check_efsdp, check_reshard, divisors, one_of, plan_mesh
from train_loop.plan.model.shape import ModelShape
from train_loop.plan.plan_warnings import plan_warnings
from train_loop.plan.tree import ReductionTree, plan_tree
from train_loop.spec import AnyJobSpec, JobSpec, Problem, SpecError


@dataclass(frozen=True)
class Plan:
    """Plan of a spec, computed without reading data."""

    mesh: MeshPlan
    batch: BatchPlan
    shape: ModelShape
    memory: tuple[MemoryTerm, ...]
    warnings: tuple[str, ...]
    tree: ReductionTree | None = None
    """The order of sums of an `any_size` job; None for other jobs."""
    averaged: int = 0
    """Bytes per worker of averaged weights, which checkpoints have besides the trained ones."""

    @property
    def memory_bytes(self) -> int:
        """Return the estimated bytes per worker in the memory in which the model computes."""
        return sum(term.bytes for term in self.memory if term.place == "device")

    @property
    def checkpoint_bytes(self) -> int:
        """Return the estimated bytes of a checkpoint over all ranks."""
        held = sum(term.bytes for term in self.memory if term.name in ("parameters", "optimizer", "ema"))
        return self.mesh.fsdp * self.mesh.tp * (held + self.averaged)

    @property
    def host_memory_bytes(self) -> int:
        """Return the estimated bytes per worker in host memory, in addition to a GPU."""
        return sum(term.bytes for term in self.memory if term.place == "host")


def plan_job(job: AnyJobSpec, shape: ModelShape) -> Plan:
    """Plan a job by pure arithmetic. Raises SpecError with every rule that the spec breaks."""
    spec = job.run
    problems = [*_ulysses_problems(spec, shape), *_parts_problems(spec), *_stop_problems(spec, shape)]
    try:
        mesh = mesh_of(spec)
        tree, unfit = plan_tree(spec, mesh)
        problems += unfit
        batch = plan_batch(spec.training, dp=mesh.dp)
    except ValueError as error:
        field = str(error).partition("=")[0]
        problems.append(
            Problem(f"/training/{field}" if field == "global_batch_size" else f"/strategy/{field}", str(error))
        )
    if problems:
        raise SpecError(problems)
    memory = training_terms(spec, shape, mesh, tree) if job.trains else inference_terms(spec, shape, mesh)
    averaged = averaged_bytes(spec, shape.shared(tp=mesh.tp, ep=mesh.ep), mesh) if job.trains else 0
    return Plan(mesh, batch, shape, memory, plan_warnings(spec, shape), tree, averaged)


def mesh_of(spec: JobSpec) -> MeshPlan:
    """Plan the mesh of a spec at a chosen size. Raises ValueError with the rule that it breaks."""
    strategy = spec.strategy
    mesh = plan_mesh(
        world=spec.scaling.world,
        fsdp_size=strategy.shards,
        ulysses_size=strategy.ulysses_size,
        tp_size=strategy.tp_size,
        ep_size=strategy.ep_size,
        sharded=strategy.sharding_strategy != "NO_SHARD",
    )
    check_reshard(strategy.reshard_after_forward, mesh)
    check_efsdp(strategy.efsdp_size, mesh)
    return mesh


def allows_size(spec: JobSpec, setting: str, size: int) -> bool:
    """Return whether mesh, batch and reduction tree of a job allow a smaller size of a setting.

    The setting is num_workers, ep_size, or that of the job's peers: tp_size, ulysses_size, or tp_size x ulysses_size.
    """
    tp, sp = spec.strategy.tp_size, spec.strategy.ulysses_size
    if setting == "num_workers":
        return _divides(spec.at(size))
    if setting == "ep_size":
        return _fits(spec, {"ep_size": size})
    parts = (part for part in divisors(math.gcd(size, tp)) if sp % (size // part) == 0)
    return any(_fits(spec, {"tp_size": part, "ulysses_size": size // part}) for part in parts)


def fitting_sizes(spec: JobSpec) -> dict[str, int] | None:
    """Return the sizes of a strategy that must change for its number of workers, with their values; None if none fit.

    As few as possible change, each to a divisor as large as possible.
    """
    strategy = spec.strategy
    given = {name: getattr(strategy, name) for name in ("fsdp_size", "tp_size", "ulysses_size", "ep_size")}
    smaller = ([size, *divisors(size)[-2::-1]] for size in given.values())
    choices = [dict(zip(given, sizes, strict=True)) for sizes in itertools.product(*smaller)]
    if strategy.efsdp_size:
        choices += [{**one, "efsdp_size": 0} for one in choices]
        given["efsdp_size"] = strategy.efsdp_size
    changes = ({name: size for name, size in one.items() if size != given[name]} for one in choices)
    fitting = [one for one in changes if _fits(spec, one)]
    return min(fitting, key=lambda one: (len(one), [-size for size in one.values()]), default=None)


def _fits(spec: JobSpec, sizes: dict[str, int]) -> bool:
    """Return whether a job's workers make a mesh with other sizes of its strategy."""
    strategy = spec.strategy.model_copy(update=sizes)
    # Workers that share the layers of a mixture share its experts, too.
    shares = spec.strategy.ep_size == 1 or strategy.ep_size % strategy.tp_size == 0
    return shares and _divides(spec.model_copy(update={"strategy": strategy}))


def _divides(spec: JobSpec) -> bool:
    """Return whether a job's workers make a mesh that divides its batch."""
    try:
        mesh = mesh_of(spec)
        plan_batch(spec.training, dp=mesh.dp)
        return not plan_tree(spec, mesh)[1]
    except ValueError:
        return False


def plan_sizes(spec: AnyJobSpec, shape: ModelShape) -> dict[int, Plan]:
    """Return the plan for every number of workers that a job can run with, ascending; one if it is not elastic.

    Raises SpecError if there is none, with the rules that the largest number breaks.
    """
    fewest, most = spec.scaling.bounds
    plans: dict[int, Plan] = {}
    broken: list[Problem] = []
    for workers in range(fewest, most + 1):
        try:
            plans[workers] = plan_job(spec.at(workers), shape)
        except SpecError as error:
            broken = error.problems
    if plans:
        return plans
    if spec.scaling.elastic:
        none = f"no number of workers from {fewest} to {most} fits the strategy and the batch size"
        broken = [Problem(one.pointer, f"{none}; with {most}: {one.message}") for one in broken]
    raise SpecError(broken)


def _ulysses_problems(spec: JobSpec, shape: ModelShape) -> list[Problem]:
    sp, length = spec.strategy.ulysses_size, spec.data.sequence_length
    if spec.code is not None:
        # Only its batches and its model show which axes can be split.
        return []
    found = []
    if shape.heads % sp:
        found.append(
            f"ulysses_size={sp} does not divide num_attention_heads={shape.heads}; "
            f"choose {one_of(divisors(shape.heads))}"
        )
    elif shape.kv_heads % sp and sp % shape.kv_heads:
        fits = [d for d in divisors(shape.heads) if shape.kv_heads % d == 0 or d % shape.kv_heads == 0]
        found.append(
            f"ulysses_size={sp} neither divides nor is a multiple of num_key_value_heads={shape.kv_heads}; "
            f"choose {one_of(fits)}"
        )
    if length % sp:
        found.append(
            f"ulysses_size={sp} does not divide sequence_length={length}; "
            f"choose a multiple of {sp}, for example {length + sp - length % sp}"
        )
    return [Problem("/strategy/ulysses_size", message) for message in found]


def _parts_problems(spec: JobSpec) -> list[Problem]:
    """Return the problem of sequences that the workers which share layers cannot split evenly."""
    strategy, length = spec.strategy, spec.data.sequence_length
    parts = strategy.peers
    if not strategy.sequence_parallel or length % parts == 0:
        return []
    message = (
        f"sequence_parallel splits sequence_length={length} into {strategy.name_of_peers}={parts} parts, and they do "
        f"not divide it; choose a multiple of {parts}, for example {length + parts - length % parts}"
    )
    return [Problem("/strategy/sequence_parallel", message)]


def _stop_problems(spec: JobSpec, shape: ModelShape) -> list[Problem]:
    """Return the problem of tokens that are to end rows, and that the model does not have."""
    absent = [] if spec.infer is None else [n for n in spec.infer.generation.stop_tokens or () if n >= shape.vocab]
    pointer = "/infer/generation/stop_tokens"
    return [
        Problem(pointer, f"token {token} is outside of the model's vocabulary of {shape.vocab}; remove it")
        for token in absent
    ]
