"""Webhooks over HTTP and with the real process: no message is lost when it is killed."""

import json
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import standardwebhooks
from fastapi.testclient import TestClient

from service.config.settings import Settings
from service.domain.jobs.job import JobState
from service.domain.webhooks.delivery import Answer, Delivery, Message
from tests.support.fakes.service import FakeService, spec_body
from tests.support.forks.service_forks import ForkedService
from tests.support.servers.receivers import Receiver, answer, never_answer, receiving
from tests.support.servers.served import served
from tests.support.waiting import wait_for

REQUEST = {"project": "default", "url": "https://hooks.example/in?a=b"}


@pytest.fixture
def made(client: TestClient) -> dict[str, Any]:
    """Create a webhook and return the answer."""
    answer = client.post("/webhooks", json=REQUEST)
    assert answer.status_code == 201, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_created_webhook_shows_its_secret_once(client: TestClient, made: dict[str, Any]) -> None:
    webhook = made["webhook"]
    assert made["secret"].startswith("whsec_")
    assert webhook["states"] == list(JobState)
    assert client.get(f"/webhooks/{webhook['id']}").json() == webhook
    assert client.get("/webhooks").json() == {"data": [webhook]}
    assert client.get("/webhooks?project=default").json() == {"data": [webhook]}
    assert client.get("/webhooks?project=other").json() == {"data": []}
    shown = "".join(client.get(path).text for path in ("/webhooks", f"/webhooks/{webhook['id']}", "/audit"))
    assert "whsec_" not in shown
    assert client.delete(f"/webhooks/{webhook['id']}").status_code == 204
    for call in (client.get, client.delete):
        gone = call(f"/webhooks/{webhook['id']}")
        assert (gone.status_code, gone.json()["code"]) == (404, "webhook_not_found")


@pytest.mark.parametrize(
    ("change", "pointer", "word"),
    [
        ({"url": "http://hooks.example/"}, "/url", "http is not allowed for hooks.example; use https"),
        ({"url": "https://127.0.0.1/"}, "/url", "not on the public internet"),
        ({"url": "https://[::ffff:1.1.1.1]/"}, "/url", "not on the public internet"),
        ({"url": "https://169.254.169.254/latest"}, "/url", "TRAINSHED_WEBHOOK_ALLOWED"),
        ({"url": "https://me:secret@hooks.example/"}, "/url", "remove them"),
        ({"url": ""}, "/url", "at least 1"),
        ({"url": "https://" + "x" * 2048}, "/url", "at most 2048"),
        ({"project": "No!"}, "/project", "pattern"),
        ({"states": ["DONE"]}, "/states/0", "QUEUED"),
        ({"more": 1}, "/more", "not permitted"),
    ],
)
def test_invalid_webhook_is_rejected(
    client: TestClient, service: FakeService, change: dict[str, object], pointer: str, word: str
) -> None:
    refused = client.post("/webhooks", json=REQUEST | change)
    (error,) = refused.json()["errors"]
    assert (refused.status_code, error["pointer"]) == (422, pointer)
    assert word in error["message"]
    assert service.hooks.webhooks == {}


def test_webhook_limit_of_a_project_returns_409(client: TestClient) -> None:
    found = [client.post("/webhooks", json=REQUEST).status_code for _ in range(33)]
    assert found == [201] * 32 + [409]


def test_test_call_returns_its_result(client: TestClient, service: FakeService, made: dict[str, Any]) -> None:
    path = f"/webhooks/{made['webhook']['id']}/test"
    service.sender.answers = [Answer(None, "no answer within 10 s"), Answer(204), None]
    found = [client.post(path) for _ in range(3)]
    assert found[0].json() == {"received": False, "status": None, "error": "no answer within 10 s"}
    assert found[1].json() == {"received": True, "status": 204, "error": None}
    assert (found[2].status_code, found[2].json()["code"]) == (503, "busy")
    _, message = service.sender.sent[0]
    assert json.loads(message.body)["type"] == "webhook.test"
    assert client.get(f"/webhooks/{made['webhook']['id']}/deliveries").json()["data"] == []


