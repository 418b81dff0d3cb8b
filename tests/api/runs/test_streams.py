"""Streams compared byte for byte: many readers at once, several attempts, and restarts of the service."""

import json
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.domain.access.oidc_claims import LEEWAY, Claims, TokenRules
from service.domain.access.roles import OPERATOR, Role
from service.use_cases.access.access import Tokens
from tests.support.fakes.service import KEY, FakeService
from tests.support.fakes.stores import MemoryTokens
from tests.support.servers.streams import Address
from tests.support.waiting import wait_for
from train_loop.run_dir import Outcome

RANKS, ATTEMPTS, LINES = 8, 3, 40


@pytest.fixture
def service(tmp_path: Path) -> FakeService:
    return FakeService(tmp_path)


class Reader(threading.Thread):
    """A thread that follows a stream to the end of the job and resumes from the last id after a disconnect."""

    def __init__(self, address: Address, path: str) -> None:
        super().__init__(daemon=True)
        self._address, self._path = address, path
        self._last_id: str | None = None
        self.got: list[Any] = []
        self.delays: list[float] = []
        self.connections = 0
        self.start()

    def run(self) -> None:
        """Follow until the stream sends the event `end`."""
        while not self._follow():
            time.sleep(0.05)

    def _follow(self) -> bool:
        headers = {"authorization": f"Bearer {KEY}", "accept": "text/event-stream"}
        headers |= {"last-event-id": self._last_id} if self._last_id else {}
        if self._address.url is None:
            return False
        try:
            with httpx.stream("GET", self._address.url + self._path, headers=headers, timeout=60) as answer:
                assert answer.headers["content-type"].startswith("text/event-stream")
                self.connections += 1
                return self._read(answer.iter_lines())
        except httpx.HTTPError:
            return False

    def _read(self, lines: Iterator[str]) -> bool:
        message = dict[str, str]()
        for line in lines:
            name, _, value = line.partition(": ")
            if name in ("id", "data", "event"):
                message[name] = value
            elif not line:
                if message.get("event") == "end":
                    return True
                if "data" in message:
                    self.got.append(json.loads(message["data"]))
                    self._last_id = message["id"]
                message = {}
        return False


def write(service: FakeService, job_id: str, attempt: int, restart: threading.Event) -> None:
    """Write the logs of all ranks and the events of an attempt, at a random pace and in torn lines."""
    chance, folder = random.Random(attempt), service.run_dir(job_id).attempt(attempt)
    folder.logs.mkdir(parents=True)
    for number in range(LINES):
        for rank in range(RANKS):
            line = f"attempt {attempt} rank {rank} line {number} {'ü' * chance.randint(0, 40)}\ttab\n".encode()
            cut = chance.randint(0, len(line))
            with folder.rank_log(rank).open("ab", buffering=0) as log:
                log.write(line[:cut])
                log.write(line[cut:])
        service.event(job_id, "note", attempt=attempt, number=number)
        if number == LINES // 2:
            restart.set()
        time.sleep(chance.random() * 0.06)


@pytest.mark.slow
def test_stream_over_restarts_misses_and_repeats_nothing(service: FakeService) -> None:
    job_id = service.submit(scaling={"num_workers": RANKS, "resources_per_worker": {"CPU": 0.5}}).id
    address, restart, done = Address(service), threading.Event(), threading.Event()
    service.reconciler().run_once()

    def work() -> None:
        for attempt in range(1, ATTEMPTS + 1):
            write(service, job_id, attempt, restart)
        service.end(job_id, Outcome(result="succeeded"))
        service.reconciler().run_once()
        done.set()

    readers = {rank: Reader(address, f"/jobs/{job_id}/logs?rank={rank}") for rank in range(RANKS)}
    events = Reader(address, f"/jobs/{job_id}/events")
    writer = threading.Thread(target=work)
    writer.start()
    whole = [*readers.values(), events]
    while not done.is_set():
        with address.serving():
            wait_for(lambda: done.is_set() or all(one.connections >= address.starts for one in whole), "all readers")
            wait_for(lambda: restart.is_set() or done.is_set(), "a moment to restart")
            restart.clear()
    with address.serving():
        for reader in (*readers.values(), events):
            reader.join(timeout=120)
            assert not reader.is_alive()
    writer.join()
    for rank, reader in readers.items():
        logs = [service.run_dir(job_id).attempt(number).rank_log(rank) for number in range(1, ATTEMPTS + 1)]
        assert "".join(f"{line}\n" for line in reader.got) == "".join(log.read_text() for log in logs)
        assert reader.connections >= address.starts - 1
    assert [(line["attempt"], line["number"]) for line in events.got] == [
        (attempt, number) for attempt in range(1, ATTEMPTS + 1) for number in range(LINES)
    ]
    assert address.starts >= ATTEMPTS


