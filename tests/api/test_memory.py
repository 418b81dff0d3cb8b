"""Jobs whose model does not fit the memory of the nodes: refused at plan and submit, or warned of."""

from typing import Any

import pytest
from fastapi.testclient import TestClient

from tests.support.fakes.service import FakeService, raw_spec, spec_body
from train_loop.plan import LargestRead

GIB = 1 << 30
SIZES = {"vocab_size": 152064, "hidden_size": 8192, "intermediate_size": 29568, "num_hidden_layers": 80}
LARGE: dict[str, Any] = {"config": raw_spec()["model"]["config"] | SIZES}


@pytest.mark.parametrize("path", ["/jobs/plan", "/jobs"])
def test_model_larger_than_the_nodes_is_refused_with_its_terms(
    service: FakeService, client: TestClient, path: str
) -> None:
    service.cluster.memory = 20 * GIB
    answer = client.post(path, content=spec_body(model=LARGE))
    assert answer.status_code == 422
    (problem,) = answer.json()["errors"]
    assert problem["pointer"] == "/model/config"
    assert problem["message"].startswith("the model does not fit: in a step, each of 2 workers needs ")
    assert "the node has 20.0 GiB for workers; no setting makes it fit" in problem["message"]
    assert client.post(path, content=spec_body()).status_code in (200, 201)


def test_named_change_makes_the_job_acceptable(service: FakeService, client: TestClient) -> None:
    service.cluster.memory = 1200 * GIB
    body = spec_body(model=LARGE, training={"global_batch_size": 8})
    (problem,) = client.post("/jobs", content=body).json()["errors"]
    assert "; cheapest change that fits: strategy.async_save_ckpt: false, with " in problem["message"]
    changed = spec_body(model=LARGE, training={"global_batch_size": 8}, strategy={"async_save_ckpt": False})
    assert client.post("/jobs", content=changed).status_code == 201


def test_plan_warns_of_unknown_memory_and_of_activations(service: FakeService, client: TestClient) -> None:
    def warnings(**parts: Any) -> list[str]:
        found: list[str] = client.post("/jobs/plan", content=spec_body(**parts)).json()["warnings"]
        return found

    assert warnings() == []
    service.cluster.memory = None
    assert warnings() == []
    (unknown,) = warnings(model=LARGE)
    assert unknown.startswith("the memory of the nodes is not known, so the model may not fit: each worker needs at")
    service.cluster.memory = 7 * GIB
    (likely,) = warnings(data={"sequence_length": 1 << 21, "packing": False})
    assert likely.startswith("a worker may run out of memory: in a step, with activations, each needs about ")


def test_elastic_job_never_gets_a_size_that_does_not_fit(service: FakeService, client: TestClient) -> None:
    service.cluster.total = {"CPU": 16.0}
    service.cluster.nodes_total = tuple({"CPU": 2.0} for _ in range(8))
    service.cluster.memory = 300 * GIB
    scaling = {"num_workers": {"min": 1, "max": 8}}
    body = spec_body(model=LARGE, scaling=scaling, training={"global_batch_size": 8})
    assert client.post("/jobs/plan", content=body).json()["sizes"] == [8]


def test_preparation_without_memory_for_one_task_is_refused(service: FakeService, client: TestClient) -> None:
    service.cluster.memory = 600 * (1 << 20)
    errors = client.post("/jobs", content=spec_body(scaling={"num_workers": 1})).json()["errors"]
    assert [(problem["pointer"], "prepares the data needs about" in problem["message"]) for problem in errors] == [
        ("/data", True)
    ]


def a_read(**fields: Any) -> LargestRead:
    given: dict[str, Any] = {
        "pointer": "/data/train/path",
        "file": "/corpus/a",
        "format": "text",
        "packed": 0,
        "batch": 0,
        "row": 0,
    }
    return LargestRead(**given | {"text": True} | fields)


@pytest.mark.parametrize("path", ["/jobs/plan", "/jobs"])
@pytest.mark.parametrize(
    ("read", "expected"),
    [
        (
            a_read(row=100 << 20),
            "/corpus/a has 100.0 MiB of text, which are one row, for which preparation needs about 14.4 GiB of host "
            "memory, and no node has more than 8.0 GiB for workers; split the file, or write JSON lines",
        ),
        (a_read(format="jsonl", row=64 << 20), "/corpus/a has a line of 64.0 MiB, for which preparation needs about"),
        (a_read(format="jsonl", row=900 << 20, text=False), "/corpus/a has a line of 900.0 MiB, for which"),
        (a_read(format="parquet", row=60 << 20), "/corpus/a has rows of 60.0 MiB, for which preparation needs about"),
        (
            a_read(format="parquet", packed=4 * GIB, batch=GIB, row=1 << 20, text=False),
            "/corpus/a has rows that take 1.0 GiB where they are decoded together, for which preparation needs about "
            "10.8 GiB of host memory, and no node has more than 8.0 GiB for workers; write shorter rows",
        ),
    ],
    ids=["text", "jsonl", "tokens", "rows", "group"],
)
def test_read_that_no_node_can_hold_is_refused_at_its_source(
    service: FakeService, client: TestClient, path: str, read: LargestRead, expected: str
) -> None:
    service.cluster.memory = 8 * GIB
    assert client.post(path, content=spec_body()).status_code in (200, 201)
    service.preflight.largest = read
    (problem,) = client.post(path, content=spec_body(name="large")).json()["errors"]
    assert (problem["pointer"], problem["message"][: len(expected)]) == ("/data/train/path", expected)
    service.cluster.memory = None
    assert client.post(path, content=spec_body(name="unknown")).status_code in (200, 201)


