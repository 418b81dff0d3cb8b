"""The check on a small copy whether attention that keeps keys and values itself is exact, as Ulysses needs it."""

from collections.abc import Iterator
from unittest import mock

import pytest

from tests.support.builders.specs import TINY, spec
from train_loop.model.families.causal import cache
from train_loop.model.families.causal.family import CAUSAL
from train_loop.model.families.family import SPLIT_ATTENTION
from train_loop.model.families.states import AttentionStates


@pytest.fixture(autouse=True)
def _measure_again() -> Iterator[None]:
    cache._is_exact.cache_clear()
    yield
    cache._is_exact.cache_clear()


def is_exact_if_split() -> bool:
    model = CAUSAL.build(spec(model={"config": TINY}).model).model
    setattr(next(iter(model.children())), SPLIT_ATTENTION, object())
    return cache.is_exact(model, 32)


def test_states_that_attention_keeps_are_exact() -> None:
    assert is_exact_if_split()


@pytest.mark.parametrize("method", ["align", "add"])
def test_states_of_other_columns_are_not_exact(method: str) -> None:
    wrong = {"align": lambda *_: None, "add": lambda _, key, value: (key, value)}
    with mock.patch.object(AttentionStates, method, wrong[method]):
        assert not is_exact_if_split()
