"""Specs with names of other tools: the plan shows both forms, jobs store the canonical one."""

from typing import Any

import pytest
from fastapi.testclient import TestClient

from tests.support.fakes.service import FakeService, spec_body
from train_loop.plan import SampleCount

NODES = ({"CPU": 5.0}, {"CPU": 5.0})


def on_two_nodes(service: FakeService) -> None:
    service.cluster.total, service.cluster.nodes_total = {"CPU": 10.0}, NODES


def test_plan_shows_what_was_written_and_what_it_became(client: TestClient, service: FakeService) -> None:
    on_two_nodes(service)
    body = spec_body(
        model={"dtype": "torch.float32", "disable_gradient_checkpointing": True},
        training={"learning_rate": "1e-3", "warmup_ratio": 0.1},
        strategy={"sharding_strategy": "_HYBRID_SHARD_ZERO2"},
        scaling={"num_workers": 8},
    )
    plan = client.post("/jobs/plan", content=body).json()
    assert {one["field"]: (one["written"], one["became"]) for one in plan["spellings"]} == {
        "model.dtype": ("torch.float32", {"model.dtype": "fp32"}),
        "model.disable_gradient_checkpointing": (True, {"model.gradient_checkpointing": "none"}),
        "training.learning_rate": ("1e-3", {"training.learning_rate": 1e-3}),
        "training.warmup_ratio": (0.1, {"training.warmup_steps": 0.1}),
        "strategy.sharding_strategy": (
            "_HYBRID_SHARD_ZERO2",
            {
                "strategy.sharding_strategy": "FULL_SHARD",
                "strategy.reshard_after_forward": False,
                "strategy.fsdp_size": 4,
            },
        ),
    }
    assert (plan["mesh"]["shape"], plan["nodes"]) == ([2, 4], [[0, 1, 2, 3], [4, 5, 6, 7]])
    assert plan["warnings"] == []
    spec = client.post("/jobs", content=body).json()["spec"]
    assert (spec["strategy"]["fsdp_size"], spec["training"]["warmup_steps"]) == (4, 0.1)
    assert client.post("/jobs/plan", content=spec_body()).json()["spellings"] == []


def test_fsdp_size_node_is_the_size_of_the_nodes(client: TestClient, service: FakeService) -> None:
    on_two_nodes(service)
    body = spec_body(strategy={"fsdp_size": "node"}, scaling={"num_workers": 8})
    (spelling,) = client.post("/jobs/plan", content=body).json()["spellings"]
    assert spelling == {"field": "strategy.fsdp_size", "written": "node", "became": {"strategy.fsdp_size": 4}}
    job = client.post("/jobs", content=body).json()
    clone = client.post(f"/jobs/{job['id']}/clone", json={"overrides": {"scaling": {"num_workers": 6}}}).json()
    assert (job["spec"]["strategy"]["fsdp_size"], "errors" in clone) == (4, True)
    overrides = {"strategy": {"fsdp_size": "node"}, "scaling": {"num_workers": 6}}
    clone = client.post(f"/jobs/{job['id']}/clone", json={"overrides": overrides}).json()
    assert clone["spec"]["strategy"]["fsdp_size"] == 3


@pytest.mark.parametrize(
    ("nodes", "workers", "message"),
    [
        ((), 8, "fsdp_size=node needs the nodes of the cluster, which are not known; write the number of workers of a"),
        (NODES, 7, "fsdp_size=node finds no equal groups of several workers: nodes with places for 5 (x 2 nodes)"),
    ],
)
def test_node_without_whole_groups_is_rejected(
    client: TestClient, service: FakeService, nodes: Any, workers: int, message: str
) -> None:
    on_two_nodes(service)
    service.cluster.nodes_total = nodes
    for path in ("/jobs", "/jobs/plan"):
        answer = client.post(path, content=spec_body(strategy={"fsdp_size": "node"}, scaling={"num_workers": workers}))
        (error,) = answer.json()["errors"]
        assert (answer.status_code, error["pointer"]) == (422, "/strategy/fsdp_size")
        assert error["message"].startswith(message)


def test_plan_warns_of_gathers_across_nodes(client: TestClient, service: FakeService) -> None:
    on_two_nodes(service)
    for path in ("/jobs", "/jobs/plan"):
        (warning,) = client.post(path, content=spec_body(scaling={"num_workers": 8})).json()["warnings"]
        assert warning.startswith("1 of 1 FSDP groups of 8 workers cross nodes")
        assert "fsdp_size: node (here 4)" in warning


def test_plan_names_the_setting_that_ends_the_run(client: TestClient, service: FakeService) -> None:
    service.preflight.count = SampleCount(40, exact=True)
    both = {"learning_rate": 1e-3, "global_batch_size": 4, "num_train_epochs": 1}
    found = [
        client.post("/jobs/plan", content=spec_body(training=both | {"max_steps": steps})).json() for steps in (9, 11)
    ]
    assert [(plan["steps"], plan["ends_by"]) for plan in found] == [(9, "max_steps"), (10, "num_train_epochs")]
    service.preflight.count = None
    plan = client.post("/jobs/plan", content=spec_body(training=both | {"max_steps": 9})).json()
    assert (plan["steps"], plan["ends_by"]) == (None, None)
