"""A Ray cluster for the tests of one module."""

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

import pytest
import ray

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


def _removed(folder: str) -> bool:
    shutil.rmtree(folder, ignore_errors=True)
    return not Path(folder).exists()
