"""Values for the parts of a tensor that a rank holds: read by the rank itself, or by one rank that sends them."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from train_loop.errors import ModelError
from train_loop.model.parts import own_parts

_PIECE_BYTES = 64 * 2**20


class Readable(Protocol):
    """A tensor in files."""

    @property
    def name(self) -> str:
        """Its name, or that of its first part."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its whole shape."""

    @property
    def by_row(self) -> bool:
        """True if a part of its rows can be read without the others."""

    @property
    def file(self) -> Path:
        """Its file."""

    def read(self, part: tuple[slice, ...]) -> Tensor:
        """Return a part of it."""


def fill(target: Tensor, stored: Sequence[Readable], readers: dist.ProcessGroup | None) -> None:
    """Set this rank's parts of a tensor that is stored once, or several times if it is tied.

    The first rank of `readers` reads the tensor for all of them; None: each rank reads its own parts. Then a collective
    call. Raises ModelError for a tied tensor that is stored with different values.
    """
    if readers is None:
        _read_own(target, stored)
    else:
        _receive(target, stored, readers)


def _read_own(target: Tensor, stored: Sequence[Readable]) -> None:
    for own, box in own_parts(target):
        own.copy_(stored[0].read(box))
        for twin in stored[1:]:
            if not torch.equal(own, twin.read(box).to(own)):
                raise _differs(stored[0], twin)


def _receive(target: Tensor, stored: Sequence[Readable], readers: dist.ProcessGroup) -> None:
    parts, reads, different = own_parts(target), dist.get_rank(readers) == 0, torch.zeros(1, dtype=torch.uint8)
    for box in _boxes(stored[0], target.dtype.itemsize):
        values = torch.empty([one.stop - one.start for one in box], dtype=target.dtype)
        if reads:
            values.copy_(stored[0].read(box))
            if not all(torch.equal(values, twin.read(box).to(values)) for twin in stored[1:]):
                different.fill_(1)
        if values.numel():
            # As bytes, because gloo does not send every dtype.
            dist.broadcast(values.reshape(-1).view(torch.uint8), group=readers, group_src=0)
        for own, place in parts:
            _copy_common(own, place, values, box)
    if len(stored) > 1:
        dist.broadcast(different, group=readers, group_src=0)
        if different.item():
            raise _differs(stored[0], stored[1])


def _boxes(stored: Readable, itemsize: int) -> Iterator[tuple[slice, ...]]:
    """Yield places of whole rows, some megabytes each, that cover a tensor."""
    if not stored.shape:
        yield ()
        return
    count, *rest = stored.shape
    most = max(_PIECE_BYTES // max(math.prod(rest) * itemsize, 1), 1) if stored.by_row else max(count, 1)
    for start in range(0, count, most):
        yield (slice(start, min(start + most, count)), *(slice(0, size) for size in rest))


def _copy_common(own: Tensor, place: tuple[slice, ...], values: Tensor, box: tuple[slice, ...]) -> None:
    """Copy the rows that a part of a tensor has in common with others of whole rows."""
    if not box:
        own.copy_(values)
        return
    first, last = max(place[0].start, box[0].start), min(place[0].stop, box[0].stop)
    if first < last:
        rows = values[first - box[0].start : last - box[0].start]
        own[first - place[0].start : last - place[0].start].copy_(rows[(slice(None), *place[1:])])


def _differs(one: Readable, twin: Readable) -> ModelError:
    # transformers would untie them with a warning, and train a model that differs from config.json.
    return ModelError(
        f"{twin.name} in {twin.file} differs from {one.name}, and config.json ties them; set tie_word_embeddings to "
        "the value with which the model was trained"
    )
