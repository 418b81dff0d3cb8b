"""Environments of the service's processes: of an embedded Ray and its jobs, and of helpers that read users' files."""

import re
from collections.abc import Collection, Iterable, Mapping

from train_loop.system.redact import may_hold_secret

_OF_THE_SERVICE = re.compile(r"TRAINSHED_(?!TEST_)|OTEL_|PG[A-Z]+$", re.IGNORECASE)
"""Settings of the service, its tracing and its database. A submission sets those that a job needs."""
_PROXY = re.compile(r"(https?|all)_proxy$", re.IGNORECASE)
_PROVIDERS = {
    "AWS_": ("s3", "s3a"),
    "GOOGLE_": ("gs", "gcs"),
    "AZURE_": ("abfs", "abfss", "adl", "az", "wasb", "wasbs"),
    "DATABRICKS_": ("mlflow",),
    "MLFLOW_": ("mlflow",),
    "WANDB_": ("wandb",),
}
"""Prefixes of variables by the storage schemes and sinks that use them."""
_FSSPEC = "FSSPEC_"
_STORAGE = ("s3", "gs", "az")
"""One scheme of each storage provider."""


def environment_of_jobs(
    environment: Mapping[str, str], *, roots: Iterable[str], sinks: Collection[str]
) -> dict[str, str]:
    """Return the variables that Ray and the jobs may have.

    Credentials of a storage provider reach jobs if a root is there, and those of a tracker if it is a sink. All other
    variables that may hold a secret are left out.
    """
    used = {root.partition("://")[0].lower() for root in roots} | {*sinks}
    return {name: value for name, value in environment.items() if _may_reach_jobs(name, value, used)}


def environment_of_helpers(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a process that reads users' files: no secrets but credentials of storage.

    It reads any storage that the service may read.
    """
    return {name: value for name, value in environment.items() if _may_reach_helpers(name, value)}


def _may_reach_helpers(name: str, value: str) -> bool:
    upper = name.upper()
    if _OF_THE_SERVICE.match(name):
        ours = upper.startswith("TRAINSHED_") and upper != "TRAINSHED_DATABASE_URL"
        return ours and not may_hold_secret(name, value)
    return _may_reach_jobs(name, value, _STORAGE) or upper.startswith(_FSSPEC)


def _may_reach_jobs(name: str, value: str, used: Collection[str]) -> bool:
    upper = name.upper()
    if _OF_THE_SERVICE.match(name):
        return False
    if upper.startswith(_FSSPEC):
        return upper.removeprefix(_FSSPEC).partition("_")[0].lower() in used
    for prefix, users in _PROVIDERS.items():
        if upper.startswith(prefix):
            return any(user in used for user in users)
    return bool(_PROXY.match(name)) or not may_hold_secret(name, value)
