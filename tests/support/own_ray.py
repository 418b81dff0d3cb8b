"""A Ray cluster for the tests of one module."""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

import pytest
import ray


@contextmanager
def own_ray(*, store_bytes: int, environment: Mapping[str, str] = MappingProxyType({})) -> Iterator[str]:
    """The address of a Ray with two CPUs, whose workers have the variables too; its folder needs a short path."""
    with tempfile.TemporaryDirectory(prefix="shed-") as folder, pytest.MonkeyPatch.context() as patch:
        for name, value in {"RAY_AUTH_MODE": "disabled", **environment}.items():
            patch.setenv(name, value)
        context = ray.init(
            address="local", num_cpus=2, object_store_memory=store_bytes, _temp_dir=folder, log_to_driver=False
        )
        yield context.address_info["gcs_address"]
        ray.shutdown()
