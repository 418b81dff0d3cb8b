"""Which samples, in which order: a pure function of (seed, epoch, dataset), never of world size.

A run takes positions 0, 1, 2 …; position p is the p mod N-th sample of epoch p // N. Shuffling is a keyed permutation
computed for the asked positions alone, so that starting at any position costs the same and holds nothing in memory.
"""

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from train_loop.run_dir import DataPosition

Ids = NDArray[np.int64]
PADDING = -1
"""The sample id of a row that fills up the last, short step: it has no token to train on."""

_ROUNDS = 6
_U64 = np.uint64


@dataclass(frozen=True)
class Order:
    """The order of a dataset's samples, endless; `end` cuts it."""

    samples: int
    seed: int
    shuffle: bool
    dataset: str
    """Fingerprint of the prepared data."""
    end: int
    """Positions from here on are padding."""

    def at(self, positions: Ids) -> Ids:
        """Sample ids at the given positions, PADDING past the end. Shape in = shape out."""
        ids = np.full(positions.shape, PADDING, np.int64)
        epochs, places = np.divmod(positions, self.samples)
        for epoch in np.unique(epochs):
            chosen = (epochs == epoch) & (positions < self.end)
            ids[chosen] = self._epoch(int(epoch), places[chosen])
        return ids

    def _epoch(self, epoch: int, places: Ids) -> Ids:
        if not self.shuffle:
            return places
        seed = f"{self.seed}/{epoch}/{self.dataset}".encode()
        keys = np.frombuffer(hashlib.sha256(seed).digest() + hashlib.sha256(seed + b"+").digest(), _U64)[:_ROUNDS]
        return permute(places, self.samples, keys)

    def position(self, consumed: int) -> DataPosition:
        """Where in the data a run stands that has taken this many samples."""
        epoch, samples = divmod(consumed, self.samples)
        return DataPosition(epoch=epoch, samples=samples)

    def consumed(self, position: DataPosition) -> int:
        """The inverse of `position`."""
        return position.epoch * self.samples + position.samples


@dataclass(frozen=True)
class StepOrder:
    """The order dealt out to data-parallel ranks: a step takes the next `dp * per_rank` positions."""

    order: Order
    dp: int
    per_rank: int
    """Sequences per data-parallel rank and optimizer step."""

    @property
    def global_batch(self) -> int:
        """Sequences per optimizer step."""
        return self.dp * self.per_rank

    def steps_left(self, consumed: int) -> int:
        """Steps from a position to the end of the order, the last of which may be short."""
        return -((consumed - self.order.end) // self.global_batch)

    def step(self, consumed: int) -> Ids:
        """Sample ids of the step that starts at a position. Shape [dp, per_rank]."""
        return self.order.at(np.arange(consumed, consumed + self.global_batch).reshape(self.dp, self.per_rank))

    def rank_steps(self, consumed: int, steps: int, data_rank: int) -> Ids:
        """Sample ids of one rank for several steps in a row. Shape [steps, per_rank]."""
        starts = consumed + data_rank * self.per_rank + self.global_batch * np.arange(steps)
        return self.order.at(starts[:, None] + np.arange(self.per_rank)[None, :])


def permute(places: Ids, size: int, keys: NDArray[_U64]) -> Ids:
    """A keyed permutation of range(size) at the given places: a Feistel network, walked until it lands inside.

    Black and Rogaway, "Ciphers with arbitrary finite domains" (2002): the network permutes the next power of four, and
    a place whose image falls outside the range is mapped on, so that the range is permuted among itself.
    """
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
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return (left << half) | right


def _mix(x: NDArray[_U64]) -> NDArray[_U64]:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014): every bit of x reaches every bit of the result."""
    x = (x ^ (x >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> _U64(27))) * _U64(0x94D049BB133111EB)
    return x ^ (x >> _U64(31))
