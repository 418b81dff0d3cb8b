"""The order of samples: a permutation per epoch, the same at every world size, the same from any start."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from train_loop.data.order import PADDING, Order, StepOrder

sizes = st.integers(1, 3000)


def order(samples: int, *, seed: int = 0, shuffle: bool = True, end: int = 2**62) -> Order:
    return Order(samples, seed, shuffle, "fingerprint", end)


@given(samples=sizes, seed=st.integers(0, 2**31), epoch=st.integers(0, 50))
def test_an_epoch_holds_every_sample_once(samples: int, seed: int, epoch: int) -> None:
    ids = order(samples, seed=seed).at(np.arange(samples) + epoch * samples)
    assert sorted(ids.tolist()) == list(range(samples))


@given(samples=sizes, start=st.integers(0, 10_000), count=st.integers(1, 64))
def test_it_can_start_anywhere(samples: int, start: int, count: int) -> None:
    whole = order(samples).at(np.arange(start + count))
    assert order(samples).at(np.arange(start, start + count)).tolist() == whole[start:].tolist()


def test_epochs_and_seeds_differ() -> None:
    first, second = (order(1000).at(np.arange(1000) + epoch * 1000) for epoch in (0, 1))
    other = order(1000, seed=1).at(np.arange(1000))
    assert not np.array_equal(first, second)
    assert not np.array_equal(first, other)


def test_a_shuffle_leaves_no_trace_of_file_order() -> None:
    """Places and samples are uncorrelated, and neighbours do not stay neighbours."""
    ids = order(20_000).at(np.arange(20_000))
    assert abs(np.corrcoef(np.arange(20_000), ids)[0, 1]) < 0.03
    assert (np.abs(np.diff(ids)) == 1).mean() < 0.001


def test_without_shuffling_it_is_file_order_again_and_again() -> None:
    assert order(3, shuffle=False).at(np.arange(7)).tolist() == [0, 1, 2, 0, 1, 2, 0]


def test_past_the_end_there_is_only_padding() -> None:
    assert order(5, shuffle=False, end=7).at(np.arange(5, 9)).tolist() == [0, 1, PADDING, PADDING]


@given(samples=sizes, step=st.integers(0, 100), split=st.sampled_from([(1, 8), (2, 4), (4, 2), (8, 1)]))
def test_a_step_takes_the_same_samples_at_every_world_size(samples: int, step: int, split: tuple[int, int]) -> None:
    dp, per_rank = split
    dealt = StepOrder(order(samples), dp, per_rank).step(step * 8)
    assert dealt.shape == split
    assert dealt.flatten().tolist() == order(samples).at(np.arange(step * 8, step * 8 + 8)).tolist()


@given(end=st.integers(1, 500), done=st.integers(0, 100), dp=st.integers(1, 4), per_rank=st.integers(1, 3))
def test_the_steps_that_are_left_take_all_that_is_left(end: int, done: int, dp: int, per_rank: int) -> None:
    deal = StepOrder(order(50, end=end), dp, per_rank)
    consumed = min(done, deal.steps_left(0)) * deal.global_batch
    left = [deal.step(consumed + i * deal.global_batch) for i in range(deal.steps_left(consumed))]
    assert sum(int((ids != PADDING).sum()) for ids in left) == max(end - consumed, 0)
    assert all((ids != PADDING).any() for ids in left), "a step without a sample"


@given(samples=sizes, start=st.integers(0, 500), dp=st.integers(1, 4), per_rank=st.integers(1, 3))
def test_several_steps_of_a_rank_are_its_rows_of_each_step(samples: int, start: int, dp: int, per_rank: int) -> None:
    deal = StepOrder(order(samples), dp, per_rank)
    for rank in range(dp):
        expected = [deal.step(start + i * deal.global_batch)[rank].tolist() for i in range(3)]
        assert deal.rank_steps(start, 3, rank).tolist() == expected


@given(samples=sizes, consumed=st.integers(0, 10**9))
def test_a_position_and_a_count_are_each_others_inverse(samples: int, consumed: int) -> None:
    run = order(samples)
    assert run.consumed(run.position(consumed)) == consumed
