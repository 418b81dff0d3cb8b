"""The number and order of workers on each node, so that groups of peers stay on one host. Pure.

Peers have the same samples: they share sequences (Ulysses) or layers (tensor parallelism). Ranks are contiguous per
node, and each group of peers is `group` consecutive ranks.
"""

from collections.abc import Callable, Sequence

Arrangement = list[tuple[int, int]]
"""Pairs of a node's index and its number of workers, in rank order."""
_STARTS = 8
"""Maximum number of nodes to try as the first, for clusters that cannot hold every group whole."""


def arrange(places: Sequence[int], world: int, *, strategy: str, group: int, whole: int = 1) -> Arrangement | None:
    """Return the workers of each node, or None if the nodes cannot hold them.

    `places` is the number of workers that each node has room for. PACK and SPREAD split as few groups as possible over
    nodes, and none of `whole` workers if that is possible. Then PACK takes the fewest nodes, and SPREAD gives the nodes
    equal numbers of groups.
    """
    if strategy == "STRICT_PACK":
        alone = min(((count, node) for node, count in enumerate(places) if count >= world), default=None)
        return None if alone is None else [(alone[1], world)]
    if strategy == "STRICT_SPREAD":
        apart = [node for node, count in enumerate(places) if count][:world]
        return [(node, 1) for node in apart] if len(apart) == world else None
    if sum(places) < world:
        return None
    for size in (whole, group) if group < whole < world else (group,):
        units = [count // size for count in places]
        if world % size == 0 and sum(units) >= world // size:
            counts = (_pack if strategy == "PACK" else _spread)(units, world // size)
            return [(node, count * size) for node, count in counts]
    return _chain(places, world, group)


def count_splits(arrangement: Arrangement, group: int) -> int:
    """Return the number of groups of peers that span several nodes."""
    first, whole = 0, 0
    for _, count in arrangement:
        last = first + count
        whole += max(0, last // group - -(-first // group))
        first = last
    return -(-first // group) - whole


def _pack(units: Sequence[int], wanted: int) -> Arrangement:
    """Fill the largest nodes, then place the rest on the smallest node that holds it."""
    found: Arrangement = []
    left = _largest_first(units)
    while wanted:
        fits = [pair for pair in left if pair[0] >= wanted]
        count, node = min(fits) if fits else left[0]
        left.remove((count, node))
        found.append((node, min(count, wanted)))
        wanted -= min(count, wanted)
    return found


def _spread(units: Sequence[int], wanted: int) -> Arrangement:
    """Give every node the same number of units, or all that it holds if that is less."""
    level = next(n for n in range(1, wanted + 1) if sum(min(count, n) for count in units) >= wanted)
    counts = [min(count, level) for count in units]
    full = [node for node, count in enumerate(counts) if count == level]
    surplus = sum(counts) - wanted
    # The level is the lowest that suffices, so more nodes reach it than there are surplus units.
    for node in full[len(full) - surplus :]:
        counts[node] -= 1
    return [(node, count) for count, node in _largest_first(counts)]


def _largest_first(counts: Sequence[int]) -> list[tuple[int, int]]:
    """Return (count, index) of all counts above 0, largest first; the index breaks ties."""
    return sorted(((n, node) for node, n in enumerate(counts) if n), key=lambda pair: (-pair[0], pair[1]))


def _chain(places: Sequence[int], world: int, group: int) -> Arrangement:
    """Join nodes that cannot hold every group whole, so that few groups are split.

    If a node's workers are not a multiple of the group, the next node completes the group of its last ranks.
    """
    least = -(-world // group) - sum(count // group for count in places)
    first = {count: node for node, count in reversed([*enumerate(places)]) if count}
    found = _Chain(places, world, group).build()
    # The greedy order is optimal except for a few clusters, where another first node helps.
    for node in sorted(first.values())[:_STARTS]:
        if count_splits(found, group) > least:
            other = _Chain(places, world, group).build(node)
            found = min(found, other, key=lambda chain: (count_splits(chain, group), len(chain)))
    return found


class _Chain:
    """An order of nodes, built step by step."""

    def __init__(self, places: Sequence[int], world: int, group: int) -> None:
        self._left = {node: count for node, count in enumerate(places) if count}
        self._world, self._group = world, group
        self._room, self._filled = sum(places), 0

    def build(self, first: int | None = None) -> Arrangement:
        """Add one node after another, each time the node that splits the fewest groups; start with `first` if given."""
        found: Arrangement = []
        while self._filled < self._world:
            node = self._next() if found or first is None else first
            count = self._left.pop(node)
            self._room -= count
            count = self._trimmed(min(count, self._world - self._filled))
            self._filled += count
            found.append((node, count))
        return found

    def _next(self) -> int:
        missing = -self._filled % self._group
        return min(self._left, key=self._completes(missing) if missing else self._begins)

    def _trimmed(self, count: int) -> int:
        """Return a node's workers, without those of a group that would cross to the next node.

        Leaves these places empty only if the other nodes hold the rest.
        """
        aligned = count - (self._filled + count) % self._group
        return aligned if aligned > 0 and self._room >= self._world - self._filled - aligned else count

    def _begins(self, node: int) -> tuple[int, ...]:
        """Return a node's sort key at the start of a group.

        The order is: no ragged end, then an end that may stay empty, then a long ragged end.
        """
        count, tail = self._left[node], self._left[node] % self._group
        may_trim = self._room - count >= self._world - self._filled - (count - tail)
        ragged = tail if may_trim or not tail else self._group - tail
        return (count < self._group, ragged, -count, node)

    def _completes(self, missing: int) -> Callable[[int], tuple[int, ...]]:
        """Return the sort key of nodes inside a group.

        The order is: fewest whole groups lost to it, then whether it is completed, then the remainder.
        """

        def key(node: int) -> tuple[int, ...]:
            count = self._left[node]
            lost = count // self._group - max(count - missing, 0) // self._group
            remains = (count - missing) % self._group if count >= missing else -count
            return (lost, count < missing, remains, -count, node)

        return key