def test_received_test_call_enables_a_disabled_webhook(
    client: TestClient, service: FakeService, made: dict[str, Any]
) -> None:
    webhook_id = made["webhook"]["id"]
    webhook = service.hooks.webhooks[webhook_id]
    object.__setattr__(webhook, "disabled_at", 5.0)
    service.hooks.log.append(Delivery(1, webhook_id, Message("m", "job.state", "job-1", "{}", 1.0), 1.0, None))
    refused = client.post(f"/webhooks/{webhook_id}/deliveries/1/redeliver")
    assert (refused.status_code, refused.json()["code"]) == (409, "illegal_state")
    service.sender.answers = [Answer(500, "answered 500"), Answer(200)]
    for disabled in (True, False):
        client.post(f"/webhooks/{webhook_id}/test")
        assert (client.get(f"/webhooks/{webhook_id}").json()["disabled_at"] is not None) == disabled
    again = client.post(f"/webhooks/{webhook_id}/deliveries/1/redeliver")
    assert (again.status_code, again.json()["settled"]) == (200, "waiting")
    assert client.post(f"/webhooks/{webhook_id}/deliveries/2/redeliver").json()["code"] == "delivery_not_found"
    deeds = [deed["action"] for deed in client.get("/audit").json()["data"]]
    assert deeds == ["webhook.redeliver", "webhook.enable", "webhook.create"]


def test_rotation_returns_another_secret_and_keeps_the_previous_one_for_a_day(
    client: TestClient, service: FakeService, made: dict[str, Any]
) -> None:
    rotated = client.post(f"/webhooks/{made['webhook']['id']}/rotate").json()
    assert rotated["secret"] != made["secret"]
    assert rotated["webhook"]["previous_secret_until"] == "1970-01-02T00:16:40.000+00:00"
    assert service.hooks.webhooks[made["webhook"]["id"]].secrets(1001.0) == (rotated["secret"], made["secret"])


def test_deliveries_are_paged_newest_first(client: TestClient, service: FakeService, made: dict[str, Any]) -> None:
    webhook_id = made["webhook"]["id"]
    for number in range(1, 6):
        message = Message(f"job-1.{number}", "job.state", "job-1", "{}", 1.0)
        service.hooks.log.append(Delivery(number, webhook_id, message, since=1.0, next_at=2.0))
    first = client.get(f"/webhooks/{webhook_id}/deliveries?limit=2").json()
    assert [one["number"] for one in first["data"]] == [5, 4]
    assert first["data"][0] == {
        "number": 5,
        "message_id": "job-1.5",
        "event": "job.state",
        "job_id": "job-1",
        "created_at": "1970-01-01T00:00:01.000+00:00",
        "settled": "waiting",
        "attempts": 0,
        "status": None,
        "error": None,
        "next_try_at": "1970-01-01T00:00:02.000+00:00",
        "delivered_at": None,
    }
    rest = client.get(f"/webhooks/{webhook_id}/deliveries?after={first['next']}&limit=9").json()
    assert ([one["number"] for one in rest["data"]], rest["has_more"], rest["next"]) == ([3, 2, 1], False, None)


def test_invalid_webhook_allowed_setting_is_rejected() -> None:
    with pytest.raises(ValueError, match="is not a CIDR or host name"):
        Settings(webhook_allowed=("10.0.0.0/99",))


@contextmanager
def serving(home: Path) -> Iterator[tuple[subprocess.Popen[str] | ForkedService, httpx.Client]]:
    """Start a real service that may call receivers on loopback."""
    with served(home, TRAINSHED_WEBHOOK_ALLOWED="127.0.0.1") as service:
        service.ready()
        yield service.process, service.client


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving(answer(500)) as found:
        yield found


