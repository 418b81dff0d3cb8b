"""The files that jobs of a project may read. Pure, except that it resolves links in the roots themselves."""

import os
import re
from functools import lru_cache
from urllib.parse import unquote

from pydantic import BaseModel, ConfigDict

from train_loop.run_dir.files.durable import local_path

READ_POLICY_VARIABLE = "TRAINSHED_READ_POLICY"
"""Environment variable of a job's processes: its `ReadPolicy` as JSON."""
_JOB = re.compile(r"job-[0-9a-z]{26}", re.IGNORECASE)
_WITH_USERS = {"dask", "ftp", "ftps", "hdfs", "http", "https", "sftp", "smb", "ssh", "webdav", "webhdfs"}
"""Schemes whose `user@` names a user of the host. In others, such as abfss://container@account, it names data."""
_USER = re.compile(r"(?<=://)[^/@?#\\]*@")
_PASSWORD = re.compile(r"(?<=://)[^/@]*:[^/]*@")


class ReadPolicy(BaseModel):
    """The places that jobs of a project may read, as URIs or absolute paths."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    project: str
    roots: tuple[str, ...]
    """Storage roots of the project."""
    runs: tuple[str, ...] = ()
    """Roots of run directories, which are `<root>/<project>/<job>`."""
    caches: tuple[str, ...] = ()
    """Folders with prepared data of all projects."""
    code: bool = False
    """Whether its jobs may run their own code."""

    def without_users(self) -> "ReadPolicy":
        """Return the policy without user names and passwords in its URIs: a job's environment is not secret."""
        return self.model_copy(
            update={name: tuple(_without_user(uri) for uri in getattr(self, name)) for name in ("roots", "runs")}
        )

    def refusal(self, place: str, *, named: str) -> str | None:
        """Return the reason why a place may not be read, or None if it may.

        `place` is a remote URI, or a local path with links resolved. The message calls it `named`.
        """
        if not any(is_below(place, root) for root in self.roots):
            # A root may contain a user name and a password.
            shown = ", ".join(_without_user(root) for root in self.roots)
            return (
                f"{named} lies outside the allowed storage roots ({shown}); move the data under one of them, or have "
                "the operator add its folder to TRAINSHED_STORAGE_ROOTS"
            )
        if self.is_cache(place):
            return f"{named} lies in the cache of prepared data; name the data itself"
        if self._is_foreign_run(place):
            # Without the job's id: a link may have led there.
            return (
                f"{named} lies in the run directory of a job that is not one of project {self.project!r}; clone that "
                "job, or copy an export of it to a storage root"
            )
        return None

    def hides(self, place: str) -> bool:
        """Return whether listings leave a place out: caches, and run directories of other projects."""
        return self.is_cache(place) or self._is_foreign_run(place)

    def is_cache(self, place: str) -> bool:
        """Return whether a place is in the cache of prepared data."""
        return any(is_below(place, cache) for cache in self.caches)

    def _is_foreign_run(self, place: str) -> bool:
        for runs in self.runs:
            project, job = _steps_below(place, runs)
            if project != self.project and _JOB.fullmatch(job):
                return True
        return False


def is_below(place: str, root: str) -> bool:
    """Return whether a URI or path equals a root or lies below it."""
    steps = _steps_of_root(root)
    return _steps(place)[: len(steps)] == steps


def _steps_below(place: str, root: str) -> tuple[str, str]:
    """Return the first two path components below a root; empty strings if there are none.

    Servers may read `//`, `/./` and percent-encoded components as other paths: compare the paths that they may read.
    """
    if not is_below(place, root):
        return "", ""
    steps = (unquote(step) for step in _steps(place)[len(_steps_of_root(root)) :])
    first, second, *_ = [*(step for step in steps if step not in ("", ".")), "", ""]
    return first, second


def _steps(place: str) -> list[str]:
    scheme = place.partition("://")[0]
    return (_USER.sub("", place) if scheme in _WITH_USERS else place).rstrip("/").split("/")


def _without_user(uri: str) -> str:
    """Return a URI without user name and password. A container before the @ stays."""
    return (_USER if uri.partition("://")[0] in _WITH_USERS else _PASSWORD).sub("", uri)


@lru_cache(maxsize=256)
def _steps_of_root(root: str) -> list[str]:
    local = root.startswith("file:") or "://" not in root
    return _steps(os.path.realpath(local_path(root)) if local else root)
