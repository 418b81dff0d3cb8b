"""Nodes of the cluster over HTTP and with `trainshed nodes`."""

from dataclasses import replace
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from service.domain.access.roles import OPERATOR, Role
from service.domain.jobs.job import Job
from service.ports import Node
from service.use_cases.access.access import Access
from tests.support.clients.command import run
from tests.support.fakes.service import FakeService


def node(host: str, number: int, *, started: float = 100.0, died: float | None = None) -> Node:
    total, free = {"CPU": 2.0, "memory": 2.0**31}, {"CPU": 0.5, "memory": 2.0**30}
    message = None if died is None else "Unexpected termination: health check failed"
    return Node(
        f"id-{number}",
        host,
        f"10.0.0.{number}",
        alive=died is None,
        is_head=host == "head",
        total=total,
        free=free if died is None else None,
        started_at=started,
        ended_at=died,
        message=message,
    )


def training(service: FakeService, *hosts: str, project: str = "default") -> Job:
    """Start a job with one rank on each of `hosts`."""
    job = service.submit(project=project)
    service.reconciler().run_once()
    workers = [{"rank": rank, "host": host} for rank, host in enumerate(hosts)]
    service.event(job.id, "training_started", workers=workers, steps=20, replayed=0)
    return job


def test_nodes_are_listed_with_their_jobs_head_first(client: TestClient, service: FakeService) -> None:
    service.cluster.known_nodes = [node("node2", 2), node("head", 1), node("node3", 3)]
    job = training(service, "node2", "node2")
    first, second, third = client.get("/nodes").json()["data"]
    assert [first["host"], second["host"], third["host"]] == ["head", "node2", "node3"]
    assert second == {
        "id": "id-2",
        "host": "node2",
        "address": "10.0.0.2",
        "is_head": False,
        "state": "alive",
        "since": "1970-01-01T00:01:40.000+00:00",
        "total": {"CPU": 2.0, "memory": 2.0**31},
        "free": {"CPU": 0.5, "memory": 2.0**30},
        "jobs": [job.id],
        "last_failure": None,
    }
    assert (first["is_head"], first["jobs"], third["jobs"]) == (True, [], [])


def test_draining_host_is_listed_as_draining(client: TestClient, service: FakeService) -> None:
    service.cluster.known_nodes = [node("node2", 2), node("node3", 3)]
    service.event(training(service, "node2", "node3").id, "preemption_notice", ranks=[1], deadline=None)
    assert [one["state"] for one in client.get("/nodes").json()["data"]] == ["alive", "draining"]


def test_dead_host_is_listed_for_an_hour_unless_it_has_rejoined(client: TestClient, service: FakeService) -> None:
    dead, old = node("node3", 3, died=900.0), node("node9", 9, died=1000.0 - 3601)
    service.cluster.known_nodes = [node("node2", 2), dead, old]
    alive, gone = client.get("/nodes").json()["data"]
    assert (alive["host"], gone["host"], gone["state"], gone["free"]) == ("node2", "node3", "dead", None)
    assert gone["last_failure"]["message"] == "Unexpected termination: health check failed"
    service.cluster.known_nodes.append(replace(node("node3", 3), id="id-33", started_at=950.0))
    again = client.get("/nodes").json()["data"]
    assert [(one["host"], one["state"]) for one in again] == [("node2", "alive"), ("node3", "alive")]
    assert again[1]["last_failure"]["time"] == "1970-01-01T00:15:00.000+00:00"


def test_each_death_of_a_host_has_its_own_failure(client: TestClient, service: FakeService) -> None:
    first, second = node("node3", 3, died=500.0), replace(node("node3", 3, died=900.0), id="id-33", message="no memory")
    service.cluster.known_nodes = [node("node2", 2), first, second]
    found = [(one["id"], one["last_failure"]["message"]) for one in client.get("/nodes").json()["data"][1:]]
    assert found == [("id-33", "no memory"), ("id-3", "Unexpected termination: health check failed")]


def test_newest_loss_that_names_a_host_is_its_last_failure(client: TestClient, service: FakeService) -> None:
    service.cluster.known_nodes = [node("node2", 2), node("node3", 3)]
    job = training(service, "node2", "node3")
    killed = "rank 1 on node3 was killed by signal 9"
    service.event(job.id, "workers_lost", ranks=[1], hosts=["node3"], error=killed)
    first, second = client.get("/nodes").json()["data"]
    assert (first["last_failure"], second["last_failure"]["message"]) == (None, killed)
    assert (first["jobs"], second["jobs"]) == ([], [])


def test_viewer_sees_all_hosts_and_only_the_jobs_of_its_projects(client: TestClient, service: FakeService) -> None:
    service.cluster.known_nodes = [node("node2", 2)]
    mine = training(service, "node2", project="nlp")
    training(service, "node2", project="vision")
    access: Access = service.access
    _, secret = access.create(OPERATOR, "viewer", {"nlp": Role.VIEWER}, None)
    (found,) = client.get("/nodes", headers={"Authorization": f"Bearer {secret}"}).json()["data"]
    assert (found["host"], found["jobs"]) == ("node2", [mine.id])


def test_unreachable_cluster_returns_503_with_the_start_of_the_outage(client: TestClient, service: FakeService) -> None:
    service.cluster.total, service.queue.silent_since = None, 990.0
    answer = client.get("/nodes")
    assert (answer.status_code, answer.json()["code"]) == (503, "cluster_unreachable")
    assert "has not answered since 00:16:30 UTC" in answer.json()["detail"]


@pytest.mark.usefixtures("home")
def test_nodes_command_prints_a_row_for_each_host(service: FakeService, home: Path) -> None:
    service.cluster.known_nodes = [node("node2", 2), node("node3", 3, died=900.0)]
    training(service, "node2", "node2")
    done = run("nodes")
    assert done.exit_code == 0
    head, first, second = done.stdout.splitlines()
    assert head.split() == ["host", "address", "state", "since", "free/total", "jobs", "last", "failure"]
    assert "0.5/2 CPU 1/2 GiB  job-0001" in first
    assert "dead" in second
    assert "health check failed" in second
    assert '"state": "dead"' in run("nodes", "--json").stdout
