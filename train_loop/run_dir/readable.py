"""Which files the jobs of a project may read. Pure, but for links in the roots themselves."""

import os
import re
from functools import lru_cache

from pydantic import BaseModel, ConfigDict

from train_loop.run_dir.durable import local_path

READABLE_VARIABLE = "TRAINSHED_READABLE"
"""What the service tells the processes of a job, as JSON of `Readable`."""
_JOB = re.compile(r"job-[0-9a-z]{26}")
_USER = re.compile(r"(?<=://)[^/@]*@")


class Readable(BaseModel):
    """What the jobs of a project may read. All of it is URIs or absolute paths."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    project: str
    roots: tuple[str, ...]
    """Storage roots of the project."""
    runs: tuple[str, ...] = ()
    """Where run directories are: <runs>/<project>/<job>."""
    caches: tuple[str, ...] = ()
    """Folders with prepared data of all projects."""

    def without_users(self) -> "Readable":
        """Return the same without names and passwords in URIs: the environment of a job is no secret."""
        return self.model_copy(
            update={name: tuple(_USER.sub("", uri) for uri in getattr(self, name)) for name in ("roots", "runs")}
        )

    def refusal(self, place: str, *, named: str) -> str | None:
        """Return why a remote URI, or a local path without links, may not be read; it calls the place `named`."""
        if not any(is_below(place, root) for root in self.roots):
            # A root may hold a user and a password for its storage, which are not everybody's.
            shown = ", ".join(_USER.sub("", root) for root in self.roots)
            return (
                f"{named} lies outside the allowed storage roots ({shown}); move the data under one of them, or have "
                "the operator add its folder to TRAINSHED_STORAGE_ROOTS"
            )
        if any(is_below(place, cache) for cache in self.caches):
            return f"{named} lies in the cache of prepared data, which no spec may name; name the data itself"
        for runs in self.runs:
            project, job = _steps_below(place, runs)
            if project != self.project and _JOB.fullmatch(job):
                return (
                    f"{named} lies in the run directory of {job}, which is no job of project {self.project!r}; clone "
                    "that job, or copy an export of it to a storage root"
                )
        return None


def is_below(place: str, root: str) -> bool:
    """Return whether a URI or path is a root or lies below it."""
    steps = _steps_of_root(root)
    return _steps(place)[: len(steps)] == steps


def _steps_below(place: str, root: str) -> tuple[str, str]:
    """Return the first two steps of a path below a root; empty ones if there are none."""
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
