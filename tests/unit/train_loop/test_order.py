"""The order of samples: a permutation per epoch, the same at every world size, the same from any start."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from train_loop.data.order import PADDING, Mixture, Order, StepOrder, mix
from train_loop.spec.data import CYCLE

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


@pytest.mark.parametrize("samples", [100, 1000, 5000])
def test_a_shuffle_is_as_even_as_chance(samples: int) -> None:
    """Over 400 epochs every sample comes to every tenth of an epoch equally often, and so do pairs of neighbours.

    Chi-square of 10 x 10 cells has 81 degrees of freedom here; 1 in 10,000 fair shuffles would exceed 134.
    """
    epochs = np.stack([order(samples, seed=seed).at(np.arange(samples)) for seed in range(400)])
    tenth = np.arange(samples) * 10 // samples
    seen = np.zeros((10, 10))
    np.add.at(seen, (tenth[None, :].repeat(400, 0), tenth[epochs]), 1)
    expected = np.bincount(tenth)[:, None] * np.bincount(tenth)[None, :] * 400 / samples
    assert ((seen - expected) ** 2 / expected).sum() < 134
    pairs = np.zeros((10, 10))
    np.add.at(pairs, (tenth[epochs[:, :-1]], tenth[epochs[:, 1:]]), 1)
    fair = pairs.sum() / 100
    assert np.abs(pairs / fair - 1).max() < 5 / np.sqrt(fair)
    # A fair permutation leaves one sample in its place on average.
    assert (epochs == np.arange(samples)).sum(1).mean() == pytest.approx(1, abs=0.25)


def test_few_samples_are_shuffled_fairly_too() -> None:
    """Each of the 120 orders of five samples comes equally often: chi-square of 119 degrees of freedom."""
    found = Counter(tuple(order(5, seed=seed).at(np.arange(5)).tolist()) for seed in range(6000))
    assert len(found) == 120
    assert sum((count - 50) ** 2 / 50 for count in found.values()) < 185


weights = st.lists(st.floats(0.01, 100), min_size=1, max_size=6).filter(lambda w: min(w) / sum(w) > 1e-3)


@given(weights=weights, start=st.integers(0, 10**12), data=st.data())
def test_shares_of_a_mixture_are_exact_over_any_window(weights: list[float], start: int, data: st.DataObject) -> None:
    mixture = mix(weights, [data.draw(st.integers(1, 10**6)) for _ in weights])
    sources, _ = mixture.at(np.arange(start, start + CYCLE))
    assert np.bincount(sources, minlength=len(weights)).tolist() == list(mixture.quotas)
    assert np.abs(np.array(mixture.quotas) / CYCLE - np.array(weights) / sum(weights)).max() <= 1 / CYCLE
    small, _ = mixture.at(np.arange(start, start + 100))
    off = np.bincount(small, minlength=len(weights)) - 100 * np.array(mixture.quotas) / CYCLE
    assert np.abs(off).max() < len(weights), "a source comes in bunches"


@given(sizes=st.lists(st.integers(1, 300), min_size=1, max_size=4), weights=weights, shuffle=st.booleans())
def test_no_sample_of_a_source_comes_again_before_all_have_come(
    sizes: list[int], weights: list[float], shuffle: bool
) -> None:
    count = min(len(sizes), len(weights))
    mixture = mix(weights[:count], sizes[:count])
    ids = Order(mixture.epoch, 0, shuffle, "x", 2**62, mixture).at(np.arange(4000))
    first = 0
    for size in mixture.sizes:
        own = ids[(ids >= first) & (ids < first + size)] - first
        whole = own[: len(own) // size * size].reshape(-1, size)
        assert (np.sort(whole) == np.arange(size)).all()
        if not shuffle:
            assert (whole == np.arange(size)).all()
        first += size


@given(sizes=st.lists(st.integers(1, 500), min_size=2, max_size=4), weights=weights)
def test_an_epoch_of_a_mixture_is_over_when_every_source_was_seen(sizes: list[int], weights: list[float]) -> None:
    count = min(len(sizes), len(weights))
    mixture = mix(weights[:count], sizes[:count])
    _, before = mixture.at(np.arange(mixture.epoch))
    sources, _ = mixture.at(np.arange(mixture.epoch))
    seen = np.bincount(sources, minlength=count)
    assert (seen >= mixture.sizes).all()
    last = sources[-1]
    assert before[-1] == mixture.sizes[last] - 1, "it could have ended earlier"


def test_epochs_of_a_mixed_source_differ() -> None:
    mixture = Mixture((1000, 10), (5000, 5000))
    ids = Order(mixture.epoch, 0, True, "x", 2**62, mixture).at(np.arange(4000))
    own = ids[ids < 1000]
    assert not np.array_equal(own[:1000], own[1000:2000])


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
