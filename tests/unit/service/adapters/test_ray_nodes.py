"""Nodes parsed from the dashboard's JSON as Ray 2.60 sends it."""

import json
from typing import Any

from service.adapters.ray.nodes import NODES, SUMMARY, USAGE, read_nodes

GPUS = [{"index": 0, "name": "H100", "memoryUsed": 0, "memoryTotal": 81559}]
GROUP = "CPU_group_0_93f100cb05afe3a7ea614d81280601000000"


def dashboard_json(usage: dict[str, Any] | None) -> dict[str, str]:
    alive = {
        "node_id": "0a7a",
        "node_ip": "10.0.0.2",
        "is_head_node": False,
        "state": "ALIVE",
        "state_message": None,
        "node_name": "10.0.0.2",
        "resources_total": {
            "object_store_memory": 8e7,
            "CPU": 2.0,
            "accelerator_type:A100": 1.0,
            "node:10.0.0.2": 1.0,
            GROUP: 1.0,
        },
        "start_time_ms": 1795537378886,
        "end_time_ms": 0,
    }
    dead = alive | {"node_id": "0b7b", "state": "DEAD", "state_message": "Terminated due to preemption: going"}
    dead["end_time_ms"] = 1795537385901
    raylets = [
        {"raylet": {"nodeId": "0a7a", "nodeManagerHostname": "node2"}, "mem": [16e9, 9e9, 44.0, 7e9], "gpus": GPUS},
        {"raylet": {"nodeId": "0b7b", "nodeManagerHostname": ""}},
    ]
    report = None if usage is None else {"loadMetricsReport": {"usageByNode": usage}}
    return {
        NODES: json.dumps({"data": {"result": {"result": [alive, dead]}}}),
        SUMMARY: json.dumps({"data": {"summary": raylets}}),
        USAGE: json.dumps({"data": {"clusterStatus": report}}),
    }


def test_nodes_have_hosts_free_resources_and_death_message() -> None:
    usage = {"0a7a": {"CPU": [1.5, 2.0], "acceleratorType:A100": [1.0, 1.0]}}
    hosts = {"0b7b": "node3", "gone": "node9"}
    alive, dead = read_nodes(dashboard_json(usage).__getitem__, hosts)
    assert (alive.host, alive.address, alive.alive, alive.started_at) == ("node2", "10.0.0.2", True, 1795537378.886)
    assert alive.total == {"CPU": 2.0, "accelerator_type:A100": 1.0}
    assert alive.free == {"CPU": 0.5, "accelerator_type:A100": 0.0}
    assert (alive.memory, alive.gpu_memory, alive.object_store) == (16 * 10**9, (81559 << 20,), 8 * 10**7)
    assert (alive.gpu, dead.gpu) == ("H100", None)
    assert (dead.memory, dead.gpu_memory) == (None, None)
    assert (dead.host, dead.alive, dead.free, dead.ended_at) == ("node3", False, None, 1795537385.901)
    assert dead.message == "Terminated due to preemption: going"
    assert hosts == {"0a7a": "node2", "0b7b": "node3"}


def test_free_resources_are_unknown_if_ray_does_not_report_usage() -> None:
    assert [node.free for node in read_nodes(dashboard_json(None).__getitem__, {})] == [None, None]


def test_memory_in_another_format_is_unknown() -> None:
    answers = dashboard_json(None)
    answers[SUMMARY] = json.dumps(
        {"data": {"summary": [{"raylet": {"nodeId": "0a7a"}, "mem": {"total": 1}, "gpus": [{"memory": "large"}]}]}}
    )
    alive, _ = read_nodes(answers.__getitem__, {})
    assert (alive.memory, alive.gpu_memory) == (None, None)
