"""Followed byte for byte: by many at once, over attempts, and over a service that ends and comes back."""

import json
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from tests.support.service import KEY, FakeService
from tests.support.waiting import wait_for
from train_loop.run_dir import Outcome

RANKS, ATTEMPTS, LINES = 8, 3, 40


@pytest.fixture
def service(tmp_path: Path) -> FakeService:
    return FakeService(tmp_path)


class Address:
    """Where the service listens, each time that it starts anew."""

    def __init__(self, service: FakeService) -> None:
        self._service = service
        self.url: str | None = None
        self.starts = 0

    @contextmanager
    def serving(self) -> Iterator[None]:
        """A real server on a port of its own, until the block ends."""
        app = self._service.app()
        server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
        thread = threading.Thread(target=server.run)
        thread.start()
        try:
            wait_for(lambda: server.started, "the server")
            self.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
            self.starts += 1
            yield
        finally:
            self.url = None
            app.state.leaving.set()
            server.should_exit = True
            thread.join()


class Reader(threading.Thread):
    """Follows one address to the end of the job, from the last id that it got whenever it is cut off."""

    def __init__(self, address: Address, path: str) -> None:
        super().__init__(daemon=True)
        self._address, self._path = address, path
        self._last_id: str | None = None
        self.got: list[Any] = []
        self.delays: list[float] = []
        self.connections = 0
        self.start()

    def run(self) -> None:
        """Until the stream says that it is over."""
        while not self._follow():
            time.sleep(0.05)

    def _follow(self) -> bool:
        headers = {"authorization": f"Bearer {KEY}", "accept": "text/event-stream"}
        headers |= {"last-event-id": self._last_id} if self._last_id else {}
        if self._address.url is None:
            return False
        try:
            with httpx.stream("GET", self._address.url + self._path, headers=headers, timeout=30) as answer:
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
    """One attempt: lines of every rank and events, in no even pace, torn now and then."""
    chance, folder = random.Random(attempt), service.run_dir(job_id).attempt(attempt)
    folder.logs.mkdir(parents=True)
    for number in range(LINES):
        for rank in range(RANKS):
            line = f"attempt {attempt} rank {rank} line {number} {'ü' * chance.randint(0, 40)}\ttab\n".encode()
            cut = chance.randint(0, len(line))
            with folder.rank_log(rank).open("ab", buffering=0) as log:
                log.write(line[:cut])
                log.write(line[cut:])
        service.event(job_id, "said", attempt=attempt, number=number)
        if number == LINES // 2:
            restart.set()
        time.sleep(chance.random() * 0.06)


def test_nothing_is_missed_or_seen_twice_over_restarts(service: FakeService) -> None:
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
    while not done.is_set():
        with address.serving():
            wait_for(lambda: restart.is_set() or done.is_set(), "a moment to restart")
            restart.clear()
    with address.serving():
        for reader in (*readers.values(), events):
            reader.join(timeout=30)
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


def test_lines_come_while_the_job_runs_and_the_end_is_told(service: FakeService) -> None:
    job_id, address = service.submit().id, Address(service)
    service.reconciler().run_once()
    with address.serving():
        reader = Reader(address, f"/jobs/{job_id}/metrics")
        for step in range(1, 4):
            service.metric(job_id, step=step)
            wait_for(lambda step=step: len(reader.got) == step, "the line")  # type: ignore[misc]
        service.end(job_id, Outcome(result="succeeded"))
        service.reconciler().run_once()
        reader.join(timeout=10)
        assert not reader.is_alive()
    assert [line["step"] for line in reader.got] == [1, 2, 3]


def test_stream_of_no_job_is_not_found_and_a_bad_cursor_is_refused(service: FakeService) -> None:
    headers = {"accept": "text/event-stream"}
    with service.client() as client:
        job_id = service.submit().id
        assert client.get("/jobs/job-none/events", headers=headers).status_code == 404
        refused = client.get(f"/jobs/{job_id}/events", headers=headers | {"last-event-id": "x"})
        assert (refused.status_code, refused.json()["code"]) == (422, "invalid_request")
