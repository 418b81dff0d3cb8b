"""Order of samples: a pure function of (seed, epoch, dataset), independent of world size.

A run takes positions 0, 1, 2 …; position p is the p mod N-th sample of epoch p // N. Shuffling is a keyed permutation,
computed only for the requested positions: a start at any position costs the same and keeps nothing in memory.

Weighted sources are mixed by a pattern that repeats every 10,000 positions. Each source has its own epochs: none of its
samples repeats before all of them have been used.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from train_loop.run_dir import DataPosition
from train_loop.spec.data import CYCLE

Ids = NDArray[np.int64]
PADDING = -1
"""Sample id of a row that fills up the last, short step; the row has no trained token."""

_ROUNDS = 6
_FEW = 4096
"""Maximum size to shuffle by sorting hashes: a Feistel network of few bits does not shuffle evenly."""
_U64 = np.uint64


@dataclass(frozen=True)
class Mixture:
    """The proportions of sources, in samples per 10,000 positions."""

    sizes: tuple[int, ...]
    """Number of samples in each source."""
    quotas: tuple[int, ...]

    @property
    def epoch(self) -> int:
        """Number of positions until every source has been read completely."""
        last = np.array(self.sizes) - 1
        cycles, places = np.divmod(last, np.array(self.quotas))
        pattern, before = _pattern(self.quotas)
        return 1 + max(
            int(cycles[source]) * CYCLE + int(np.flatnonzero((pattern == source) & (before == places[source]))[0])
            for source in range(len(self.sizes))
        )

    def at(self, positions: Ids) -> tuple[Ids, Ids]:
        """Return the source of each position, and the number of earlier positions with the same source."""
        pattern, before = _pattern(self.quotas)
        cycles, places = np.divmod(positions, CYCLE)
        sources = pattern[places]
        return sources, cycles * np.array(self.quotas)[sources] + before[places]


def mix(weights: Sequence[float], sizes: Sequence[int]) -> Mixture:
    """Return the mixture of sources in proportion to their weights, rounded to 1/10,000 (largest remainders)."""
    shares = np.array(weights) * (CYCLE / sum(weights))
    quotas = np.floor(shares).astype(np.int64)
    quotas[np.argsort(quotas - shares, kind="stable")[: CYCLE - quotas.sum()]] += 1
    assert quotas.all(), "the spec rejects weights that would never give a sample"
    return Mixture(tuple(sizes), tuple(quotas.tolist()))


@lru_cache(maxsize=4)
def _pattern(quotas: tuple[int, ...]) -> tuple[Ids, Ids]:
    """Return the source of each position of a cycle, evenly spread, and how many earlier positions have that source."""
    sources = np.repeat(np.arange(len(quotas)), quotas)
    before = np.concatenate([np.arange(quota) for quota in quotas])
    ideal = (before + 0.5) / np.array(quotas)[sources]
    spread = np.lexsort((sources, ideal))
    return sources[spread], before[spread]


@dataclass(frozen=True)
class Order:
    """The endless order of a dataset's samples; `end` limits it."""

    samples: int
    """Positions in an epoch: all samples, or with a mixture the positions until every source has been read once."""
    seed: int
    shuffle: bool
    dataset: str
    """Fingerprint of the prepared data."""
    end: int
    """First position of the padding."""
    mixture: Mixture | None = None

    def at(self, positions: Ids) -> Ids:
        """Return the sample ids at the given positions, PADDING past the end. The result has the shape of the input."""
        if self.mixture is None:
            ids = self._shuffled(positions, self.samples, self.dataset)
        else:
            ids = self._mixed(positions, self.mixture)
        return np.where(positions < self.end, ids, PADDING)

    def epochs(self, positions: Ids) -> Ids:
        """Return how often the sample of each position has been used before."""
        if self.mixture is None:
            return positions // self.samples
        sources, counts = self.mixture.at(positions)
        epochs: Ids = counts // np.array(self.mixture.sizes)[sources]
        return epochs

    def _mixed(self, positions: Ids, mixture: Mixture) -> Ids:
        ids = np.empty(positions.shape, np.int64)
        sources, counts = mixture.at(positions)
        for source in np.unique(sources):
            chosen, first = sources == source, sum(mixture.sizes[:source])
            ids[chosen] = first + self._shuffled(counts[chosen], mixture.sizes[source], f"{self.dataset}/{source}")
        return ids

    def _shuffled(self, counts: Ids, size: int, name: str) -> Ids:
        """Return, for each n in `counts`, the n-th sample of a source of `size` samples that repeats in epochs."""
        epochs, places = np.divmod(counts, size)
        if not self.shuffle:
            return places
        ids = np.empty(counts.shape, np.int64)
        for epoch in np.unique(epochs):
            seed = f"{self.seed}/{epoch}/{name}".encode()
            keys = np.frombuffer(hashlib.sha256(seed).digest() + hashlib.sha256(seed + b"+").digest(), _U64)[:_ROUNDS]
            ids[epochs == epoch] = permute(places[epochs == epoch], size, keys)
        return ids

    def position(self, consumed: int) -> DataPosition:
        """Return the position in the data after `consumed` samples."""
        epoch, samples = divmod(consumed, self.samples)
        return DataPosition(epoch=epoch, samples=samples)

    def consumed(self, position: DataPosition) -> int:
        """Return the number of samples before a position: the inverse of `position`."""
        return position.epoch * self.samples + position.samples


