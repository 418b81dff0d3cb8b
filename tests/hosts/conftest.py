"""Test hosts for every test in this folder; tests are skipped with a reason without root and iproute2."""

import os
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.support.hosts.host_cluster import HostCluster
from tests.support.hosts.hosts import why_no_hosts


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests that need hosts on machines that cannot create them."""
    why = why_no_hosts()
    for item in items:
        if Path(__file__).parent not in item.path.parents:
            continue
        if why is not None:
            item.add_marker(pytest.mark.skip(reason=why))
        elif item.get_closest_marker("more") and "MORE_HOSTS" not in os.environ:
            item.add_marker(pytest.mark.skip(reason="takes minutes: `make hosts` runs it"))


@pytest.fixture(scope="module")
def shared() -> Iterator[Path]:
    """Return the storage that all hosts share; not a memory file system, which has too little room for logs."""
    with tempfile.TemporaryDirectory(prefix="shared-", dir="/var/tmp") as folder:
        yield Path(folder)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the newest events of the jobs to the report of a failed test."""
    report = yield
    cluster = getattr(item, "funcargs", {}).get("cluster")
    if report.failed and isinstance(cluster, HostCluster):
        report.sections.append(("newest events", "\n".join(cluster.newest_events(count=16))))
    return report
