"""Run directories on object storage for tests: a bucket of a real server, and the variables that configure clients."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.support.servers.s3 import S3Server, s3_server
from train_loop.run_dir import RunDir


@contextmanager
def bucket_of_runs() -> Iterator[S3Server]:
    """Run a server with the bucket `runs`, configured for this process and its children."""
    with s3_server() as server, pytest.MonkeyPatch.context() as patch:
        server.bucket("runs")
        for name, value in server.environment().items():
            patch.setenv(name, value)
        yield server


def run_dir_on_s3(name: str) -> RunDir:
    """Return a run directory in the bucket."""
    return RunDir.at(f"s3://runs/default/{name}")
