"""Sequence parallel attention: the exchange is its own inverse, and a model that bypasses it is found out."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import on_ranks
from tests.support.specs import TINY, spec
from train_loop.errors import ModelError
from train_loop.model.build import build_model
from train_loop.parallel.ulysses import apply_ulysses, heads_to_seq, seq_to_heads


def exchange() -> dict[str, bool]:
    """Facts about the exchange of [B, H, T/P, D] = [2, 4, 3, 5] slices over two ranks."""
    group, rank, ranks = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    assert group is not None
    whole = torch.randn(2, 4, 3 * ranks, 5, generator=torch.Generator().manual_seed(0))
    mine = whole.chunk(ranks, dim=2)[rank].clone().requires_grad_()
    heads = seq_to_heads(mine, group)
    back = heads_to_seq(heads, group)
    weight = torch.randn(back.shape, generator=torch.Generator().manual_seed(rank))
    torch.autograd.backward((back * weight).sum())
    assert mine.grad is not None
    return {
        "whole sequence, some heads": torch.equal(heads, whole.chunk(ranks, dim=1)[rank]),
        "there and back": torch.equal(back, mine),
        "gradients come back too": torch.equal(mine.grad, weight),
    }


@pytest.fixture(scope="module")
def facts() -> list[dict[str, bool]]:
    return on_ranks(2, exchange)


@pytest.mark.parametrize("fact", ["whole sequence, some heads", "there and back", "gradients come back too"])
def test_the_exchange(facts: list[dict[str, bool]], fact: str) -> None:
    assert [rank[fact] for rank in facts] == [True, True]


def bypassed() -> str:
    """What the check says of a model whose attention never came through the exchange."""
    group = dist.group.WORLD
    assert group is not None
    ulysses = apply_ulysses(build_model(spec(model={"config": TINY}).model), group)
    assert ulysses is not None
    try:
        ulysses.check_active(sequence_length=32)
    except ModelError as error:
        return str(error)
    return ""


def test_a_model_that_bypasses_the_registry_is_refused() -> None:
    said: list[Any] = on_ranks(2, bypassed)
    assert all("Ulysses is not in force" in message and "choose ulysses_size: 1" in message for message in said)
