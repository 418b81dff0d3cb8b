"""Settings of the whole suite, and the fixture of a real Postgres server."""

import gc
import os
import shutil
import signal
from collections.abc import Generator, Iterator

import pytest
from hypothesis import settings

from tests.support.servers.postgres import postgres_server
from train_loop.system.gc import no_automatic_collection

# `nohup make test &` starts the suite with signals ignored, and its children inherit that: tests send these signals.
for _number in (signal.SIGINT, signal.SIGTERM):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, signal.default_int_handler if _number == signal.SIGINT else signal.SIG_DFL)

# One thread per process: ranks share the cores, and results do not depend on the number of cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Ray gives its workers the priority 15. While ranks of another test run, they would get 3 % of a core.
os.environ.setdefault("RAY_worker_niceness", "0")
# No deadlines: a shared machine is sometimes slow, which is not a fault of the code.
settings.register_profile("suite", deadline=None, derandomize=True)
settings.load_profile("suite")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage while modules are imported, and examine none of their objects in later collections."""
    with no_automatic_collection():
        result = yield
        gc.freeze()
    # Tests import more libraries; with the usual 700, each collection of their objects would take 0.3 s.
    gc.set_threshold(10_000)
    return result


@pytest.fixture(scope="module")
def postgres() -> Iterator[str]:
    """Yield the URL of a server, one per module. Skip if its binaries are not installed."""
    if shutil.which("initdb") is None or shutil.which("postgres") is None:
        pytest.skip("no Postgres binaries on this machine")
    pytest.importorskip("psycopg", reason="the Postgres driver is not installed")
    with postgres_server() as url:
        yield url
