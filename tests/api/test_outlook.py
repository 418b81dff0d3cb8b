"""Plans on a GPU: memory against the device, throughput, and suggestions."""

from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from service.use_cases.jobs.outlook import DeviceQuestion, find_outlook
from tests.support.builders.specs import TINY
from tests.support.clients.command import run
from tests.support.fakes.service import FakeService, spec_body
from train_loop.plan import NodeRoom, plan_job, read_shape
from train_loop.spec import parse_text

GIB = 1 << 30
SIZES = {"vocab_size": 32000, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80}
SIZES |= {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128}
PARTS: dict[str, dict[str, Any]] = {
    "model": {"config": TINY | SIZES, "dtype": "bf16"},
    "data": {"train": {"path": "/data/a"}, "sequence_length": 4096},
    "scaling": {"num_workers": 8, "resources_per_worker": {"CPU": 8.0, "GPU": 1.0}},
}
LARGE = spec_body(**PARTS)


def test_plan_on_a_named_gpu_need_not_fit_the_cluster(service: FakeService, client: TestClient) -> None:
    service.cluster.memory = 8 * GIB
    answer = client.post("/jobs/plan?device=A100-80GB&suggest=true", content=LARGE)
    assert answer.status_code == 200, answer.text
    plan = answer.json()
    found = plan["outlook"]
    assert (found["device"]["name"], found["device"]["memory_bytes"], found["device"]["flops"]) == (
        "a100-80g",
        80 * GIB,
        312e12,
    )
    assert found["verdict"] == "does_not_fit"
    assert found["needed_bytes"] > plan["memory"]["total_bytes"] > 80 * GIB
    assert found["tokens_per_second"]["least"] < found["tokens_per_second"]["most"]
    assert {"matrix_products", "exchange_of_parameters", "optimizer"} <= {part["name"] for part in found["parts"]}
    assert any(one.startswith("matrix products reach 50 to 90 % of 312 TFLOP/s") for one in found["assumptions"])
    first = found["suggestions"][0]
    assert (first["change"], first["overrides"]) == (
        "strategy.offload_policy: true",
        {"strategy": {"offload_policy": True}},
    )
    assert first["needed_bytes"] < 80 * GIB


@pytest.mark.parametrize("fsdp_size", [0, "node"])
@pytest.mark.parametrize("workers", [1, 2, 3, 4, 5, 8, 16])
def test_plan_on_a_named_gpu_is_not_refused_for_the_cpus_of_a_laptop(
    service: FakeService, client: TestClient, workers: int, fsdp_size: Any
) -> None:
    service.cluster.total = {"CPU": 2.0}
    service.cluster.nodes_total = ({"CPU": 2.0},)
    scaling = {"num_workers": workers, "resources_per_worker": {"CPU": 1.0, "GPU": 1.0}}
    body = spec_body(strategy={"fsdp_size": fsdp_size}, scaling=scaling)
    answer = client.post("/jobs/plan?device=h100-80g&suggest=true", content=body)
    assert answer.status_code == 200, answer.text
    mesh = answer.json()["mesh"]
    assert mesh["fsdp"] == (min(workers, 8) if fsdp_size else workers)


def test_node_of_a_named_gpu_is_a_host_with_its_usual_number_of_gpus(client: TestClient) -> None:
    for device, size in (("h100-80g", 8), ("gb200", 16)):
        scaling = {"num_workers": 16, "resources_per_worker": {"CPU": 1.0, "GPU": 1.0}}
        body = spec_body(strategy={"fsdp_size": "node"}, scaling=scaling)
        (spelling,) = client.post(f"/jobs/plan?device={device}", content=body).json()["spellings"]
        assert spelling["became"] == {"strategy.fsdp_size": size}


