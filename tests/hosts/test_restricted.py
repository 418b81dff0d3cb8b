"""Service and Ray as pods under Kubernetes' strictest policy: no user entry, no HOME, a read-only root, no rights."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests.support.containers import Container, restrict, run, start
from tests.support.host_cluster import TOKEN
from tests.support.hosts import SHARED, Host, lab
from tests.support.specs import raw_spec
from tests.support.waiting import wait_for

pytestmark = pytest.mark.timeout(300)
HOME = "/home/trainshed"
RAY = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}
# As KubeRay writes the command of a head.
START_RAY = (
    "ulimit -n 65536; ray start --head --block --dashboard-host=0.0.0.0 --num-cpus=3 --object-store-memory=80000000"
)


@dataclass
class Pods:
    """A host each for the service and for Ray's head."""

    service: Host
    head: Host

    def trainshed(self, *words: str, seconds: float = 60) -> str:
        """Run a command of the CLI in the service's pod; what it printed."""
        command = Container("cli", ("trainshed", *words), {"TRAINSHED_HOME": HOME})
        return run(self.service, command, seconds=seconds)


@pytest.fixture(scope="module")
def pods(shared: Path) -> Iterator[Pods]:
    shared.chmod(0o755)
    with lab(["service", "head"], shared=shared) as made:
        pods = Pods(**made.hosts)
        restrict(pods.service, "/tmp", HOME)
        restrict(pods.head, "/tmp", "/dev/shm")
        start(pods.head, Container("ray", ("/bin/bash", "-c", "--", START_RAY), RAY))
        settings = {
            "TRAINSHED_HOME": HOME,
            "TRAINSHED_HOST": "0.0.0.0",
            "TRAINSHED_RUNS": f"file://{SHARED}/runs",
            "TRAINSHED_STORAGE_ROOTS": f"file://{SHARED}/data",
            "TRAINSHED_RAY_ADDRESS": f"http://{pods.head.address}:8265",
        }
        start(pods.service, Container("service", ("trainshed", "serve"), {**settings, **RAY}))
        (shared / "job.json").write_text(json.dumps(job()))
        wait_for(lambda: "8000" in pods.service.log("service").read_text(), "the service")
        yield pods


def job() -> dict[str, object]:
    """A small job for one pod; it trains a tokenizer and prepares its data."""
    data = {"train": {"path": "stdlib://json/*.py"}, "sequence_length": 32}
    training = {"max_steps": 12, "global_batch_size": 4}
    return raw_spec(data=data, training=training, scaling={"num_workers": 2, "resources_per_worker": {"CPU": 0.75}})


@pytest.mark.parametrize("pod", ["service", "head"])
def test_pods_may_do_nothing_but_their_work(pods: Pods, pod: str) -> None:
    host = getattr(pods, pod)
    said = run(
        host, Container("look", ("sh", "-c", "id -u; grep -E 'CapBnd|NoNewPrivs' /proc/self/status; echo $HOME"))
    )
    assert said.split() == ["10001", "CapBnd:", "0" * 16, "NoNewPrivs:", "1"]
    for place in ("/", "/opt/trainshed", "/var/lib", "/run", "/usr/local"):
        denied = run(host, Container("write", ("sh", "-c", f"touch {place}/file 2>&1 || true")))
        assert "Read-only file system" in denied or "Permission denied" in denied, place


def test_job_of_a_restricted_pod_succeeds(pods: Pods, shared: Path) -> None:
    said = pods.trainshed("submit", "--wait", f"{SHARED}/job.json", seconds=180)
    assert "SUCCEEDED  12/12" in said
    (job_id,) = {line.split()[0] for line in said.splitlines() if line.startswith("job-")}
    root = shared / "runs" / "default" / job_id
    assert {path.stat().st_uid for path in (root, *root.rglob("*"))} == {10001}


def test_doctor_finds_that_pods_share_user_and_storage(pods: Pods) -> None:
    report = yaml.safe_load(pods.trainshed("doctor", "--json", seconds=120))
    found = {one["check"]: one["verdict"] for one in report["findings"]}
    assert {found["user"], found["storage.shared"], found["versions"]} == {"ok"}, report
