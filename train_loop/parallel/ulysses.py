"""Ulysses sequence parallelism: attention sees the whole sequence and a part of the heads.

Jacobs et al., "DeepSpeed Ulysses" (2023). A model's family makes each attention module compute by the `Ulysses` that
the module has. In generation every rank has the new token, and keeps the keys and values of its heads.

Shapes: B batch, T sequence, H query heads, K kv heads, D head size, P ranks in the group.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import _resolve_process_group

from train_loop.errors import ModelError
from train_loop.model.families.anatomy import Anatomy
from train_loop.model.families.family import HEAD_BIAS, SPLIT_ATTENTION, Attention, AttentionUse
from train_loop.model.families.states import AttentionStates
from train_loop.telemetry.timers import ComputeTimer


class _Own:
    """A module whose attributes are those of this rank, as an attention function reads them."""

    def __init__(self, module: nn.Module, own: Callable[[Any], Any]) -> None:
        self._module = module
        self._own = own

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._module)

    def __getattr__(self, name: str) -> Any:
        return self._own(getattr(self._module, name))


class Exchanges:
    """The exchanges of a model's current or last forward pass in a group of ranks that share sequences."""

    def __init__(self, group: dist.ProcessGroup, timer: ComputeTimer) -> None:
        self.group = group
        self.ranks = dist.get_world_size(group)
        self.timer = timer
        self.exchanged: Counter[tuple[int, ...]] = Counter()
        """Number of exchanges of each shape."""
        self.name = f"ulysses-{next(_NUMBERS)}"
        _BY_NAME[self.name] = self