def test_plan_says_what_is_chosen(client: TestClient) -> None:
    found = client.post("/jobs/plan?device=h200", content=LARGE).json()
    assert found["outlook"]["suggestions"] is None
    chosen = found["choices"]
    assert chosen["dtypes"] == {"weights": "fp32", "reduction": "fp32", "compute": "bf16"}
    assert (chosen["attention"], chosen["checkpointing"]) == ("auto", "full")
    assert (chosen["backend"], chosen["cores"]) == ("cpu:gloo,cuda:nccl", 8.0)
    assert {group["optimizer"] for group in chosen["optimizer_groups"]} == {"adamw"}


@pytest.mark.parametrize(
    ("query", "spec", "pointer", "message"),
    [
        ("device=h101", LARGE, "/query/device", "unknown device 'h101'; did you mean "),
        ("device=h200", spec_body(), "/query/device", "the workers of the spec request no GPU; add GPU: 1 to "),
        ("suggest=true", spec_body(), "/query/suggest", "no GPU of the cluster is known; name a device"),
    ],
)
def test_question_without_an_answer_is_refused(
    client: TestClient, query: str, spec: str, pointer: str, message: str
) -> None:
    answer = client.post(f"/jobs/plan?{query}", content=spec)
    assert answer.status_code == 422
    (problem,) = answer.json()["errors"]
    assert problem["pointer"] == pointer
    assert problem["message"].startswith(message)


def test_cluster_without_known_gpus_has_no_outlook(client: TestClient) -> None:
    assert client.post("/jobs/plan", content=spec_body()).json()["outlook"] is None


def test_device_of_the_cluster_is_that_of_its_smallest_nodes() -> None:
    spec = parse_text(LARGE.encode())
    plan = plan_job(spec, read_shape(TINY | SIZES))
    large = NodeRoom({"GPU": 4.0}, devices=(143771 << 20,) * 4, gpu="NVIDIA H200")
    small = NodeRoom({"GPU": 8.0}, devices=(81559 << 20,) * 8, gpu="NVIDIA H100 80GB HBM3")
    outlook = find_outlook(DeviceQuestion(), spec, plan, [NodeRoom({"CPU": 4.0}), large, small])
    assert outlook is not None
    assert (outlook.device.name, outlook.device.memory, outlook.device.domain) == ("h100-80g", 81559 << 20, 8)
    for unknown in (None, "NVIDIA X999"):
        nodes = [small, NodeRoom({"GPU": 1.0}, devices=(GIB,), gpu=unknown)]
        assert find_outlook(DeviceQuestion(), spec, plan, nodes) is None


def test_plan_command_prints_memory_throughput_and_suggestions(home: Path) -> None:
    file = home / "large.json"
    file.write_text(LARGE)
    shown = run("plan", str(file), "--device", "a100-80g", "--suggest")
    assert shown.exit_code == 0, shown.stderr
    for text in ("A100 80GB SXM, 80 GiB", "does not fit", "optimizer", "2 Adam moments x 4 bytes", "tokens per second"):
        assert text in shown.stdout
    assert "strategy.offload_policy: true" in shown.stdout
    assert "assumed: matrix products reach" in shown.stdout
    assert "no change is needed" in run("plan", str(home / "large.json"), "--device", "b200", "--suggest").stdout


@pytest.mark.parametrize(("query", "size", "by"), [("?device=h200", 4, "memory"), ("", 1, "workers")])
def test_plan_has_the_micro_batch_that_workers_would_choose(client: TestClient, query: str, size: int, by: str) -> None:
    training = {"per_device_train_batch_size": "auto", "global_batch_size": 32}
    body = spec_body(**PARTS | {"model": {"config": TINY, "dtype": "bf16"}, "training": training})
    plan = client.post(f"/jobs/plan{query}", content=body).json()
    assert (plan["micro_batch_size"], plan["micro_batch_by"]) == (size, by)
    assert (plan["global_batch_size"], plan["gradient_accumulation_steps"]) == (32, 4 // size)
    if query:
        assert plan["outlook"]["largest_micro_batch"] == size
