"""Calls of a model that each add a token to all rows. n: rows, T: columns of the longest row, V: vocabulary."""

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from train_loop.loop.batch import MicroBatch
from train_loop.model.families.anatomy import Anatomy
from train_loop.model.faults import own_faults


class Calls(Protocol):
    """The calls of a model for one batch."""

    def begin(self) -> Tensor:
        """Return the logits [n, V] of the token after each row. A collective call."""
        ...

    def add(self, tokens: Tensor) -> Tensor:
        """Add a token [n] to the rows, and return the logits [n, V] of the next. A collective call."""
        ...


def calls_of(anatomy: Anatomy, batch: MicroBatch, *, cached: bool) -> Calls:
    """Return the calls for the rows of a batch, with a cache if it is exact for the model."""
    return CachedCalls(anatomy, batch) if cached else WholeCalls(anatomy, batch)


class CachedCalls:
    """Calls with new tokens alone. Rows are padded on the left, so that their last tokens share a column."""

    def __init__(self, anatomy: Anatomy, batch: MicroBatch) -> None:
        self._anatomy, self._cache = anatomy, None
        # Padding rows, which other ranks wait for, have a token too: attention to nothing is not a number.
        lengths = batch.lengths.clamp(min=1)
        width = int(lengths.max())
        columns = torch.arange(width, device=lengths.device)
        missing = width - lengths[:, None]
        self._is_token = (columns >= missing).long()
        places = (columns - missing).clamp(min=0)
        self._ids, self._positions = batch.input_ids.gather(1, places), places

    def begin(self) -> Tensor:
        """Return the logits after each row, and keep its states."""
        return self._call()

    def add(self, tokens: Tensor) -> Tensor:
        """Add a token to the rows, and return the logits of the next."""
        self._ids, self._positions = tokens[:, None], self._positions[:, -1:] + 1
        self._is_token = F.pad(self._is_token, (0, 1), value=1)
        return self._call()

    def _call(self) -> Tensor:
        columns = {"input_ids": self._ids, "position_ids": self._positions, "is_token": self._is_token}
        with own_faults(self._anatomy.model):
            logits, self._cache = self._anatomy.family.extend(self._anatomy.model, columns, self._cache)
        return logits


class WholeCalls:
    """Calls with whole rows, for models whose states a cache would not keep exactly."""

    def __init__(self, anatomy: Anatomy, batch: MicroBatch) -> None:
        self._anatomy, self._lengths = anatomy, batch.lengths.clamp(min=1)
        self._ids = batch.input_ids[:, : int(self._lengths.max())]

    def begin(self) -> Tensor:
        """Return the logits after each row."""
        return self._call()

    def add(self, tokens: Tensor) -> Tensor:
        """Add a token to the rows, and return the logits of the next."""
        self._ids = F.pad(self._ids, (0, 1)).scatter(1, self._lengths[:, None], tokens[:, None])
        self._lengths = self._lengths + 1
        return self._call()

    def _call(self) -> Tensor:
        anatomy, (count, width) = self._anatomy, self._ids.shape
        positions = torch.arange(width, device=self._ids.device).expand(count, width)
        columns = {"input_ids": self._ids, "position_ids": positions, "length": self._lengths}
        with own_faults(anatomy.model):
            arguments = anatomy.family.arguments(anatomy.model, columns)
            logits = anatomy.family.call(anatomy.model, columns, arguments)
        return logits[torch.arange(count, device=logits.device), self._lengths - 1]