def make(client: httpx.Client, receiver: Receiver) -> tuple[str, str]:
    """Create a webhook; return its id and its secret."""
    body = {"project": "default", "url": receiver.url(), "states": ["QUEUED", "CANCELLED"]}
    found = client.post("/webhooks", json=body).raise_for_status().json()
    return found["webhook"]["id"], found["secret"]


@pytest.mark.slow
def test_no_message_is_lost_when_the_service_is_killed(home: Path, receiver: Receiver) -> None:
    with serving(home) as (process, client):
        webhook_id, secret = make(client, receiver)
        jobs = [client.post("/jobs", content=spec_body()).raise_for_status().json()["id"] for _ in range(3)]
        for job_id in jobs:
            client.post(f"/jobs/{job_id}/cancel", json={}).raise_for_status()
        wait_for(lambda: receiver.got, "a first attempt, which fails")
        # Kill the service in the middle of an attempt.
        receiver.act = never_answer
        client.post(f"/webhooks/{webhook_id}/deliveries/1/redeliver").raise_for_status()
        before = len(receiver.got)
        wait_for(lambda: len(receiver.got) > before, "an attempt that is not answered")
        process.send_signal(signal.SIGKILL)
        process.wait(60)
    failed = {one.headers["webhook-id"]: one.body for one in receiver.got}
    receiver.got.clear()
    receiver.act = answer(200)
    wanted = {f"{job_id}.1" for job_id in jobs}
    with serving(home) as (process, client):
        path = f"/webhooks/{webhook_id}/deliveries"

        def all_delivered() -> bool:
            log = client.get(path).raise_for_status().json()["data"]
            return len(log) >= 6 and all(one["settled"] == "delivered" for one in log)

        wait_for(all_delivered, "every message", seconds=120.0)
    got = {one.headers["webhook-id"]: one for one in receiver.got}
    assert wanted <= got.keys()
    assert {json.loads(one.body)["data"]["to"] for one in got.values()} == {"QUEUED", "CANCELLED"}
    assert len(got) == 6
    assert failed.keys() <= got.keys()
    assert all(got[message_id].body == body for message_id, body in failed.items()), "each attempt sends the same body"
    for one in got.values():
        standardwebhooks.Webhook(secret).verify(one.body, one.headers)
    order = [one.headers["webhook-id"] for one in receiver.got]
    for job_id in jobs:
        mine = [int(message_id.rpartition(".")[2]) for message_id in order if message_id.startswith(job_id)]
        assert mine == sorted(mine)


def test_redirect_is_reported_and_a_slow_receiver_does_not_delay_shutdown(home: Path, receiver: Receiver) -> None:
    with receiving() as inside, serving(home) as (process, client):
        receiver.act = answer(302, location=inside.url())
        webhook_id, _ = make(client, receiver)
        trial = client.post(f"/webhooks/{webhook_id}/test").json()
        assert (trial["received"], trial["status"]) == (False, 302)
        assert "redirects are not followed" in trial["error"]
        job_id = client.post("/jobs", content=spec_body()).raise_for_status().json()["id"]

        def tried() -> Any:
            (one,) = client.get(f"/webhooks/{webhook_id}/deliveries").json()["data"]
            return one if one["attempts"] else None

        delivery = wait_for(tried, "a first attempt")
        assert (delivery["settled"], delivery["status"]) == ("waiting", 302)
        assert "redirects are not followed" in delivery["error"]
        receiver.act = never_answer
        receiver.got.clear()
        client.post(f"/webhooks/{webhook_id}/deliveries/{delivery['number']}/redeliver").raise_for_status()
        wait_for(lambda: receiver.got, "an attempt that is not answered")
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0
    assert inside.got == []
    receiver.act = answer(200)
    receiver.got.clear()
    with serving(home):
        # The message that was in flight is due, because the lease was released.
        wait_for(lambda: receiver.got, "the message again")
    assert receiver.got[0].headers["webhook-id"] == f"{job_id}.1"
