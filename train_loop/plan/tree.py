"""The order in which an `any_size` run sums the gradients of a step: a tree that no number of ranks changes. Pure.

The leaves are a step's micro-batches. A step has `max_replicas` x `turns` x `max_shards` of them: pairs are summed
within the shards, then turns one after another, then pairs of replicas. A smaller mesh computes the same sums: each of
its ranks sums whole subtrees.
"""

from dataclasses import dataclass

from train_loop.plan.mesh import MeshPlan, one_of
from train_loop.spec import JobSpec, Problem


@dataclass(frozen=True)
class ReductionTree:
    """The tree of a step's sums; sizes count data-parallel ranks."""

    max_shards: int
    max_replicas: int
    leaves: int
    """Micro-batches in an optimizer step."""

    @property
    def turns(self) -> int:
        """Return how many groups of `max_shards` micro-batches each replica sums one after another."""
        return self.leaves // (self.max_shards * self.max_replicas)

    def holds(self, mesh: MeshPlan) -> bool:
        """Return whether a mesh sums whole subtrees."""
        return self.max_shards % shards_of(mesh) == 0 and self.max_replicas % mesh.ddp == 0

    def merges(self, mesh: MeshPlan) -> list[int]:
        """Return, for each micro-batch of a rank, how many of its partial sums the micro-batch completes.

        The newest partial sum is added first.
        """
        within, across = self.max_shards // shards_of(mesh), self.max_replicas // mesh.ddp
        found = []
        for number in range(within * self.turns * across):
            rest, place = divmod(number, within)
            replica, turn = divmod(rest, self.turns)
            count = _trailing_ones(place)
            if place == within - 1:
                count += turn > 0
                if turn == self.turns - 1:
                    count += _trailing_ones(replica)
            found.append(count)
        return found

    def partial_sums(self, mesh: MeshPlan) -> int:
        """Return the largest number of partial sums that a rank keeps at once, in addition to the newest."""
        within = (self.max_shards // shards_of(mesh)).bit_length() - 1
        across = (self.max_replicas // mesh.ddp).bit_length() - 1
        return within + (self.turns > 1) + across


def shards_of(mesh: MeshPlan) -> int:
    """Return the data-parallel ranks in a shard group; Ulysses peers count once."""
    return max(mesh.fsdp // mesh.sp, 1)


def plan_tree(spec: JobSpec, mesh: MeshPlan) -> tuple[ReductionTree | None, list[Problem]]:
    """Return the tree of an `any_size` job, and the problems of its size; None for other jobs."""
    given = spec.reduction_tree
    if given is None:
        return None, []
    per_step, size = spec.training.global_batch_size, spec.training.micro_batch
    assert per_step is not None, "the spec requires global_batch_size for any_size"
    tree = ReductionTree(given.max_shards, given.max_replicas, per_step // size)
    problems, unit = [], given.max_shards * given.max_replicas * size
    if per_step % unit:
        fits = max(per_step // unit, 1) * unit
        problems.append(
            Problem(
                "/training/global_batch_size",
                f"global_batch_size={per_step} is not a multiple of per_device_train_batch_size={size} x "
                f"{given.max_shards} shards x {given.max_replicas} replicas of the reduction tree; choose {fits} or "
                f"{fits + unit}, or a smaller reduction_tree",
            )
        )
    if not tree.holds(mesh):
        problems.append(
            Problem(
                "/scaling/num_workers",
                f"num_workers={mesh.world} makes {_count(mesh.ddp, 'replica')} of {_count(shards_of(mesh), 'shard')}, "
                f"which the reduction tree of {_count(given.max_replicas, 'replica')} and "
                f"{_count(given.max_shards, 'shard')} does not allow; choose {one_of(allowed_workers(spec, tree))}",
            )
        )
    return tree, problems


def allowed_workers(spec: JobSpec, tree: ReductionTree) -> list[int]:
    """Return the numbers of workers on whose meshes the tree holds, ascending."""
    sp, fixed = spec.strategy.ulysses_size, spec.strategy.shards
    shards, replicas = _powers(tree.max_shards), _powers(tree.max_replicas)
    if spec.strategy.sharding_strategy == "NO_SHARD":
        return [sp * count for count in replicas]
    if fixed <= 1:
        return [sp * count for count in shards]
    # At most fsdp_size workers are one shard group, more are replicas of such groups.
    alone = [sp * count for count in shards if sp * count <= fixed]
    several = [fixed * count for count in replicas if count > 1] if fixed // sp in shards else []
    return [*alone, *several]


def _trailing_ones(number: int) -> int:
    return (~number & (number + 1)).bit_length() - 1


def _powers(most: int) -> list[int]:
    """Return the powers of two up to a power of two."""
    return [1 << power for power in range(most.bit_length())]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