def test_lines_arrive_while_the_job_runs_and_the_stream_ends_with_it(service: FakeService) -> None:
    job_id, address = service.submit().id, Address(service)
    service.reconciler().run_once()
    with address.serving():
        reader = Reader(address, f"/jobs/{job_id}/metrics")
        for step in range(1, 4):
            service.metric(job_id, step=step)
            wait_for(lambda step=step: len(reader.got) == step, "the line")  # type: ignore[misc]
        service.end(job_id, Outcome(result="succeeded"))
        service.reconciler().run_once()
        reader.join(timeout=60)
        assert not reader.is_alive()
    assert [line["step"] for line in reader.got] == [1, 2, 3]


class LogStream(threading.Thread):
    """A thread that follows a job once, with a secret, until the stream ends."""

    def __init__(self, address: Address, job_id: str, secret: str) -> None:
        super().__init__(daemon=True)
        self._url, self._secret = f"{address.url}/jobs/{job_id}/events", secret
        self.lines = list[str]()
        self.start()

    def run(self) -> None:
        """Read to the end of the stream; a broken connection raises an error."""
        headers = {"authorization": f"Bearer {self._secret}", "accept": "text/event-stream"}
        with httpx.stream("GET", self._url, headers=headers, timeout=60) as answer:
            self.lines.extend(line for line in answer.iter_lines() if line)


@pytest.mark.slow
def test_stream_ends_with_its_key_on_every_replica_and_others_continue(tmp_path: Path) -> None:
    claims: dict[str, Claims] = {"t.o.ken": {"sub": "carol", "exp": 5000.0, "groups": ["all"]}}
    tokens = Tokens(MemoryTokens(claims), TokenRules("groups", {"all": {"default": Role.VIEWER}}))
    one = FakeService(tmp_path, tokens=tokens)
    two = FakeService(tmp_path, store=one.store, keys=one.keys, clock=one.clock, tokens=tokens)
    job_id = one.submit().id
    one.reconciler().run_once()
    (alice, secret), (_, over) = (one.access.create(OPERATOR, name, {"default": Role.VIEWER}, 3000.0) for name in "ab")
    here, there = Address(one), Address(two)
    with here.serving(), there.serving():
        with_keys = [LogStream(address, job_id, secret) for address in (here, there) for _ in range(3)]
        expiring, with_token, operator = (LogStream(there, job_id, sent) for sent in (over, "t.o.ken", KEY))
        followers = [*with_keys, expiring, with_token, operator]
        wait_for(lambda: all(reader.lines for reader in followers), "all streams")
        one.access.revoke(OPERATOR, alice.id)
        for ended, now in ((with_keys, 2000.0), ([expiring], 3000.0), ([with_token], 5000.0 + LEEWAY)):
            one.clock.now = now
            for reader in ended:
                reader.join(timeout=60)
                assert not reader.is_alive()
                assert reader.lines == [": begin", "id: 0.0"], "the stream has no end event"
                followers.remove(reader)
            assert all(reader.is_alive() for reader in followers)
        one.event(job_id, "note")
        wait_for(lambda: len(operator.lines) > 1, "a line in the remaining stream")


def test_stream_of_unknown_job_returns_404_and_invalid_cursor_422(service: FakeService) -> None:
    headers = {"accept": "text/event-stream"}
    with service.client() as client:
        job_id = service.submit().id
        assert client.get("/jobs/job-none/events", headers=headers).status_code == 404
        refused = client.get(f"/jobs/{job_id}/events", headers=headers | {"last-event-id": "x"})
        assert (refused.status_code, refused.json()["code"]) == (422, "invalid_request")
