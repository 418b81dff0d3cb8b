"""Ray clusters for the tests of one module."""

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from tests.support.servers.worker_forks import worker_forks
from tests.support.waiting import wait_for


@contextmanager
def own_ray(
    *, store_bytes: int, environment: Mapping[str, str] = MappingProxyType({}), forks: bool = True
) -> Iterator[str]:
    """Yield the address of a Ray with two CPUs and without a dashboard, whose workers get the variables too.

    With `forks`, its workers are forked from a process that has imported.
    """
    # Ray's sockets need a short path.
    folder = tempfile.mkdtemp(prefix="shed-")
    variables = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", **environment}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (variables | (worker_forks() if forks else {})).items():
            patch.setenv(name, value)
        try:
            context = ray.init(
                address="local",
                num_cpus=2,
                object_store_memory=store_bytes,
                include_dashboard=False,
                _temp_dir=folder,
                log_to_driver=False,
            )
            yield context.address_info["gcs_address"]
        finally:
            ray.shutdown()
            wait_for(lambda: _removed(folder), f"the processes that still write to {folder} to end")


@contextmanager
def own_cluster(**head: Any) -> Iterator[Cluster]:
    """Yield a Ray whose head has these arguments, and to which nodes can be added.

    Its dashboard and the agent that starts drivers get free ports. Another Ray on this machine may use the default
    ports. Ray logs that as an error whose traceback holds an unclosed socket, which fails the next test.
    """
    free = {"dashboard_port": None, "dashboard_agent_listen_port": None}
    cluster = Cluster(initialize_head=True, head_node_args={**free, **head})
    try:
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def _removed(folder: str) -> bool:
    shutil.rmtree(folder, ignore_errors=True)
    return not Path(folder).exists()
