"""Bodies that are expensive to parse: rejected before parsing or within milliseconds, without delaying others."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import patch

import httpx
import pytest
from fastapi.testclient import TestClient

from service.use_cases.jobs import specs
from tests.support.fakes.service import KEY, FakeService, spec_body
from train_loop.spec import read_yaml

HOSTILE = (b"[" * 8190, b"{" * 8190, b"- " * 4000, b"? " * 4000, b"{a: " * 2000, b"a: {b: " + b"[" * 8000)


def _key(client: TestClient, roles: dict[str, str]) -> dict[str, str]:
    answer = client.post("/keys", json={"name": "alice", "roles": roles})
    return {"authorization": f"Bearer {answer.json()['secret']}"}


@pytest.mark.parametrize("path", ["/jobs", "/jobs/plan"])
def test_body_of_a_caller_without_editor_role_is_not_parsed(tmp_path: Path, path: str) -> None:
    # A body that no other test has sent: a known one is not parsed again.
    service, body = FakeService(tmp_path), spec_body(name=f"unseen{path.replace('/', '-')}")
    with service.client() as client, patch.object(specs, "read_yaml", side_effect=read_yaml) as parsed:
        answer = client.post(path, content=body, headers=_key(client, {"default": "viewer"}))
        assert (answer.status_code, answer.json()["code"]) == (403, "forbidden")
        assert not parsed.called
        assert client.post(path, content=body).status_code < 300
        assert parsed.called


def test_project_role_is_checked_before_the_rest_of_the_spec(tmp_path: Path) -> None:
    with FakeService(tmp_path).client() as client:
        key = _key(client, {"other": "editor"})
        answer = client.post("/jobs", content=json.dumps({"project": "mine", "nonsense": 1}), headers=key)
        assert (answer.status_code, answer.json()["code"]) == (403, "forbidden")
        answer = client.post("/jobs", content=json.dumps({"project": "other", "nonsense": 1}), headers=key)
        assert answer.status_code == 422


def test_submit_alongside_ten_hostile_bodies_is_not_slowed(url: str) -> None:
    with httpx.Client(base_url=url, headers={"authorization": f"Bearer {KEY}"}, timeout=120) as client:
        stop, refused = threading.Event(), list[int]()

        def attack(number: int) -> None:
            while not stop.is_set():
                body = HOSTILE[number % len(HOSTILE)]
                refused.append(client.post("/jobs", content=body).status_code)

        with ThreadPoolExecutor(10) as threads:
            attacks = [threads.submit(attack, number) for number in range(10)]
            try:
                while len(refused) < 10:
                    assert not any(one.done() for one in attacks)
                begin = time.monotonic()
                assert client.post("/jobs", content=spec_body()).status_code == 201
                # 0.05 s is usual; with Python's YAML loader in the thread of all submits, it took 15 s.
                assert time.monotonic() - begin < 10
            finally:
                stop.set()
            for one in attacks:
                one.result()
        assert set(refused) == {422}
