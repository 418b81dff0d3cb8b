"""Bytes that collectives of this rank move, and rows that its experts compute."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._tools.fake_collectives import CollectiveOp, collective_ops, sync_ops
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

_C10D, _FUNCTIONAL, _ATEN = torch.ops.c10d, torch.ops._c10d_functional, torch.ops.aten
Count = Callable[[dist.ProcessGroup, Sequence[Any], Any], float]


class Traffic(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts while the mode is active.

    Bytes are those that a rank sends if a collective is a ring; what stays on its rank does not count.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._bytes: Counter[str] = Counter()
        self._uncounted: set[str] = set()
        self._rows: list[int] = []

    def counts(self) -> dict[str, Any]:
        """Return bytes by kind of collective, other collectives, and the rows of each grouped matrix product."""
        return {"bytes": dict(self._bytes), "uncounted": sorted(self._uncounted), "rows": self._rows}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the operator, and count it."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor then calls collectives, which are counted
        result = func(*args, **(kwargs or {}))
        if func in _KINDS:
            kind, count = _KINDS[func]
            self._bytes[kind] += round(count(CollectiveOp.get_process_group(func, args), args, result))
        elif func in collective_ops - sync_ops:
            self._uncounted.add(str(func))
        elif func is _ATEN._grouped_mm.default and args[1].ndim == 3:
            self._rows.append(len(args[0]))
        return result


def _summed(group: dist.ProcessGroup, tensors: Sequence[Tensor]) -> float:
    """Return the bytes of an all-reduce: those of a reduce-scatter and an all-gather."""
    return 2 * sum(tensor.nbytes for tensor in tensors) * (group.size() - 1) / group.size()


def _sent(group: dist.ProcessGroup, values: Tensor, splits: Sequence[int]) -> float:
    """Return the bytes that an all-to-all sends to other ranks; without splits, all parts are equal."""
    rows = len(values)
    own = splits[group.rank()] if splits else rows / group.size()
    return values.nbytes * (rows - own) / rows if rows else 0


_KINDS: dict[Any, tuple[str, Count]] = {
    _C10D._allgather_base_.default: ("all-gather", lambda _, args, __: args[0].nbytes - args[1].nbytes),
    _FUNCTIONAL.all_gather_into_tensor.default: ("all-gather", lambda _, args, out: out.nbytes - args[0].nbytes),
    _C10D._reduce_scatter_base_.default: ("reduce-scatter", lambda _, args, __: args[1].nbytes - args[0].nbytes),
    _FUNCTIONAL.reduce_scatter_tensor.default: ("reduce-scatter", lambda _, args, out: args[0].nbytes - out.nbytes),
    _C10D.allreduce_.default: ("all-reduce", lambda group, args, _: _summed(group, args[0])),
    _FUNCTIONAL.all_reduce.default: ("all-reduce", lambda group, args, _: _summed(group, [args[0]])),
    _FUNCTIONAL.all_reduce_.default: ("all-reduce", lambda group, args, _: _summed(group, [args[0]])),
    _C10D.broadcast_.default: ("broadcast", lambda group, args, _: _summed(group, args[0]) / 2),
    _C10D.alltoall_base_.default: ("all-to-all", lambda group, args, _: _sent(group, args[1], args[4])),
    _FUNCTIONAL.all_to_all_single.default: ("all-to-all", lambda group, args, _: _sent(group, args[0], args[2])),
}