@dataclass(frozen=True)
class StepOrder:
    """The order as dealt to data-parallel ranks: a step takes the next `dp * per_rank` positions."""

    order: Order
    dp: int
    per_rank: int
    """Sequences per data-parallel rank and optimizer step."""
    micro_batch: int | None = None
    """Deal micro-batches of that many sequences to the ranks of a shard group in turn, as a reduction tree needs it;
    None: each rank takes consecutive sequences."""
    replicas: int = 1
    """Shard groups, each of which takes consecutive micro-batches."""

    @property
    def global_batch(self) -> int:
        """Sequences per optimizer step."""
        return self.dp * self.per_rank

    def steps_left(self, consumed: int) -> int:
        """Return the number of steps from a position to the end of the order; the last step may be short."""
        return -((consumed - self.order.end) // self.global_batch)

    def step(self, consumed: int) -> Ids:
        """Return the sample ids of the step that starts at a position. Shape [dp, per_rank]."""
        return self.order.at(consumed + self._places)

    def epochs(self, consumed: int) -> Ids:
        """Return the epoch of each sample of the step that starts at a position. Shape [dp, per_rank]."""
        return self.order.epochs(consumed + self._places)

    def rank_steps(self, consumed: int, steps: int, data_rank: int) -> Ids:
        """Return one rank's sample ids for several consecutive steps. Shape [steps, per_rank]."""
        starts = consumed + self.global_batch * np.arange(steps)
        return self.order.at(starts[:, None] + self._places[data_rank])

    @cached_property
    def _places(self) -> Ids:
        """Return the positions of each rank within a step. Shape [dp, per_rank]."""
        places: Ids = np.arange(self.global_batch)
        if self.micro_batch is None:
            return places.reshape(self.dp, self.per_rank)
        turns, shards = self.per_rank // self.micro_batch, self.dp // self.replicas
        dealt = places.reshape(self.replicas, turns, shards, self.micro_batch).swapaxes(1, 2)
        return dealt.reshape(self.dp, self.per_rank)


def permute(places: Ids, size: int, keys: NDArray[_U64]) -> Ids:
    """Return a keyed permutation of range(size) at the given places: a Feistel network with cycle walking.

    Black and Rogaway, "Ciphers with arbitrary finite domains" (2002). The network permutes range(4^k), the next power
    of four. A value outside range(size) is mapped again until it lies inside, which permutes range(size).
    """
    if size <= _FEW:
        hashes = scramble(scramble(np.arange(size, dtype=_U64) ^ keys[0]) ^ keys[1])
        shuffled: Ids = np.argsort(hashes, kind="stable")[places]
        return shuffled
    half = _U64(max((max(size - 1, 1).bit_length() + 1) // 2, 1))
    mask = (_U64(1) << half) - _U64(1)
    values = places.astype(_U64)
    outside = np.ones(values.shape, bool)
    while outside.any():
        values[outside] = _feistel(values[outside], half, mask, keys)
        outside &= values >= _U64(size)
    return values.astype(np.int64)


def _feistel(values: NDArray[_U64], half: np.uint64, mask: np.uint64, keys: NDArray[_U64]) -> NDArray[_U64]:
    left, right = values >> half, values & mask
    for key in keys:
        left, right = right, left ^ (scramble(right ^ key) & mask)
    return (left << half) | right


def scramble(x: NDArray[_U64]) -> NDArray[_U64]:
    """Apply the finaliser of splitmix64 (Steele, Lea, Flood 2014): every bit of x affects every bit of the result."""
    x = (x ^ (x >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> _U64(27))) * _U64(0x94D049BB133111EB)
    return x ^ (x >> _U64(31))
