"""The chart's pods on hosts, under Kubernetes' strictest policy: no user entry, a read-only root, no privileges."""

import json
import re
import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.hosts.charts import CHART, render
from tests.support.hosts.containers import Container, run
from tests.support.hosts.host_cluster import TOKEN
from tests.support.hosts.hosts import Host, lab
from tests.support.hosts.pods import PodSet, place
from tests.support.waiting import wait_for

pytestmark = pytest.mark.timeout(400)
HOSTS = ["api", "test", "ray-head", "ray-worker-1", "ray-worker-2"]


@pytest.fixture(scope="module")
def pods(shared: Path) -> Iterator[PodSet]:
    shared.chmod(0o755)
    with lab(HOSTS, shared=shared) as made:
        pods = place(render(), made.hosts, token=TOKEN, more="--object-store-memory=80000000")
        for name in ("ray-head", "ray-worker-1", "ray-worker-2", "api"):
            pods[name].start()
        ready = f"http://{made.hosts['api'].address}:8000/readyz"
        wait_for(partial(answer, made.hosts["test"], ready), "the service")
        yield pods


@pytest.mark.parametrize("name", ["api", "ray-head", "ray-worker-1"])
def test_pods_have_no_unneeded_privileges(pods: PodSet, name: str) -> None:
    host = pods[name].host
    script = "id -u; grep -E 'CapBnd|NoNewPrivs' /proc/self/status; echo $HOME"
    output = run(host, Container("show", ("sh", "-c", script)))
    assert output.split() == ["10001", "CapBnd:", "0" * 16, "NoNewPrivs:", "1"]
    for place_ in ("/", "/opt/trainshed", "/var/lib", "/run", "/usr/local"):
        denied = run(host, Container("write", ("sh", "-c", f"touch {place_}/file 2>&1 || true")))
        assert "Read-only file system" in denied or "Permission denied" in denied, place_


def test_probes_at_the_pod_address_succeed(pods: PodSet) -> None:
    """Probe as a kubelet does: from outside, with the pod's address as the Host header."""
    api = pods["api"]
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        check = api.container[probe]["httpGet"]
        (port,) = [one["containerPort"] for one in api.container["ports"] if one["name"] == check["port"]]
        url = f"http://{api.host.address}:{port}{check['path']}"
        response = wait_for(partial(answer, pods["test"].host, url), url)
        assert json.loads(response)["status"] in ("ok", "ready")


def answer(outside: Host, url: str) -> str | None:
    """Return the response of a URL to a client on another host, or None if the request fails."""
    try:
        return run(outside, Container("probe", ("wget", "-q", "-O", "-", url)))
    except AssertionError:
        return None


def test_helm_test_job_succeeds(pods: PodSet, shared: Path) -> None:
    output = pods["test"].run(seconds=240)
    assert "SUCCEEDED  10/10" in output
    (job_id,) = set(re.findall(r"\bjob-\w+", output))
    root = shared / "runs" / "default" / job_id
    assert {path.stat().st_uid for path in (root, *root.rglob("*"))} == {10001}


def test_every_port_of_a_pod_accepts_connections(pods: PodSet) -> None:
    ports = {f"{pod.name} {one['name']}": (pod, one) for pod in pods for one in pod.container.get("ports", [])}
    for name, (pod, one) in ports.items():
        wait_for(partial(listens, pod.host, one["containerPort"]), name, pause=0.5)


def listens(host: Host, port: int) -> bool:
    """Return True if a host listens on a port. The forwarder closes connections to closed ports."""
    with socket.create_connection(("127.0.0.1", host.forward(port)), timeout=10) as made:
        made.settimeout(0.5)
        try:
            return made.recv(1) != b""
        except TimeoutError:
            return True


def test_doctor_confirms_that_pods_share_user_and_storage(pods: PodSet) -> None:
    def verdicts() -> dict[str, str] | None:
        report = json.loads(pods["test"].run("trainshed", "doctor", "--json", seconds=120))
        found = {one["check"]: one["verdict"] for one in report["findings"]}
        # On a busy machine, doctor's time may end before its last check.
        return None if "skipped" in {found[name] for name in named} else found

    named = ("user", "storage.shared", "versions", "network")
    found = wait_for(verdicts, "an answer with all checks")
    assert {name: verdict for name, verdict in found.items() if verdict == "failed"} == {}
    assert {found[name] for name in named} == {"ok"}


