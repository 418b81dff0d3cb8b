"""The files that jobs of a project may read. Pure, except that it resolves links in the roots themselves."""

import os
import re
from functools import lru_cache

from pydantic import BaseModel, ConfigDict

from train_loop.run_dir.durable import local_path

READ_POLICY_VARIABLE = "TRAINSHED_READ_POLICY"
"""Environment variable of a job's processes: its `ReadPolicy` as JSON."""
_JOB = re.compile(r"job-[0-9a-z]{26}")
_USER = re.compile(r"(?<=://)[^/@]*@")


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

    def without_users(self) -> "ReadPolicy":
        """Return the policy without user names and passwords in its URIs: a job's environment is not secret."""
        return self.model_copy(
            update={name: tuple(_USER.sub("", uri) for uri in getattr(self, name)) for name in ("roots", "runs")}
        )

    def refusal(self, place: str, *, named: str) -> str | None:
        """Return the reason why a place may not be read, or None if it may.

        `place` is a remote URI, or a local path with links resolved. The message calls it `named`.
        """
        if not any(is_below(place, root) for root in self.roots):
            # A root may contain a user name and a password.
            shown = ", ".join(_USER.sub("", root) for root in self.roots)
            return (
                f"{named} lies outside the allowed storage roots ({shown}); move the data under one of them, or have "
                "the operator add its folder to TRAINSHED_STORAGE_ROOTS"
            )
        if any(is_below(place, cache) for cache in self.caches):
            return f"{named} lies in the cache of prepared data; name the data itself"
        for runs in self.runs:
            project, job = _steps_below(place, runs)
            if project != self.project and _JOB.fullmatch(job):
                return (
                    f"{named} lies in the run directory of {job}, which is not a job of project {self.project!r}; "
                    "clone that job, or copy an export of it to a storage root"
                )
        return None


def is_below(place: str, root: str) -> bool:
    """Return whether a URI or path equals a root or lies below it."""
    steps = _steps_of_root(root)
    return _steps(place)[: len(steps)] == steps


def _steps_below(place: str, root: str) -> tuple[str, str]:
    """Return the first two path components below a root; empty strings if there are none."""
    if not is_below(place, root):
        return "", ""
    first, second, *_ = [*_steps(place)[len(_steps_of_root(root)) :], "", ""]
    return first, second


def _steps(place: str) -> list[str]:
    return _USER.sub("", place).rstrip("/").split("/")


@lru_cache(maxsize=256)
def _steps_of_root(root: str) -> list[str]:
    local = root.startswith("file:") or "://" not in root
    return _steps(os.path.realpath(local_path(root)) if local else root)
