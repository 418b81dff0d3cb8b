"""Rate limits: no time window exceeds the rate, and the reported wait is exact."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.config.settings import Settings
from service.domain.access.rate_limit import Rate, Window, client_network
from service.domain.access.roles import Principal
from service.errors import RateLimited
from service.use_cases.access.rate_limits import _MOST_NAMES, AuthAttempt, Kind, Limits, Rates
from tests.support.fakes.service import Clock

RATES = st.builds(Rate, st.integers(1, 5), st.sampled_from(["second", "minute"]))
PAUSES = st.lists(st.integers(0, 40_000).map(lambda thousandths: thousandths / 1000), max_size=60)


@given(RATES, PAUSES)
def test_window_never_admits_more_than_the_rate(rate: Rate, pauses: list[float]) -> None:
    window, now, taken = Window(rate), 0.0, list[float]()
    for pause in pauses:
        now += pause
        if window.wait(now) == 0:
            window.take(now)
            taken.append(now)
    for first, beyond in zip(taken, taken[rate.amount :], strict=False):
        assert beyond - first >= rate.seconds - 1e-6
    assert all(one <= other for one, other in pairwise(taken))


@given(RATES, PAUSES)
def test_window_wait_is_exact(rate: Rate, pauses: list[float]) -> None:
    window, now = Window(rate), 0.0
    for pause in pauses:
        now += pause
        wait = window.wait(now)
        assert 0 <= wait <= rate.seconds
        if wait > 1e-3:
            assert window.wait(now + wait - 1e-3) > 0
        assert window.wait(now + wait) < 1e-6
        assert window.wait(now + math.ceil(wait)) == 0
        now += wait
        window.take(now)


@pytest.mark.parametrize("text", ["", "600", "600/fortnight", "0/second", "-1/second", "1.5/second", "100000/second"])
def test_invalid_rate_is_rejected_with_an_example(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="600/minute"):
        Rate.parse(text)
    monkeypatch.setenv("TRAINSHED_READS_PER_KEY", text or "?")
    with pytest.raises(ValueError, match="reads_per_key"):
        Settings()


def test_limits_are_settings_and_none_disables_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert str(Settings().writes_per_key) == "600/minute"
    monkeypatch.setenv("TRAINSHED_WRITES_PER_KEY", "5/second")
    monkeypatch.setenv("TRAINSHED_READS_PER_KEY", "none")
    monkeypatch.setenv("TRAINSHED_STREAMS_PER_KEY", "none")
    found = Settings()
    assert (found.writes_per_key, found.reads_per_key, found.streams_per_key) == (Rate(5, "second"), None, None)


@pytest.mark.parametrize(
    ("address", "counted"),
    [
        ("10.0.0.7", "10.0.0.7"),
        ("::ffff:10.0.0.7", "10.0.0.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("testclient", "testclient"),
        ("", ""),
    ],
)
def test_neighbourhood_groups_ipv6_addresses_by_network(address: str, counted: str) -> None:
    assert client_network(address) == counted


def test_rates_remember_a_bounded_number_of_addresses() -> None:
    rates = Rates(Limits({Kind.UNAUTHENTICATED: Rate(1, "hour")}), Clock())
    for number in range(_MOST_NAMES + 10):
        rates.record_failure(AuthAttempt("x", f"address-{number}", Kind.READS))
    rates.check(AuthAttempt("x", "address-0", Kind.READS))
    with pytest.raises(RateLimited):
        rates.check(AuthAttempt("x", f"address-{_MOST_NAMES}", Kind.READS))
    assert len(rates._windows) == _MOST_NAMES


def test_rate_limit_error_is_notable_once_per_flood() -> None:
    clock, bob = Clock(), Principal("key-1", "bob", {})
    rates, attempt = Rates(Limits({Kind.READS: Rate(1, "second")}), clock), AuthAttempt("x", "a", Kind.READS)
    rates.record_success(attempt, bob)
    found = list[RateLimited]()
    for _ in range(3):
        for _ in range(4):
            with pytest.raises(RateLimited) as refused:
                rates.check(attempt)
            found.append(refused.value)
        clock.now += 1
        rates.check(attempt)
    assert [error.notable for error in found] == [True, False, False, False] * 3


def test_attempts_before_authentication_count_towards_the_limit() -> None:
    rates, bob = Rates(Limits({Kind.WRITES: Rate(3, "minute")}), Clock()), Principal("key-1", "bob", {})
    attempt = AuthAttempt("x", "a", Kind.WRITES)
    assert [rates.check(attempt) for _ in range(3)] == [False] * 3
    rates.record_success(attempt, bob)
    assert [rates.check(attempt) for _ in range(2)] == [True] * 2
    for more in (lambda: rates.check(attempt), lambda: rates.record_success(attempt, bob)):
        with pytest.raises(RateLimited):
            more()


def test_window_forgets_expired_entries() -> None:
    window = Window(Rate(1000, "second"))
    for thousandths in range(900):
        window.take(thousandths / 1000)
    window.take(1.85)
    assert len(window._times) == 50
