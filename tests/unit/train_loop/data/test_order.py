"""The order of samples: a permutation per epoch, identical at every world size and from any start."""

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
def test_epoch_contains_every_sample_once(samples: int, seed: int, epoch: int) -> None:
    ids = order(samples, seed=seed).at(np.arange(samples) + epoch * samples)
    assert sorted(ids.tolist()) == list(range(samples))


@given(samples=sizes, start=st.integers(0, 10_000), count=st.integers(1, 64))
def test_order_can_start_at_any_position(samples: int, start: int, count: int) -> None:
    whole = order(samples).at(np.arange(start + count))
    assert order(samples).at(np.arange(start, start + count)).tolist() == whole[start:].tolist()


def test_epochs_and_seeds_give_different_orders() -> None:
    first, second = (order(1000).at(np.arange(1000) + epoch * 1000) for epoch in (0, 1))
    other = order(1000, seed=1).at(np.arange(1000))
    assert not np.array_equal(first, second)
    assert not np.array_equal(first, other)


def test_shuffle_removes_file_order() -> None:
    """Positions and samples are uncorrelated, and neighbours do not stay neighbours."""
    ids = order(20_000).at(np.arange(20_000))
    assert abs(np.corrcoef(np.arange(20_000), ids)[0, 1]) < 0.03
    assert (np.abs(np.diff(ids)) == 1).mean() < 0.001


@pytest.mark.parametrize("samples", [100, 1000, 5000])
def test_shuffle_is_uniform(samples: int) -> None:
    """Over 400 epochs, samples and pairs of neighbours are equally frequent in every tenth of an epoch.

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
    # A fair permutation leaves on average one sample at its position.
    assert (epochs == np.arange(samples)).sum(1).mean() == pytest.approx(1, abs=0.25)


def test_shuffle_of_few_samples_is_uniform() -> None:
    """Each of the 120 orders of five samples is equally frequent: chi-square of 119 degrees of freedom."""
    found = Counter(tuple(order(5, seed=seed).at(np.arange(5)).tolist()) for seed in range(6000))
    assert len(found) == 120
    assert sum((count - 50) ** 2 / 50 for count in found.values()) < 185


weights = st.lists(st.floats(0.01, 100), min_size=1, max_size=6).filter(lambda w: min(w) / sum(w) > 1e-3)


@given(weights=weights, start=st.integers(0, 10**12), data=st.data())
def test_mixture_shares_are_exact_over_any_window(weights: list[float], start: int, data: st.DataObject) -> None:
    mixture = mix(weights, [data.draw(st.integers(1, 10**6)) for _ in weights])
    sources, _ = mixture.at(np.arange(start, start + CYCLE))
    assert np.bincount(sources, minlength=len(weights)).tolist() == list(mixture.quotas)
    assert np.abs(np.array(mixture.quotas) / CYCLE - np.array(weights) / sum(weights)).max() <= 1 / CYCLE
    small, _ = mixture.at(np.arange(start, start + 100))
    off = np.bincount(small, minlength=len(weights)) - 100 * np.array(mixture.quotas) / CYCLE
    assert np.abs(off).max() < len(weights), "samples of a source are clustered"


@given(sizes=st.lists(st.integers(1, 300), min_size=1, max_size=4), weights=weights, shuffle=st.booleans())
def test_source_repeats_no_sample_before_all_were_used(sizes: list[int], weights: list[float], shuffle: bool) -> None:
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
def test_mixture_epoch_ends_when_every_source_was_used(sizes: list[int], weights: list[float]) -> None:
    count = min(len(sizes), len(weights))
    mixture = mix(weights[:count], sizes[:count])
    _, before = mixture.at(np.arange(mixture.epoch))
    sources, _ = mixture.at(np.arange(mixture.epoch))
    seen = np.bincount(sources, minlength=count)
    assert (seen >= mixture.sizes).all()
    last = sources[-1]
    assert before[-1] == mixture.sizes[last] - 1, "expected an earlier end"


def test_epochs_of_a_mixed_source_differ() -> None:
    mixture = Mixture((1000, 10), (5000, 5000))
    ids = Order(mixture.epoch, 0, True, "x", 2**62, mixture).at(np.arange(4000))
    own = ids[ids < 1000]
    assert not np.array_equal(own[:1000], own[1000:2000])


def test_order_without_shuffling_repeats_file_order() -> None:
    assert order(3, shuffle=False).at(np.arange(7)).tolist() == [0, 1, 2, 0, 1, 2, 0]


def test_order_past_the_end_is_padding() -> None:
    assert order(5, shuffle=False, end=7).at(np.arange(5, 9)).tolist() == [0, 1, PADDING, PADDING]


@given(samples=sizes, step=st.integers(0, 100), split=st.sampled_from([(1, 8), (2, 4), (4, 2), (8, 1)]))
def test_step_takes_the_same_samples_at_every_world_size(samples: int, step: int, split: tuple[int, int]) -> None:
    dp, per_rank = split
    dealt = StepOrder(order(samples), dp, per_rank).step(step * 8)
    assert dealt.shape == split
    assert dealt.flatten().tolist() == order(samples).at(np.arange(step * 8, step * 8 + 8)).tolist()


@given(end=st.integers(1, 500), done=st.integers(0, 100), dp=st.integers(1, 4), per_rank=st.integers(1, 3))
def test_remaining_steps_take_all_remaining_samples(end: int, done: int, dp: int, per_rank: int) -> None:
    deal = StepOrder(order(50, end=end), dp, per_rank)
    consumed = min(done, deal.steps_left(0)) * deal.global_batch
    left = [deal.step(consumed + i * deal.global_batch) for i in range(deal.steps_left(consumed))]
    assert sum(int((ids != PADDING).sum()) for ids in left) == max(end - consumed, 0)
    assert all((ids != PADDING).any() for ids in left), "a step without a sample"


@given(samples=sizes, start=st.integers(0, 500), dp=st.integers(1, 4), per_rank=st.integers(1, 3))
def test_several_steps_of_a_rank_equal_its_rows_of_each_step(samples: int, start: int, dp: int, per_rank: int) -> None:
    deal = StepOrder(order(samples), dp, per_rank)
    for rank in range(dp):
        expected = [deal.step(start + i * deal.global_batch)[rank].tolist() for i in range(3)]
        assert deal.rank_steps(start, 3, rank).tolist() == expected


@given(samples=sizes, consumed=st.integers(0, 10**9))
def test_position_and_count_are_inverse(samples: int, consumed: int) -> None:
    run = order(samples)
    assert run.consumed(run.position(consumed)) == consumed
