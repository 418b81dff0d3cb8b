"""Rate limits over HTTP: cheap rejections with Retry-After, and accepted requests afterwards."""

import json
import threading
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import pytest
from fastapi.testclient import TestClient
from structlog.contextvars import merge_contextvars
from structlog.testing import capture_logs

from service.domain.access.rate_limit import Rate
from service.domain.access.roles import OPERATOR, Key, Role
from service.errors import DatabaseUnreachable
from service.use_cases.access.rate_limits import Kind, Limits
from tests.support.fakes.service import KEY, FakeService, spec_body
from tests.support.fakes.stores import MemoryKeyStore
from tests.support.servers.streams import Address
from tests.support.waiting import wait_for

LIMITS = Limits(
    {Kind.READS: Rate(3, "minute"), Kind.WRITES: Rate(2, "minute"), Kind.UNAUTHENTICATED: Rate(4, "minute")},
    streams_per_key=2,
)


class CountingKeys(MemoryKeyStore):
    """A key store that counts lookups."""

    lookups = 0

    def get(self, key_id: str) -> Key | None:
        self.lookups += 1
        return super().get(key_id)


class LimitedService:
    """A service with rate limits and the keys of two callers."""

    def __init__(self, root: Path) -> None:
        self.keys = CountingKeys()
        self.service = FakeService(root, limits=LIMITS, keys=self.keys)
        self.client = TestClient(self.service.app(), base_url="http://127.0.0.1")
        self.alice, self.bob = (
            self.service.access.create(OPERATOR, name, {"default": Role.ADMIN}, None)[1] for name in ("alice", "bob")
        )

    def send(self, secret: str, method: str = "GET", path: str = "/me", **fields: Any) -> Any:
        """Send a request with `secret` and return the answer."""
        return self.client.request(method, path, headers={"authorization": f"Bearer {secret}"}, **fields)

    def codes(self, secret: str, times: int, method: str = "GET", path: str = "/me", **fields: Any) -> list[int]:
        """Send `times` requests and return their status codes."""
        return [self.send(secret, method, path, **fields).status_code for _ in range(times)]


@pytest.fixture
def api(tmp_path: Path) -> LimitedService:
    return LimitedService(tmp_path)


def test_keys_have_separate_read_and_write_limits_with_retry_after(api: LimitedService) -> None:
    assert api.codes(api.alice, 2) == [200] * 2
    api.service.clock.now += 10.5
    assert api.codes(api.alice, 2) == [200, 429]
    refused = api.send(api.alice)
    assert refused.headers["content-type"] == "application/problem+json"
    assert refused.headers["retry-after"] == "50"
    problem = refused.json()
    assert problem["code"] == "rate_limited"
    assert all(part in problem["detail"] for part in ("3/minute", "TRAINSHED_READS_PER_KEY", "50 s"))
    assert api.codes(api.alice, 3, "POST", "/jobs", content=spec_body()) == [201, 201, 429]
    assert api.codes(api.bob, 4) == [200, 200, 200, 429]
    assert api.codes(KEY, 20) == [200] * 20, "the operator has no limits"
    api.service.clock.now += 49.0
    assert api.codes(api.alice, 1) == [429]
    api.service.clock.now += 1.0
    assert api.codes(api.alice, 3) == [200, 200, 429]


def test_rejected_requests_do_not_read_the_store(api: LimitedService) -> None:
    api.codes(api.alice, 3)
    api.codes("trainshed_9_x", 4)
    before = api.keys.lookups
    assert api.codes(api.alice, 5) + api.codes("trainshed_9_y", 5) == [429] * 10
    assert api.keys.lookups == before


def test_guesses_are_limited_without_blocking_known_callers(api: LimitedService) -> None:
    assert api.codes(api.alice, 1) == [200]
    guesses = [api.send(f"trainshed_{number:04d}_{'0' * 64}") for number in range(4)]
    assert {answer.status_code for answer in guesses} == {401}
    refused = api.send(f"trainshed_0009_{'0' * 64}")
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "60")
    assert "TRAINSHED_STRANGERS_PER_ADDRESS" in refused.json()["detail"]
    assert api.client.get("/me").status_code == 429, "a request without a key is limited as well"
    assert api.codes(api.alice, 1) + api.codes(KEY, 1) == [200, 200]
    assert api.codes(api.bob, 1) == [429], "an unknown key may be a guess"
    assert api.client.get("/healthz").status_code == 200
    api.service.clock.now += 60
    assert api.codes(api.bob, 1) == [200]