class Ulysses(Exchanges):
    """The sequence parallel attention of one model."""

    def __init__(self, model: nn.Module, group: dist.ProcessGroup, inner: Attention, timer: ComputeTimer) -> None:
        super().__init__(group, timer)
        self.inner = inner
        self.uses: list[AttentionUse] = []
        """The attention modules that use this object."""
        self.states: AttentionStates | None = None
        """Keys and values of this rank's heads, while a forward pass keeps them."""
        self._by_head = set[nn.Module]()
        """Modules with numbers by head, such as sinks."""
        model.register_forward_pre_hook(lambda _model, _inputs: self.exchanged.clear())
        model.register_forward_hook(self._check_forward, with_kwargs=True)

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute attention: query [B, H, T/P, D]; key, value [B, K, T/P, D]; mask [B, 1, T, T] → [B, T/P, H, D].

        If a token is added to `states`, each rank has it: query [B, H, 1, D] → [B, 1, H, D].
        """
        if key.shape[1] < self.ranks:
            key, value = (x.repeat_interleave(self.ranks // x.shape[1], dim=1) for x in (key, value))
        q, k, v = (self._heads_of_rank(x) for x in (query, key, value))
        if self.states is not None:
            k, v = self.states.add(k, v)
        if HEAD_BIAS in kwargs:
            kwargs[HEAD_BIAS] = kwargs[HEAD_BIAS].chunk(self.ranks)[dist.get_rank(self.group)]
        if module in self._by_head:
            module, kwargs = self._own_heads(module, kwargs, query.shape[1])
        out, weights = self.inner(module, q, k, v, attention_mask, **kwargs)  # [B, T, H/P, D]
        # Each rank gets the new token.
        out = out.expand(-1, self.ranks, -1, -1) if self._adds_token else out
        mine = heads_to_seq(out.transpose(1, 2), self.group, owner=self.name).transpose(1, 2)
        return mine.contiguous(), weights

    @property
    def _adds_token(self) -> bool:
        return self.states is not None and self.states.extends

    def _heads_of_rank(self, x: Tensor) -> Tensor:
        """Return this rank's heads of the whole sequence, which it has if that is one new token."""
        if self._adds_token:
            return x.chunk(self.ranks, dim=1)[dist.get_rank(self.group)].contiguous()
        return seq_to_heads(x, self.group, owner=self.name)

    def _own_heads(self, module: nn.Module, named: dict[str, Any], heads: int) -> tuple[Any, dict[str, Any]]:
        """Return a module and arguments whose numbers by head [H] are those of this rank's heads."""
        rank = dist.get_rank(self.group)

        def own(value: Any) -> Any:
            is_by_head = isinstance(value, Tensor) and value.shape == (heads,)
            return value.chunk(self.ranks)[rank] if is_by_head else value

        return _Own(module, own), {name: own(value) for name, value in named.items()}

    def adopt(self, module: nn.Module, use: AttentionUse) -> None:
        """Compute the attention of a module."""
        self.uses.append(use)
        if any(one.shape == (use.heads,) for one in module.parameters(recurse=False)):
            self._by_head.add(module)
        setattr(module, SPLIT_ATTENTION, self)
        if hasattr(module, "num_key_value_groups"):
            # The attention function repeats kv heads by this count. It is smaller after kv heads were repeated for P.
            module.num_key_value_groups = use.heads // max(use.kv_heads, self.ranks)  # type: ignore[assignment]

    def check_active(self, *, sequence_length: int) -> None:
        """Raise ModelError unless the attention of every module saw [T, H/P], as split attention does.

        Call it after a forward pass: in backward, frozen layers exchange nothing.
        """
        queries = {(shape[3] * self.ranks, shape[2]) for shape in self.exchanged}
        expected = {(sequence_length, use.heads // self.ranks) for use in self.uses}
        # Queries, keys, values and outputs; of a new token, outputs alone.
        exchanges = (1 if self._adds_token else 4) * sum(use.calls for use in self.uses)
        if not expected or not expected <= queries or self.exchanged.total() != exchanges:
            raise ModelError(
                f"Ulysses is not active in all layers: {self.exchanged.total()} exchanges of (sequence, heads) "
                f"{sorted(queries)}; expected {exchanges}, among them {sorted(expected)}; the attention of some "
                "layers of this model cannot be split, so choose ulysses_size: 1"
            )

    def _check_forward(self, model: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        self.check_active(sequence_length=named["input_ids"].shape[1] * self.ranks)


_NUMBERS = itertools.count()
_BY_NAME: WeakValueDictionary[str, Exchanges] = WeakValueDictionary()
"""All `Exchanges` by their unique name: operators in compiled graphs refer to objects only by name."""


def apply_ulysses(
    anatomy: Anatomy, group: dist.ProcessGroup, timer: ComputeTimer, attention: Mapping[str, AttentionUse]
) -> Ulysses | None:
    """Route the model's attention modules through the group; return None if the group is this rank alone.

    `attention` names the modules. The timer stops while ranks wait for each other in exchanges.
    """
    if dist.get_world_size(group) == 1:
        return None
    ulysses = Ulysses(anatomy.model, group, anatomy.family.divert_attention(anatomy.model), timer)
    for name, use in attention.items():
        ulysses.adopt(anatomy.model.get_submodule(name), use)
    return ulysses


def seq_to_heads(x: Tensor, group: dist.ProcessGroup, *, owner: str = "") -> Tensor:
    """Exchange [B, H, T/P, D] → [B, H/P, T, D]. `owner` names the `Ulysses` that counts and times the exchange."""
    ranks = dist.get_world_size(group)
    b, h, t, d = x.shape
    parts = x.reshape(b, ranks, h // ranks, t, d).movedim(1, 0)  # [P, B, H/P, T/P, D]
    gathered = _exchange(parts, group, owner)  # [P, B, H/P, T/P, D], P now counts sequence slices
    return gathered.permute(1, 2, 0, 3, 4).reshape(b, h // ranks, ranks * t, d)


def heads_to_seq(x: Tensor, group: dist.ProcessGroup, *, owner: str = "") -> Tensor:
    """Exchange [B, H/P, T, D] → [B, H, T/P, D], the inverse of `seq_to_heads`."""
    ranks = dist.get_world_size(group)
    b, h, t, d = x.shape
    parts = x.reshape(b, h, ranks, t // ranks, d).movedim(2, 0)  # [P, B, H/P, T/P, D]
    gathered = _exchange(parts, group, owner)  # P now counts groups of heads
    return gathered.movedim(0, 1).reshape(b, ranks * h, t // ranks, d)


def _exchange(parts: Tensor, group: dist.ProcessGroup, owner: str) -> Tensor:
    out: Tensor = all_to_all(parts.contiguous(), group.group_name, owner)
    return out


@torch.library.custom_op("trainshed::all_to_all", mutates_args=())
def all_to_all(x: Tensor, group: str, owner: str) -> Tensor:
    """Send slice i of the first axis to rank i; an operator, so that compiled graphs do not break at it."""
    ulysses = _BY_NAME.get(owner)
    if ulysses is not None:
        ulysses.exchanged[tuple(x.shape)] += 1
    out = torch.empty_like(x)
    with ulysses.timer.waiting() if ulysses is not None else nullcontext():
        dist.all_to_all_single(out, x, group=_resolve_process_group(group))  # type: ignore[arg-type]  # a str, renamed
    return out


@all_to_all.register_fake
def _like(x: Tensor, group: str, owner: str) -> Tensor:
    return torch.empty_like(x)


def _remember_names(ctx: Any, inputs: tuple[Tensor, str, str], output: Tensor) -> None:
    _, ctx.group, ctx.owner = inputs


def _exchange_back(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return all_to_all(grad.contiguous(), ctx.group, ctx.owner), None, None


all_to_all.register_autograd(_exchange_back, setup_context=_remember_names)
