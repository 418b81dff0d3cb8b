"""Processes of Ray Data that are killed while a rank streams: each row arrives once, and the rank has no error."""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
import torch.distributed as dist
from ray.cluster_utils import Cluster

from tests.support.builders.specs import spec
from tests.support.ranks.own_ray import own_cluster
from tests.support.waiting import running, wait_for
from train_loop.data.dataset import Dataset, Rows
from train_loop.data.order import Order, StepOrder
from train_loop.data.prepare.cache import find_dataset
from train_loop.data.stream import ray_data, takeover
from train_loop.data.stream.local import StreamPlan, local_stream
from train_loop.data.stream.takeover import ray_stream
from train_loop.plan import MeshPlan

STEPS, ALONE = 600, MeshPlan(ddp=1, fsdp=1, sp=1)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        with own_cluster(num_cpus=2, object_store_memory=100_000_000) as found:
            ray.init(found.address, log_to_driver=False)
            yield found


@pytest.fixture(autouse=True)
def alone(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Start a process group of this process only; many small blocks, and a short wait for rows."""
    monkeypatch.setattr(ray_data, "_BLOCK_STEPS", 4)
    monkeypatch.setattr(takeover, "_ROWS_SECONDS", 5.0)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def numbered(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Return 200 samples; sample i contains the number i."""
    path = tmp_path_factory.mktemp("numbered") / "rows.parquet"
    pq.write_table(pa.table({"ids": [[i] * 4 for i in range(200)]}), path, row_group_size=16)
    data = {"train": {"path": str(path)}, "columns": {"input_ids": "ids"}, "packing": False, "sequence_length": 4}
    return find_dataset(spec(data=data), path.parent)


class Stream:
    """The stream of a single rank, its received samples, and its reported failures."""

    def __init__(self, numbered: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
        order = StepOrder(Order(200, 0, shuffle=True, dataset="x", end=STEPS * 4), 1, 4)
        self.expected = [order.step(step * 4)[0].tolist() for step in range(STEPS)]
        self.received, self.failures, self.own = list[list[int]](), list[str](), list[int]()

        def note_own(*arguments: Any) -> Iterator[Rows | None]:
            for rows in local_stream(*arguments):
                self.own.append(len(self.received))
                yield rows

        monkeypatch.setattr(takeover, "local_stream", note_own)
        report = lambda _, *, error, **__: self.failures.append(error)  # noqa: E731
        self.rows = ray_stream(StreamPlan(numbered, order, 0, STEPS), ALONE, 0, after=0.01, report=report)

    def take(self) -> bool:
        """Take a step, and return whether its rows came from Ray Data."""
        before = len(self.own)
        rows = next(self.rows)
        assert rows is not None
        self.received.append(rows.samples.tolist())
        return len(self.own) == before

    def take_rest(self) -> None:
        while len(self.received) < STEPS:
            self.take()


def named(name: str) -> list[psutil.Process]:
    """Return Ray's processes with a name."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if name in " ".join(process.cmdline()):
                found.append(process)
    return found


def kill(processes: Iterable[psutil.Process]) -> None:
    victims = list(processes)
    for victim in victims:
        with suppress(psutil.NoSuchProcess):
            victim.kill()
    wait_for(lambda: not running(victims), "their end")


def coordinators() -> list[psutil.Process]:
    return named("ray::SplitCoordinator")


def delivered_after(stream: Stream) -> None:
    """Take steps until Ray Data delivers. Its start takes seconds, so the rank waits between steps."""
    wait_for(stream.take, "rows of Ray Data", pause=1.0, seconds=180)


def fails(stream: Stream) -> None:
    """Take steps until the rank has met the failure. Rows that have arrived before come first."""
    wait_for(lambda: (stream.take(), stream.failures)[1], "the failure", pause=0.05)


def has_started(stream: Stream) -> None:
    """Take a step, and wait for the coordinator."""
    stream.take()
    wait_for(coordinators, "the coordinator")


def delivers_later_rows(stream: Stream) -> None:
    """Take steps until Ray Data has delivered some."""
    delivered_after(stream)
    for _ in range(10):
        stream.take()


MOMENTS = {"start": has_started, "first rows": delivered_after, "later rows": delivers_later_rows}


@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_coordinator_costs_no_row_and_ray_data_starts_again(
    numbered: Dataset, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    stream = Stream(numbered, monkeypatch)
    MOMENTS[moment](stream)
    kill(coordinators())
    fails(stream)
    delivered_after(stream)
    stream.take_rest()
    assert stream.received == stream.expected
    assert len(stream.failures) == 1


def test_killed_reader_costs_no_row(numbered: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream(numbered, monkeypatch)
    delivered_after(stream)
    # A reader is idle between two tasks.
    kill(wait_for(lambda: named("_read_block") + named("ray::IDLE"), "a reader"))
    stream.take_rest()
    assert stream.received == stream.expected


def test_lost_node_of_readers_costs_no_row_and_ray_data_starts_elsewhere(
    cluster: Cluster, numbered: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = cluster.add_node(num_cpus=1, object_store_memory=100_000_000, resources={"readers": 1})

    class Hog:
        """Takes the CPUs of the head, so that tasks run on the other node."""

        def ready(self) -> bool:
            return True

    hog = ray.remote(num_cpus=2)(Hog).options(label_selector=None).remote()
    ray.get(hog.ready.remote())
    stream = Stream(numbered, monkeypatch)
    delivered_after(stream)
    cluster.remove_node(node, allow_graceful=False)
    fails(stream)
    ray.kill(hog)
    delivered_after(stream)
    stream.take_rest()
    assert stream.received == stream.expected