@pytest.mark.parametrize("secret", ["", "guess", "trainshed_0009_guess"])
def test_every_path_is_limited_without_a_key(api: LimitedService, secret: str) -> None:
    headers = {"authorization": f"Bearer {secret}"} if secret else {}
    for path in ("/", "/docs", "/docs/swagger-ui.css", "/openapi.json", "/schemas/job.json", "/nowhere", "/metrics"):
        sent = [api.client.get(path, headers=headers, follow_redirects=False) for _ in range(6)]
        assert [answer.status_code == 429 for answer in sent] == [False] * 4 + [True] * 2, path
        assert [answer.headers.get("connection") for answer in sent] == [None] * 4 + ["close"] * 2
        assert api.codes(KEY, 1, path="/openapi.json") == [200], "the operator has no limits"
        api.service.clock.now += 60.0


@pytest.mark.parametrize("path", ["/healthz", "/readyz"])
def test_probe_is_answered_over_the_limit_and_closes_its_connection(api: LimitedService, path: str) -> None:
    sent = [api.client.get(path) for _ in range(6)]
    assert {answer.status_code for answer in sent} == {200}
    assert [answer.headers.get("connection") for answer in sent] == [None] * 4 + ["close"] * 2


def test_outage_does_not_count_against_strangers(api: LimitedService) -> None:
    with patch.object(api.keys, "get", side_effect=DatabaseUnreachable.because("it is away")):
        assert api.codes("trainshed_0009_guess", 6) == [503] * 6


def test_revoked_key_counts_as_unauthenticated(api: LimitedService) -> None:
    assert api.codes(api.alice, 1) == [200]
    key_id = api.send(api.alice).json()["id"]
    api.send(KEY, "DELETE", f"/keys/{key_id}")
    assert api.codes(api.alice, 5) == [401] * 4 + [429]


def test_log_names_rejected_requests_without_their_secrets(api: LimitedService) -> None:
    with capture_logs(processors=[merge_contextvars]) as lines:
        api.codes(api.alice, 6)
        for _ in range(6):
            api.client.get("/me", headers={"authorization": "Bearer trainshed_0009_guess", "x-request-id": "r-1"})
    fields = ("event", "method", "path", "client")
    assert {tuple(line[name] for name in fields) for line in lines} == {("refused", "GET", "/me", "testclient")}
    limited, unknown = (429, "rate_limited"), (401, "unauthorized")
    assert [(line["status"], line["code"]) for line in lines] == [limited, *[unknown] * 4, limited]
    assert [line["request_id"] for line in lines][1:] == ["r-1"] * 5
    assert not any(secret in str(lines) for secret in ("guess", api.alice))


def test_streams_are_counted_while_they_are_open(api: LimitedService) -> None:
    job_id, address, leave = api.service.submit().id, Address(api.service), threading.Event()
    begun = list[str]()

    def follow() -> None:
        with stream(address, api.alice, job_id) as answer:
            lines = answer.iter_lines()
            begun.append(next(lines))
            leave.wait(60)

    with address.serving():
        readers = [threading.Thread(target=follow, daemon=True) for _ in range(2)]
        for reader in readers:
            reader.start()
        wait_for(lambda: len(begun) == 2, "both streams")
        with stream(address, api.alice, job_id) as refused:
            assert refused.status_code == 429
            assert json.loads(refused.read())["code"] == "rate_limited"
            assert int(refused.headers["retry-after"]) > 0
        with stream(address, KEY, job_id) as other:
            assert other.status_code == 200
        leave.set()
        for reader in readers:
            reader.join()

        def again() -> bool:
            api.service.clock.now += 60
            with stream(address, api.alice, job_id) as answer:
                return bool(answer.status_code == 200)

        wait_for(again, "the slots of the closed streams")


def stream(address: Address, secret: str, job_id: str) -> Any:
    """Open a stream of a job's events."""
    headers = {"authorization": f"Bearer {secret}", "accept": "text/event-stream"}
    return httpx.stream("GET", f"{address.url}/jobs/{job_id}/events", headers=headers, timeout=60)