def test_plan_warns_of_more_tasks_of_preparation_than_a_node_holds(service: FakeService, client: TestClient) -> None:
    service.cluster.total = {"CPU": 8.0}
    service.cluster.nodes_total = ({"CPU": 8.0},)
    service.cluster.memory = 8 * GIB
    assert client.post("/jobs/plan", content=spec_body()).json()["warnings"] == []
    service.preflight.largest = a_read(row=10 << 20)
    (warning,) = client.post("/jobs/plan", content=spec_body()).json()["warnings"]
    assert warning == (
        "preparation runs up to 8 tasks of about 1.8 GiB on a node with 8.0 GiB for workers, and Ray ends and repeats "
        "tasks that do not fit; give Ray fewer CPUs there"
    )


def test_second_job_waits_for_memory_that_the_first_has_reserved(service: FakeService, client: TestClient) -> None:
    total = 5 * GIB
    service.cluster.total, service.cluster.memory, service.cluster.limited = {"CPU": 64.0, "memory": total}, total, True
    first, second = (client.post("/jobs", content=spec_body(name=name)).json()["id"] for name in ("first", "second"))
    service.reconciler().run_once()
    service.reconciler().run_once()
    held = sum(attempt["workers"] for attempt in client.get(f"/jobs/{first}").json()["attempts"])
    waits = client.get(f"/jobs/{second}").json()
    assert (held, waits["state"], waits["reason"]["code"]) == (2, "QUEUED", "capacity")
    assert waits["reason"]["message"] == (
        "next in the queue; waits for 3.6 GiB of memory (3.6 GiB of the cluster's 5.0 GiB are reserved)"
    )
    service.cluster.total = {"CPU": 64.0, "memory": 2.0 * total}
    service.reconciler().run_once()
    assert client.get(f"/jobs/{second}").json()["state"] != "QUEUED"


def test_memory_below_the_need_of_a_limited_worker_is_refused(service: FakeService, client: TestClient) -> None:
    service.cluster.memory, service.cluster.limited = 8 * GIB, True
    resources = {"CPU": 1.0, "memory": 1 << 20}
    body = spec_body(scaling={"num_workers": 1, "resources_per_worker": resources})
    (problem,) = client.post("/jobs/plan", content=body).json()["errors"]
    assert problem["pointer"] == "/scaling/resources_per_worker"
    assert problem["message"].startswith("memory: 1048576 is the limit of each worker on embedded Ray, and each needs")
    service.cluster.limited = False
    assert client.post("/jobs/plan", content=body).status_code == 200


def test_plan_warns_of_lines_that_were_not_read_and_of_the_training_of_a_tokenizer(
    service: FakeService, client: TestClient
) -> None:
    service.cluster.memory = 8 * GIB
    text = {"columns": {"text": "text"}}

    def warnings(**fields: Any) -> list[str]:
        service.preflight.largest = a_read(format="jsonl", row=1 << 10, **fields)
        found: list[str] = client.post("/jobs/plan", content=spec_body(data=text)).json()["warnings"]
        return found

    assert warnings(corpus=1 << 20, unseen=40 << 20) == []
    assert warnings(corpus=1 << 20, unseen=80 << 20) == [
        "not all JSON lines were read: one of 80.0 MiB would need about 11.2 GiB of host memory in preparation, and no "
        "node has as much for workers"
    ]
    assert warnings(corpus=1 << 40) == [
        "training of a tokenizer takes about 952.0 MiB of host memory, and up to 9.3 GiB if words hardly repeat; no "
        "node has as much for workers: name a tokenizer in model.tokenizer"
    ]


def test_resume_at_another_size_computes_the_reservation_anew(service: FakeService, client: TestClient) -> None:
    service.cluster.total, service.cluster.memory, service.cluster.limited = {"CPU": 64.0}, 64 * GIB, True
    job_id = client.post("/jobs", content=spec_body(training={"global_batch_size": 8})).json()["id"]
    queued = service.store.get(job_id)
    assert client.post(f"/jobs/{job_id}/pause").status_code == 200
    service.reconciler().run_once()
    # The command sends this for `resume --workers 4`: the size that the API shows, at another number of workers.
    scaling = client.get(f"/jobs/{job_id}").json()["scaling"]
    assert scaling["resources_per_worker"] == {"CPU": 1.0}
    answer = client.post(f"/jobs/{job_id}/resume", json={"scaling": scaling | {"num_workers": 4}})
    assert answer.status_code == 200, answer.text
    resumed = service.store.get(job_id)
    assert queued is not None
    assert resumed is not None
    assert ([*queued.memory], [*resumed.memory]) == ([2], [4])
    assert resumed.memory[4] < queued.memory[2]
