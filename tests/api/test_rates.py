"""Who calls too often: refused cheaply, told when to come back, and let in then."""

import json
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient
from structlog.contextvars import merge_contextvars
from structlog.testing import capture_logs

from service.domain.access.rate_limit import Rate
from service.domain.access.roles import Key, Role
from service.use_cases.access.rate_limits import Kind, Limits
from tests.support.fakes.stores import MemoryKeyStore
from tests.support.service import KEY, FakeService, spec_body
from tests.support.streams import Address
from tests.support.waiting import wait_for

LIMITS = Limits(
    {Kind.READS: Rate(3, "minute"), Kind.WRITES: Rate(2, "minute"), Kind.STRANGERS: Rate(4, "minute")},
    streams_per_key=2,
)


class CountingKeys(MemoryKeyStore):
    """Counts how often somebody is looked up."""

    asked = 0

    def get(self, key_id: str) -> Key | None:
        self.asked += 1
        return super().get(key_id)


class Counted:
    """A service that counts, with the keys of two callers."""

    def __init__(self, root: Path) -> None:
        self.keys = CountingKeys()
        self.service = FakeService(root, limits=LIMITS, keys=self.keys)
        self.client = TestClient(self.service.app(), base_url="http://127.0.0.1")
        self.alice, self.bob = (
            self.service.access.create(name, {"default": Role.ADMIN}, None)[1] for name in ("alice", "bob")
        )

    def ask(self, secret: str, method: str = "GET", path: str = "/me", **fields: Any) -> Any:
        """What is answered to whoever sends this."""
        return self.client.request(method, path, headers={"authorization": f"Bearer {secret}"}, **fields)

    def codes(self, secret: str, times: int, method: str = "GET", path: str = "/me", **fields: Any) -> list[int]:
        """The status of as many answers."""
        return [self.ask(secret, method, path, **fields).status_code for _ in range(times)]


@pytest.fixture
def counted(tmp_path: Path) -> Counted:
    return Counted(tmp_path)


def test_each_key_has_reads_and_writes_of_its_own_and_is_told_when_there_is_room(counted: Counted) -> None:
    assert counted.codes(counted.alice, 2) == [200] * 2
    counted.service.clock.now += 10.5
    assert counted.codes(counted.alice, 2) == [200, 429]
    refused = counted.ask(counted.alice)
    assert refused.headers["content-type"] == "application/problem+json"
    assert refused.headers["retry-after"] == "50"
    problem = refused.json()
    assert problem["code"] == "rate_limited"
    assert all(part in problem["detail"] for part in ("3/minute", "TRAINSHED_READS_PER_KEY", "50 s"))
    assert counted.codes(counted.alice, 3, "POST", "/jobs", content=spec_body()) == [201, 201, 429]
    assert counted.codes(counted.bob, 4) == [200, 200, 200, 429]
    assert counted.codes(KEY, 20) == [200] * 20, "the operator is not counted"
    counted.service.clock.now += 49.0
    assert counted.codes(counted.alice, 1) == [429]
    counted.service.clock.now += 1.0
    assert counted.codes(counted.alice, 3) == [200, 200, 429]


def test_whoever_is_refused_costs_no_look_into_the_store(counted: Counted) -> None:
    counted.codes(counted.alice, 3)
    counted.codes("trainshed_9_x", 4)
    before = counted.keys.asked
    assert counted.codes(counted.alice, 5) + counted.codes("trainshed_9_y", 5) == [429] * 10
    assert counted.keys.asked == before


def test_guessing_is_slow_and_shuts_nobody_out_who_was_in(counted: Counted) -> None:
    assert counted.codes(counted.alice, 1) == [200]
    guesses = [counted.ask(f"trainshed_{number:04d}_{'0' * 64}") for number in range(4)]
    assert {answer.status_code for answer in guesses} == {401}
    refused = counted.ask(f"trainshed_0009_{'0' * 64}")
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "60")
    assert "TRAINSHED_STRANGERS_PER_ADDRESS" in refused.json()["detail"]
    assert counted.client.get("/me").status_code == 429, "nor does it help to send none"
    assert counted.codes(counted.alice, 1) + counted.codes(KEY, 1) == [200, 200]
    assert counted.codes(counted.bob, 1) == [429], "nobody can tell it from a guess"
    assert counted.client.get("/healthz").status_code == 200
    counted.service.clock.now += 60
    assert counted.codes(counted.bob, 1) == [200]


def test_key_that_is_revoked_becomes_a_stranger(counted: Counted) -> None:
    assert counted.codes(counted.alice, 1) == [200]
    key_id = counted.ask(counted.alice).json()["id"]
    counted.ask(KEY, "DELETE", f"/keys/{key_id}")
    assert counted.codes(counted.alice, 5) == [401] * 4 + [429]


def test_log_tells_of_those_who_were_refused_and_not_what_they_sent(counted: Counted) -> None:
    with capture_logs(processors=[merge_contextvars]) as lines:
        counted.codes(counted.alice, 6)
        for _ in range(6):
            counted.client.get("/me", headers={"authorization": "Bearer trainshed_0009_guess", "x-request-id": "r-1"})
    told = ("event", "method", "path", "client")
    assert {tuple(line[name] for name in told) for line in lines} == {("refused", "GET", "/me", "testclient")}
    limited, unknown = (429, "rate_limited"), (401, "unauthorized")
    assert [(line["status"], line["code"]) for line in lines] == [limited, *[unknown] * 4, limited]
    assert [line["request_id"] for line in lines][1:] == ["r-1"] * 5
    assert not any(secret in str(lines) for secret in ("guess", counted.alice))


def test_streams_are_counted_while_they_are_open(counted: Counted) -> None:
    job_id, address, leave = counted.service.submit().id, Address(counted.service), threading.Event()
    begun = list[str]()

    def follow() -> None:
        with stream(address, counted.alice, job_id) as answer:
            lines = answer.iter_lines()
            begun.append(next(lines))
            leave.wait(60)

    with address.serving():
        readers = [threading.Thread(target=follow, daemon=True) for _ in range(2)]
        for reader in readers:
            reader.start()
        wait_for(lambda: len(begun) == 2, "both streams")
        with stream(address, counted.alice, job_id) as refused:
            assert refused.status_code == 429
            assert json.loads(refused.read())["code"] == "rate_limited"
            assert int(refused.headers["retry-after"]) > 0
        with stream(address, KEY, job_id) as other:
            assert other.status_code == 200
        leave.set()
        for reader in readers:
            reader.join()

        def again() -> bool:
            counted.service.clock.now += 60
            with stream(address, counted.alice, job_id) as answer:
                return bool(answer.status_code == 200)

        wait_for(again, "the place of those who have left")


def stream(address: Address, secret: str, job_id: str) -> Any:
    """Somebody follows a job's events."""
    headers = {"authorization": f"Bearer {secret}", "accept": "text/event-stream"}
    return httpx.stream("GET", f"{address.url}/jobs/{job_id}/events", headers=headers, timeout=60)