def test_metrics_key_of_the_release_gives_access_to_metrics(pods: PodSet) -> None:
    key = (pods["api"].rendered.of("Secret", "demo-trainshed-metrics"))["data"]["metrics.key"]
    get = f'wget -q -O - --header "Authorization: Bearer $(echo {key} | base64 -d)" http://demo-trainshed:8000/metrics'
    assert "trainshed_cluster_up 1.0" in pods["test"].run("sh", "-c", get)


@pytest.mark.more
def test_planned_end_of_the_head_saves_and_is_no_failure(pods: PodSet) -> None:
    """This test ends Ray. With one attempt allowed, a failure would end the job."""
    test, head = pods["test"], pods["ray-head"]
    job = yaml.safe_load((CHART / "files/test-job.yaml").read_text()) | {"failure": {"max_attempts": 1}}
    job["training"]["max_steps"] = 100_000
    test.host.write("/tmp/long.yaml", yaml.safe_dump(job | {"checkpoint": {"every_steps": None}}))
    submitted = test.run("trainshed", "submit", "/tmp/long.yaml")
    (job_id,) = set(re.findall(r"\bjob-\w+", submitted))

    def shown() -> Any:
        return json.loads(test.run("trainshed", "show", job_id, "--json"))

    assert wait_for(lambda: (shown()["progress"] or {"step": 0})["step"] > 5, "some steps", seconds=90)
    head.end()
    assert wait_for(lambda: shown()["attempts"][0].get("result"), "the end of the attempt", seconds=60)
    left = shown()
    assert left["attempts"][0]["result"] == "moved"
    assert left["state"] == "RECOVERING"
    assert "the head of Ray ends as planned" in left["attempts"][0]["reason"]["message"]
    assert "the run resumes from step" in left["attempts"][0]["reason"]["message"]
    # Workers end once their head has not answered for 15 s.
    for name in ("ray-head", "ray-worker-1", "ray-worker-2"):
        pods[name].restart()
    assert wait_for(lambda: shown()["state"] == "RUNNING", "the next attempt", seconds=120)
    assert [one.get("result") for one in shown()["attempts"]] == ["moved", None]


@pytest.mark.more
def test_lost_node_of_the_head_is_named_with_the_command_that_frees_it(pods: PodSet) -> None:
    """The last test, three minutes long: the head's node loses power while the job of the test before trains."""
    test, command = pods["test"], "kubectl taint nodes node-of-ray-head node.kubernetes.io/out-of-service=nodeshutdown"
    (job,) = json.loads(test.run("trainshed", "ps", "--state", "running", "--json"))["data"]
    pods["ray-head"].host.kill()

    def remedy() -> str:
        reason = json.loads(test.run("trainshed", "show", job["id"], "--json"))["reason"]
        return str(reason["remedy"]) if reason is not None and reason["code"] == "cluster_unreachable" else ""

    assert "check the head node" in wait_for(remedy, "a reason", seconds=60, pause=1.0)
    wait_for(lambda: f"{command}:NoExecute" in remedy(), "the command", seconds=240, pause=5.0)
    assert f"{command}:NoExecute" in test.run("sh", "-c", "trainshed nodes 2>&1 || true")
    report = json.loads(test.run("sh", "-c", "trainshed doctor --json || true", seconds=150))
    (reachable,) = [one for one in report["findings"] if one["check"] == "ray.reachable"]
    assert f"{command}:NoExecute" in reachable["remedy"]
    key = pods["api"].rendered.of("Secret", "demo-trainshed-metrics")["data"]["metrics.key"]
    get = f'wget -q -O - --header "Authorization: Bearer $(echo {key} | base64 -d)" http://demo-trainshed:8000/metrics'
    (silent,) = re.findall(
        r'^trainshed_cluster_silent_seconds\{head_node="node-of-ray-head"\} (.+)$', test.run("sh", "-c", get), re.M
    )
    assert float(silent) > 180
