"""Doctor checks: measurements to findings; a failing check does not hide the others."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.domain.doctor.checks import add, check_up, min_distance
from service.domain.doctor.finding import Verdict
from service.domain.doctor.measurements import Measured, ProbeFailure, ProbeReply, RayPods, Reachability
from service.domain.jobs.head_node import HeadNode
from service.errors import ClusterError, StorageFault
from service.use_cases.doctor.doctor import Doctor
from tests.support.fakes.doctor import TOKEN, VERSIONS, FakeClusterProbe, FakeStorageProbe, a_node, a_visit
from tests.support.waiting import wait_for
from train_loop.run_dir import ClusterVisit, PathCheck

CHECKS = (
    *("ray.reachable", "ray.authenticated", "ray.nodes", "ray.tasks"),
    *("storage.readable", "storage.writable", "storage.atomic", "storage.shared"),
    *("network", "versions", "user", "clock", "data_cpus", "files"),
)
HEALTHY = Measured(
    ProbeReply(Reachability.ANSWERS, "http://ray:8265", "Ray 2.60.0", (-0.5, 0.5)),
    1,
    a_visit(),
    TOKEN,
    frozenset({"n1"}),
    read="read",
    write="written",
    replace="replaced",
    runs="file:///runs",
    versions=VERSIONS,
    uid=os.getuid(),
    connections=(512, 512),
)
NEEDS_RAY = {"ray.nodes", "ray.tasks", "storage.shared", "network", "versions", "user", "clock", "data_cpus"}


def verdicts(measured: Measured) -> dict[str, str]:
    """Return the verdict of each check that is not ok."""
    findings = check_up(measured)
    assert tuple(finding.check for finding in findings) == CHECKS
    problems = [finding for finding in findings if finding.verdict in (Verdict.FAILED, Verdict.WARNING)]
    assert all(finding.remedy for finding in problems), "each failure and warning has a remedy"
    return {finding.check: finding.verdict.value for finding in findings if finding.verdict is not Verdict.OK}


def test_healthy_measurements_give_only_ok_verdicts() -> None:
    assert verdicts(HEALTHY) == {}


def test_pods_that_kuberay_did_not_replace_are_named_with_the_command() -> None:
    pods = RayPods("t-ray", frozenset({"aa", "bb"}))
    current = a_visit(a_node(pod_digest="aa"), a_node("n2", pod_digest="bb"))
    assert "versions" not in verdicts(replace(HEALTHY, pods=pods, visit=current))
    assert "versions" not in verdicts(replace(HEALTHY, visit=current))
    outdated = a_visit(a_node(pod_digest="aa"), a_node("n2", pod_digest="cc"))
    (finding,) = [one for one in check_up(replace(HEALTHY, pods=pods, visit=outdated)) if one.check == "versions"]
    assert (finding.verdict, "(n2): an older" in finding.seen) == (Verdict.FAILED, True)
    assert "kubectl delete pod -l ray.io/cluster=t-ray" in str(finding.remedy)


def test_lost_node_of_the_head_is_named_with_the_command() -> None:
    pods = RayPods(lost_node=lambda: HeadNode(1.0, "gpu-1"))
    reply = ProbeReply(Reachability.NOBODY, "http://ray:8265", "no")
    found = check_up(replace(HEALTHY, pods=pods, reply=reply, visit=ProbeFailure("not measured")))
    assert "kubectl taint nodes gpu-1 node.kubernetes.io/out-of-service" in str(found[0].remedy)
    assert "kubectl" not in str(check_up(replace(HEALTHY, pods=pods)))


@pytest.mark.parametrize("reach", [Reachability.NOBODY, Reachability.STRANGE, Reachability.STARTING])
def test_ray_not_answering_skips_checks_that_need_it(reach: Reachability) -> None:
    found = verdicts(
        replace(HEALTHY, reply=ProbeReply(reach, "http://ray:8265", "no"), visit=ProbeFailure("not measured"))
    )
    assert found == {"ray.reachable": "failed"} | dict.fromkeys({"ray.authenticated"} | NEEDS_RAY, "skipped")


@pytest.mark.parametrize(
    ("runs", "uid", "found"),
    [
        ("file:///runs", 10001, {"user": "failed"}),
        ("s3://runs", 10001, {}),
        ("file:///runs", None, {"user": "skipped"}),
    ],
)
def test_user_check_on_shared_folders_fails_if_uids_differ(runs: str, uid: int | None, found: dict[str, str]) -> None:
    measured = replace(HEALTHY, runs=runs, visit=a_visit(a_node(uid=uid)))
    assert verdicts(measured) == found
    (finding,) = [one for one in check_up(measured) if one.check == "user"]
    assert uid is None or f"uid {os.getuid()}" in finding.seen


def test_files_check_warns_if_open_file_limit_is_below_connections() -> None:
    measured = replace(HEALTHY, connections=(512, 2048))
    assert verdicts(measured) == {"files": "warning"}
    (files,) = [finding for finding in check_up(measured) if finding.check == "files"]
    assert files.seen == "the limit of open files allows 512 connections, and TRAINSHED_CONNECTIONS is 2048"


def test_wrong_token_fails_authenticated_and_not_reachable() -> None:
    refused = ProbeReply(Reachability.REFUSED, "http://ray:8265", "403")
    found = verdicts(replace(HEALTHY, reply=refused, visit=ProbeFailure("not measured")))
    assert found == {"ray.authenticated": "failed"} | dict.fromkeys(NEEDS_RAY, "skipped")


def test_cluster_without_nodes_fails_nodes_check() -> None:
    found = verdicts(replace(HEALTHY, nodes=0, visit=ProbeFailure("not measured")))
    assert found == {"ray.nodes": "failed"} | dict.fromkeys(NEEDS_RAY - {"ray.nodes"}, "skipped")


@pytest.mark.parametrize(("part", "check"), [("read", "readable"), ("write", "writable"), ("replace", "atomic")])
def test_failing_storage_probe_fails_only_its_check(part: str, check: str) -> None:
    changed = {"read": "x", "write": "x", "replace": "x"} | {part: ProbeFailure("Permission denied")}
    assert verdicts(replace(HEALTHY, **changed)) == {f"storage.{check}": "failed"}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("visit", "found"),
    [
        (a_visit(a_node(sight=PathCheck(token=None))), {"storage.shared": "failed"}),
        (a_visit(a_node(sight=PathCheck(token="another"))), {"storage.shared": "failed"}),
        (a_visit(a_node(sight=PathCheck(token=TOKEN, fault="read-only"))), {"storage.shared": "failed"}),
        (a_visit(a_node(sight=PathCheck(token=TOKEN, unreadable={"s3://a": "no"}))), {"storage.shared": "failed"}),
        (a_visit(a_node(), a_node("n2")), {"storage.shared": "failed"}),
        (a_visit(a_node(sight=None, trouble="late")), {"ray.tasks": "failed", "storage.shared": "skipped"}),
        (a_visit(a_node(versions=VERSIONS | {"ray": "2.61.0"})), {"versions": "failed"}),
        (a_visit(a_node(versions=VERSIONS | {"trainshed": "9"})), {"versions": "failed"}),
        (a_visit(a_node(versions=VERSIONS | {"torch": "9"})), {"versions": "warning"}),
        (a_visit(a_node(ahead=(3.0, 3.1))), {"clock": "warning"}),
        (a_visit(a_node(ahead=(-99.0, -98.0))), {"clock": "failed"}),
        (a_visit(free_cpus=0.5), {"data_cpus": "warning"}),
        (a_visit(cpus=1.0, free_cpus=1.0), {"data_cpus": "failed"}),
        (a_visit(left_out=3), {"ray.tasks": "warning"}),
    ],
)
def test_visit_with_fault_fails_its_check(visit: ClusterVisit, found: dict[str, str]) -> None:
    assert verdicts(replace(HEALTHY, visit=visit)) == found


def test_nodes_with_different_torch_versions_fail_versions_check() -> None:
    other = a_node("n2", versions=VERSIONS | {"torch": "9"})
    measured = replace(HEALTHY, visit=a_visit(a_node(), other), arrived=frozenset({"n1", "n2"}))
    assert verdicts(measured) == {"versions": "failed"}


def test_many_nodes_with_the_same_fault_are_not_all_listed() -> None:
    nodes = [a_node(f"n{number}", sight=PathCheck()) for number in range(300)]
    (shared,) = [
        found for found in check_up(replace(HEALTHY, visit=a_visit(*nodes))) if found.check == "storage.shared"
    ]
    assert "and 295 more" in shared.seen


@given(ahead=st.floats(-1e4, 1e4), delays=st.lists(st.floats(0, 60), min_size=4, max_size=4), share=st.floats(-1, 1))
def test_reported_clock_skew_never_exceeds_actual_skew(ahead: float, delays: list[float], share: float) -> None:
    """Read the clocks of the head and of a node at any moment between request and response."""
    head = (ahead * share - delays[0], ahead * share + delays[1])
    node = (ahead * (1 - share) - delays[2], ahead * (1 - share) + delays[3])
    bounds = add(head, node)
    assert bounds[0] - 1e-6 <= ahead <= bounds[1] + 1e-6
    assert min_distance(bounds) <= abs(ahead) + 1e-6


def test_network_failure_between_two_nodes_names_the_pair() -> None:
    visit = a_visit(a_node(), a_node("n2"), failed={"10.0.0.1 and 10.0.0.2": "Connection refused"})
    (finding,) = [one for one in check_up(replace(HEALTHY, nodes=2, visit=visit)) if one.check == "network"]
    assert finding.verdict is Verdict.FAILED
    assert finding.seen == "no connection between 10.0.0.1 and 10.0.0.2: Connection refused"


def test_network_check_without_measurement_is_skipped() -> None:
    visit = a_visit(a_node(), a_node("n2")).model_copy(update={"network": None})
    assert verdicts(replace(HEALTHY, nodes=2, visit=visit))["network"] == "skipped"


def doctor(cluster: FakeClusterProbe, storage: FakeStorageProbe) -> Doctor:
    return Doctor(cluster, storage, VERSIONS, limit=0.05)


def problems(cluster: FakeClusterProbe, storage: FakeStorageProbe) -> dict[str, str]:
    findings = doctor(cluster, storage).examine().findings
    return {finding.check: finding.verdict.value for finding in findings if finding.verdict is not Verdict.OK}


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        ("[Errno 28] No space left on device", "free space there, or delete files if it has no inodes left (df -i)"),
        ("[Errno 30] Read-only file system", "make it writable again"),
        ("[Errno 122] Disk quota exceeded", "free space there, or raise the quota"),
    ],
)
def test_storage_that_cannot_be_written_is_named_with_what_helps(error: str, remedy: str) -> None:
    full = replace(HEALTHY, write=ProbeFailure(error), replace=ProbeFailure(error))
    found = {one.check: one.remedy for one in check_up(full) if one.verdict == "failed"}
    assert found == dict.fromkeys(("storage.writable", "storage.atomic"), f"{HEALTHY.runs}: {remedy}")


def test_examine_runs_all_checks_and_removes_its_folder() -> None:
    cluster, storage = FakeClusterProbe(), FakeStorageProbe()
    examination = doctor(cluster, storage).examine()
    assert [finding.verdict.value for finding in examination.findings] == ["ok"] * len(CHECKS)
    assert examination.healthy
    assert storage.removed == [cluster.folder]
    assert str(cluster.folder).startswith("file:///runs/_doctor-")


def test_hanging_storage_probe_hides_no_other_check() -> None:
    storage = FakeStorageProbe(hanging=("write", "leave_token"))
    assert problems(FakeClusterProbe(), storage) == {"storage.writable": "failed", "storage.shared": "skipped"}


def test_failing_storage_probe_hides_no_other_check() -> None:
    faults: dict[str, Exception] = {"replace": StorageFault("torn"), "answers": OSError("gone")}
    found = problems(FakeClusterProbe(), FakeStorageProbe(faults))
    assert found == {"storage.atomic": "failed", "storage.shared": "failed"}


@pytest.mark.parametrize("cluster", [FakeClusterProbe(found=ClusterError("no python")), FakeClusterProbe(hangs=True)])
def test_unreachable_nodes_do_not_hide_storage_checks(cluster: FakeClusterProbe) -> None:
    storage = FakeStorageProbe()
    behind = ("storage.shared", "network", "versions", "user", "clock", "data_cpus")
    assert problems(cluster, storage) == {"ray.tasks": "failed"} | dict.fromkeys(behind, "skipped")
    assert len(storage.removed) == 1


def test_concurrent_examine_calls_share_one_result() -> None:
    go = threading.Event()

    class Slow(FakeStorageProbe):
        def read(self) -> str:
            go.wait(60)
            return "read"

    cluster = FakeClusterProbe()
    slow_doctor = Doctor(cluster, Slow(), VERSIONS)
    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(slow_doctor.examine) for _ in range(4)]
        wait_for(lambda: cluster.visits == 1)
        go.set()
        first = answers[0].result()
        assert all(answer.result() is first for answer in answers)
    assert cluster.visits == 1
    assert slow_doctor.examine() is not first
