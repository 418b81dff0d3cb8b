"""Explicit placement: `lay_out` chooses the node of each rank, and Ray Train uses these nodes.

Ray's PACK and SPREAD ignore groups of peers and choose nodes by their load, so that a plan cannot predict them.
A label selector on each bundle of the placement group fixes its node; rank r gets bundle r.
"""

import time
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from ray.train.v2._internal.exceptions import WorkerGroupStartupTimeoutError
from ray.train.v2._internal.execution.callback import WorkerGroupCallback

from train_loop.plan import AUTOSCALED_VARIABLE, lay_out, missing_places, splits
from train_loop.ray_train import raylet
from train_loop.spec import ScalingSpec

Nodes = Mapping[str, Mapping[str, float]]
"""Resources by node id."""
NODE_ID = "ray.io/node-id"
_SETTLE_SECONDS = 3.0
"""Seconds to wait for the resources of the previous group, if they improve the layout."""
_POLL_SECONDS = 0.25


def autoscaled(environment: Mapping[str, str]) -> bool:
    """Return whether nodes may join on demand: the operator set a limit, or Ray's autoscaler reports node types."""
    return bool(environment.get(AUTOSCALED_VARIABLE)) or raylet.grows()


class Placement(WorkerGroupCallback):  # type: ignore[misc]
    """Callback of Ray Train that chooses the node of each rank whenever a worker group starts.

    If no layout fits, it waits up to `timeout` seconds; then Ray Train retries. With `autoscaled` it leaves the choice
    to Ray, because only a pending placement group makes the cluster grow.
    """

    def __init__(
        self, scaling: ScalingSpec, *, group: int, whole: int = 1, autoscaled: bool = False, timeout: float = 60.0
    ) -> None:
        self._scaling, self._group, self._whole = scaling, group, whole
        self._autoscaled, self._timeout = autoscaled, timeout

    def before_worker_group_start(self, worker_group_context: Any) -> None:
        """Choose the nodes; called by Ray Train's controller before it creates the placement group."""
        workers, each = worker_group_context.num_workers, worker_group_context.resources_per_worker
        scaling = self._scaling.model_copy(update={"num_workers": workers, "resources_per_worker": dict(each)})
        nodes = self.choose(scaling)
        if nodes is not None:
            # Ray Train has no public way to set the selector of each worker this late.
            object.__setattr__(worker_group_context, "label_selector", [{NODE_ID: node} for node in nodes])

    def choose(self, scaling: ScalingSpec) -> list[str] | None:
        """Return the node of each rank, or None to leave the choice to Ray.

        Raises WorkerGroupStartupTimeoutError if the nodes have no room within the timeout.
        """
        unreachable = set[str]()
        for waited in _ticks():
            total, free = self._usable_nodes()
            unreachable = self.unreachable(unreachable)
            free = {node: has for node, has in free.items() if node not in unreachable}
            doubtful = self.doubtful()
            trusted = {node: has for node, has in free.items() if node not in doubtful}
            if len(trusted) < len(free) and self._lay_out(scaling, trusted) is not None:
                free = trusted
            ranks = self._lay_out(scaling, free)
            settled = waited >= _SETTLE_SECONDS
            if ranks is not None and (settled or self._splits(ranks) <= self._least(scaling, total)):
                names = list(free)
                chosen = [names[node] for node, mine in ranks.items() for _ in mine]
                # Ray lists a node for some seconds after its host has died, and would wait a minute for it.
                found = self.unreachable({*chosen})
                if not found:
                    return chosen
                unreachable |= found
            elif ranks is None and settled and self._autoscaled:
                return None
            if waited >= self._timeout:
                break
            if ranks is None and settled:
                self.waiting(missing_places(scaling, list(free.values())), unreachable)
        raise WorkerGroupStartupTimeoutError(num_workers=scaling.world)

    def avoided(self) -> Collection[str]:
        """Return ids of nodes to exclude, in addition to draining nodes. Subclasses override it."""
        return ()

    def unreachable(self, nodes: Collection[str]) -> set[str]:
        """Return those of the nodes, by id, that do not answer."""
        return raylet.unreachable(nodes)

    def doubtful(self) -> Collection[str]:
        """Return ids of nodes to use only if the others have no room. Subclasses override it."""
        return ()

    def waiting(self, missing: str, unreachable: Collection[str]) -> None:
        """Report missing capacity, and ids of nodes that do not answer. Subclasses override it.

        It is called several times a second while nodes have no room.
        """

    def _lay_out(self, scaling: ScalingSpec, nodes: Nodes) -> dict[int, range] | None:
        return lay_out(scaling, list(nodes.values()), group=self._group, whole=self._whole)

    def _splits(self, ranks: Mapping[int, range]) -> tuple[int, int]:
        """Return the numbers of groups of peers, and of shard groups, that cross hosts."""
        return splits(ranks, self._group), splits(ranks, self._whole)

    def _least(self, scaling: ScalingSpec, total: Nodes) -> tuple[int, int]:
        """Return the numbers of groups that must cross hosts even on empty nodes."""
        ranks = self._lay_out(scaling, total)
        return (0, 0) if ranks is None else self._splits(ranks)

    def _usable_nodes(self) -> tuple[Nodes, Nodes]:
        """Return the total and the free resources of the usable nodes."""
        return raylet.usable(self.avoided())


def _ticks() -> Iterator[float]:
    """Yield the seconds since the first tick, every 0.25 s."""
    begun = time.monotonic()
    while True:
        yield time.monotonic() - begun
        time.sleep(_POLL_SECONDS)
