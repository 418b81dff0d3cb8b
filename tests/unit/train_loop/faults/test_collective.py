"""Errors of gloo, NCCL and the store about a rank that is late or gone, and the sentence that replaces them."""

import pytest

from tests.unit.train_loop.faults.test_failure import WorkersFailed
from train_loop.faults.collective import LOST_CONNECTION, TIMEOUT, contact_lost
from train_loop.faults.failure import failed
from train_loop.liveness.group import Stall
from train_loop.liveness.heartbeat import Phase
from train_loop.ray_train.group_failure import Evidence, explain

HOSTS = {0: "node1", 1: "node1", 2: "node2"}
STALL = Stall((0, 2), (1,), 7, 8.0, "rank 1 on node1 is stopped (SIGSTOP)", Phase.TRAIN)
TIMEOUTS = [
    "RuntimeError: Timed out waiting 10000ms for send operation to complete",
    "RuntimeError: Application timeout caused pair closure",
    "RuntimeError: Wait timeout",
    "torch.distributed.DistStoreError: wait timeout after 10000ms, keys: /default_pg/0/store_based_barrier_key:1",
    "torch.distributed.DistStoreError: Timed out after 11 seconds waiting for clients. 1/2 clients joined.",
    "torch.distributed.DistBackendError: [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)",
    "torch.DistNetworkError: The client socket has timed out after 10000ms while trying to connect to (node1, 29500).",
    "RuntimeError: [Rank 0]: Ranks 1 failed to pass monitoredBarrier in 10000 ms: timed out",
]
LOST = [
    "RuntimeError: Connection closed by peer [127.0.0.1]:44753",
    "RuntimeError: Read error [127.0.0.1]:63633: Connection reset by peer",
    "RuntimeError: Write error [::1]:63633: Broken pipe",
    "RuntimeError: Socket closed [127.0.0.1]:44753",
    "torch.distributed.DistNetworkError: Failed to recv, got 0 bytes. Connection was likely closed.",
    "torch.distributed.DistNetworkError: recvValue failed on SocketImpl(fd=3): Connection reset by peer",
    "torch.distributed.DistBackendError: NCCL error in: x.cpp:1, remote process exited, ncclRemoteError: A call failed",
]
OTHERS = [
    "ValueError: Timed out waiting for nothing",
    "ConnectionResetError: [Errno 104] Connection reset by peer",
    "BrokenPipeError: [Errno 32] Broken pipe",
    "requests.exceptions.ConnectionError: ('Connection aborted.', RemoteDisconnected())",
    "RuntimeError: CUDA error: device-side assert triggered",
]
RAW = ("Timed out", "timeout after", "Connection", "ms", "DistStore", "recvValue", "Errno", "NCCL", "RuntimeError")


@pytest.mark.parametrize(
    ("error", "expected"),
    [(e, TIMEOUT) for e in TIMEOUTS] + [(e, LOST_CONNECTION) for e in LOST] + [(e, None) for e in OTHERS],
)
def test_errors_of_collective_operations_are_recognised(error: str, expected: str | None) -> None:
    assert contact_lost(error) == expected


@pytest.mark.parametrize("error", [*TIMEOUTS, *LOST])
def test_no_reason_is_the_raw_text_of_a_library(error: str) -> None:
    reasons = [
        explain(Evidence(HOSTS, errors={0: error, 2: error}, stall=STALL)).cause,
        explain(Evidence(HOSTS, errors={0: error})).cause,
        explain(Evidence(HOSTS, errors={0: error, 1: error, 2: error}, without_storage={"node1"})).cause,
        explain(Evidence(HOSTS, errors={0: error}, ended={1: "was killed"})).survivors or "",
        failed(RuntimeError(error.partition(": ")[2])).reason or "",
    ]
    assert not [reason for reason in reasons if any(raw in reason.replace("ranks", "") for raw in RAW)], reasons
    assert "rank 1 on node1 is stopped (SIGSTOP)" in reasons[0]


@pytest.mark.parametrize("error", [*TIMEOUTS, *LOST])
def test_a_hang_names_the_late_rank_and_not_the_one_that_waited(error: str) -> None:
    loss = explain(Evidence(HOSTS, errors={0: error}, stall=STALL))
    assert (loss.kind, loss.ranks, loss.hosts) == ("hung", (1,), ("node1",))
    assert loss.cause == (
        "training hung at step 7: ranks 0 and 2 waited for rank 1 until the timeout; "
        "rank 1 on node1 is stopped (SIGSTOP)"
    )


def test_rank_that_nccl_ends_at_the_timeout_is_not_blamed() -> None:
    ended = {0: "was killed by signal 6 (SIGABRT)"}
    assert explain(Evidence(HOSTS, ended=ended, unreachable={0: "died: x"}, stall=STALL)).ranks == (1,)
    assert explain(Evidence(HOSTS, ended={1: ended[0]}, stall=STALL)).kind == "killed"
    assert explain(Evidence(HOSTS, ended=ended)).kind == "killed"


def test_hang_without_a_known_late_rank_names_what_is_known() -> None:
    assert explain(Evidence(HOSTS, errors={0: TIMEOUTS[0]})).cause.endswith("; ranks 1 and 2 reported nothing")
    away = explain(Evidence(HOSTS, errors={0: TIMEOUTS[0]}, without_storage={"node2"}))
    assert away.cause.endswith("; storage did not answer on node2")


@pytest.mark.parametrize("contact", [*TIMEOUTS, *LOST])
def test_own_error_of_a_rank_comes_before_the_contact_that_others_lost(contact: str) -> None:
    loss = explain(Evidence(HOSTS, errors={0: contact, 1: "OSError: disk full", 2: contact}, stall=STALL))
    assert (loss.kind, loss.cause) == ("error", "rank 1: OSError: disk full")
    lost = RuntimeError(contact.partition(": ")[2])
    assert failed(WorkersFailed({0: lost, 1: OSError("disk full"), 2: lost})).reason == "OSError: disk full"
