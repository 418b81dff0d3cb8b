"""Retry rules of webhook deliveries."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.domain.webhooks.delivery import (
    FIRST_PAUSE,
    LONGEST_PAUSE,
    RETRY_SECONDS,
    Answer,
    Delivery,
    DeliveryStatus,
    Message,
    answered,
    apply_answer,
)

RECEIVED, FAILED, DEAD = Answer(200), Answer(500, "answered 500"), Answer(None, "no answer")


def a_delivery(**fields: float) -> Delivery:
    message = Message("job-1.1", "job.state", "job-1", "{}", 1000.0)
    return replace(Delivery(1, "hook-1", message, since=1000.0, next_at=1000.0), **fields)  # type: ignore[arg-type]


@given(st.integers(0, 10_000), st.floats(0, 1), st.floats(0, RETRY_SECONDS), st.none() | st.floats(0, 1e12))
def test_retry_delay_doubles_to_an_hour_and_ends_after_three_days(
    attempts: int, jitter: float, waited: float, retry_after: float | None
) -> None:
    now = 1000.0 + waited
    after = apply_answer(a_delivery(attempts=attempts), Answer(503, "x", retry_after), now=now, jitter=jitter)
    whole = min(FIRST_PAUSE * 2 ** min(attempts, 50), LONGEST_PAUSE)
    assert (after.attempts, after.status, after.error) == (attempts + 1, 503, "x")
    if after.next_at is None:
        assert after.settled is DeliveryStatus.GIVEN_UP
        assert waited + LONGEST_PAUSE >= RETRY_SECONDS
    else:
        low = max(whole / 2, min(retry_after or 0.0, LONGEST_PAUSE))
        assert low * 0.999 <= after.next_at - now <= max(whole, low) * 1.001
        assert after.next_at <= 1000.0 + RETRY_SECONDS


def test_received_message_is_delivered_and_410_is_given_up() -> None:
    received = apply_answer(a_delivery(), RECEIVED, now=1001.0, jitter=0.5)
    assert (received.settled, received.delivered_at, received.next_at) == (DeliveryStatus.DELIVERED, 1001.0, None)
    assert apply_answer(a_delivery(), Answer(410, "gone"), now=1001.0, jitter=0.5).settled is DeliveryStatus.GIVEN_UP


@pytest.mark.parametrize(
    ("header", "seconds"),
    [("120", 120.0), ("Thu, 01 Jan 1970 00:01:00 GMT", 50.0), ("Thu, 01 Jan 1970 00:00:01 GMT", 0.0), ("soon", None)],
)
def test_retry_after_header_is_read_for_429_and_503(header: str, seconds: float | None) -> None:
    for status in (429, 503):
        assert answered(status, {"retry-after": header}, now=10.0).retry_after == seconds
    assert answered(500, {"retry-after": header}, now=10.0).retry_after is None


@given(st.integers(100, 599), st.text())
def test_only_2xx_counts_as_received(status: int, header: str) -> None:
    found = answered(status, {"retry-after": header}, now=10.0)
    assert (found.received, found.gone) == (200 <= status < 300, status == 410)
    assert (found.error is None) == found.received
