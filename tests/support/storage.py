"""Run directories on object storage for tests: a bucket of a real server, and the variables by which it is found."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.support.s3 import S3Server, s3_server
from train_loop.run_dir import RunDir


@contextmanager
def bucket_of_runs() -> Iterator[S3Server]:
    """A server with the bucket `runs`, which this process and those that it starts find."""
    with s3_server() as server, pytest.MonkeyPatch.context() as patch:
        server.bucket("runs")
        for name, value in server.environment().items():
            patch.setenv(name, value)
        yield server


def run_dir_on_s3(name: str) -> RunDir:
    """A run directory in it."""
    return RunDir.at(f"s3://runs/default/{name}")
