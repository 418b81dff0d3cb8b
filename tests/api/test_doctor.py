"""Findings over HTTP: POST /doctor."""

from fastapi.testclient import TestClient

from tests.support.fakes.service import FakeService


def test_doctor_returns_findings_in_order(client: TestClient) -> None:
    answer = client.post("/doctor").json()
    assert answer["ok"] is True
    assert answer["findings"][0] == {
        "check": "ray.reachable",
        "verdict": "ok",
        "seen": "http://ray: Ray 2.60.0",
        "remedy": None,
    }
    assert {finding["verdict"] for finding in answer["findings"]} == {"ok"}


def test_doctor_accepts_every_admin_of_all_projects(client: TestClient, service: FakeService) -> None:
    made = client.post("/keys", json={"name": "ops", "roles": {"*": "admin"}}).json()
    assert client.post("/doctor", headers={"authorization": f"Bearer {made['secret']}"}).status_code == 200
