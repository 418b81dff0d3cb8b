"""Changes of a spec with which its workers fit a device, cheapest first. Pure.

Every change keeps the global batch. The cheapest keep results and hardware, and cost the least throughput.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, product

from train_loop.plan.forecast.devices import Device
from train_loop.plan.forecast.fit import DeviceFit, fit_on
from train_loop.plan.forecast.speed import Throughput, throughput_on
from train_loop.plan.mesh import divisors
from train_loop.plan.model.shape import ModelShape
from train_loop.plan.plan import Plan, plan_job
from train_loop.plan.remedies import can_select, may_split_states
from train_loop.plan.savings import Patch, describe_patch, merge_patches
from train_loop.spec import MOST_WORKERS, JobSpec, ModelSpec, SpecError, override

_TOGETHER = 3
"""Maximum number of changes that a suggestion combines."""
_LISTED = 5
_HALVINGS = 3
"""Values that a size is tried with, each half or twice the one before."""


@dataclass(frozen=True)
class Choice:
    """A setting with the values to try, the mildest first."""

    patches: tuple[Patch, ...]
    changes_results: bool = False
    """True if the run's numbers change by more than the order of sums."""


@dataclass(frozen=True)
class Suggestion:
    """A change with which a plan fits, and its results."""

    patch: Patch
    fit: DeviceFit
    throughput: Throughput | None
    changes_results: bool
    workers: int

    def __str__(self) -> str:
        return describe_patch(self.patch)


def suggest(spec: JobSpec, shape: ModelShape, device: Device) -> list[Suggestion]:
    """Return the changes with which a spec fits a device, cheapest first; empty if it fits.

    No change contains another one.
    """
    spec = spec.at(spec.scaling.bounds[1])
    plan = plan_job(spec, shape)
    if fit_on(spec, plan, device).verdict == "fits":
        return []
    choices = list(_choices(spec, plan))
    found, sets = list[Suggestion](), list[set[int]]()
    for count in range(1, _TOGETHER + 1):
        for numbers in combinations(range(len(choices)), count):
            if any(one <= set(numbers) for one in sets):
                continue
            if suggestion := _first_fit(spec, shape, device, [choices[number] for number in numbers]):
                found.append(suggestion)
                sets.append(set(numbers))
    return sorted(found, key=_cost)[:_LISTED]


def largest_micro_batch(spec: JobSpec, shape: ModelShape, device: Device) -> int | None:
    """Return the largest per_device_train_batch_size that fits a device at the same global batch; None if none does."""
    spec = spec.at(spec.scaling.bounds[1])
    batch = plan_job(spec, shape).batch
    kept = _kept_batch(spec, batch.global_batch)
    for size in reversed(divisors(batch.per_data_rank)):
        planned = _planned(spec, shape, {"training": {"per_device_train_batch_size": size, **kept}})
        if planned is not None and fit_on(*planned, device).verdict == "fits":
            return size
    return None


def _kept_batch(spec: JobSpec, size: int) -> dict[str, int | None]:
    """Return the fields that keep the global batch if micro-batches or workers change; empty if the spec has it."""
    if spec.training.global_batch_size is not None:
        return {}
    return {"global_batch_size": size, "gradient_accumulation_steps": None}


def _cost(suggestion: Suggestion) -> tuple[bool, int, float]:
    speed = suggestion.throughput
    return suggestion.changes_results, suggestion.workers, -speed.typical if speed is not None else 0.0


def _first_fit(spec: JobSpec, shape: ModelShape, device: Device, chosen: Sequence[Choice]) -> Suggestion | None:
    """Return the mildest values of settings with which a spec fits; None if none does."""
    for patches in product(*(choice.patches for choice in chosen)):
        patch = merge_patches(patches)
        if (planned := _planned(spec, shape, patch)) is None:
            continue
        changed, plan = planned
        if (fit := fit_on(changed, plan, device)).verdict == "fits":
            changes = any(choice.changes_results for choice in chosen)
            return Suggestion(patch, fit, throughput_on(changed, plan, device), changes, plan.mesh.world)
    return None


def _planned(spec: JobSpec, shape: ModelShape, patch: Patch) -> tuple[JobSpec, Plan] | None:
    try:
        changed = override(spec, patch)
        return changed, plan_job(changed, shape)
    except SpecError:
        return None


def _choices(spec: JobSpec, plan: Plan) -> Iterator[Choice]:
    """Yield the settings that save memory of a GPU."""
    model, training, strategy, world = spec.model, spec.training, spec.strategy, spec.scaling.world
    kept = _kept_batch(spec, plan.batch.global_batch)
    size, doubles = training.micro_batch, [1 << power for power in range(1, _HALVINGS + 1)]
    if sizes := [size // by for by in doubles if size % by == 0]:
        yield Choice(tuple({"training": {"per_device_train_batch_size": one, **kept}} for one in sizes))
    simple: list[tuple[bool, Patch]] = [
        (training.chunked_loss is False, {"training": {"chunked_loss": True}}),
        (strategy.sharding_strategy == "NO_SHARD" and world > 1, {"strategy": {"sharding_strategy": "FULL_SHARD"}}),
        (strategy.reshard_after_forward is False, {"strategy": {"reshard_after_forward": True}}),
        (1 < strategy.shards < world, {"strategy": {"fsdp_size": 0}}),
        (may_split_states(spec), {"strategy": {"sequence_parallel": True}}),
        (not strategy.apply_tiled_mlp and plan.shape.can_tile, {"strategy": {"apply_tiled_mlp": True}}),
        (strategy.gradient_sync == "last", {"strategy": {"gradient_sync": "every"}}),
    ]
    yield from (Choice((patch,)) for helps, patch in simple if helps)
    if recompute := _stronger(model, selects=can_select(spec, plan.shape)):
        yield Choice(tuple({"model": {"gradient_checkpointing": mode}} for mode in recompute))
    if strategy.offload_policy is not True:
        levels: list[bool | str] = [True] if strategy.offload_policy else ["optimizer", True]
        yield Choice(tuple({"strategy": {"offload_policy": level}} for level in levels))
    yield Choice(tuple({"strategy": {"ulysses_size": strategy.ulysses_size * by}, "training": kept} for by in doubles))
    if training.optimizer == "adamw":
        yield Choice(({"training": {"optimizer": "adamw_8bit"}},), changes_results=True)
    if model.master_dtype == "fp32":
        yield Choice(({"model": {"master_dtype": "bf16"}},), changes_results=True)
    more = [world * by for by in doubles if world * by <= MOST_WORKERS]
    yield Choice(tuple({"scaling": {"num_workers": one}, "training": kept} for one in more))


def _stronger(model: ModelSpec, *, selects: bool) -> list[str]:
    """Return the kinds of recomputation that save more memory than the model's, the mildest first."""
    strongest, how = ["full"] if model.compile else ["full", "offload"], model.gradient_checkpointing
    kinds = ["selective", *strongest] if selects else strongest
    if how == "none":
        return kinds
    return kinds[kinds.index(how) + 1 :] if how in kinds else strongest
