"""Probes of a Ray cluster: of its dashboard, and of its nodes through a Ray job."""

import secrets
import time
from collections.abc import Sequence

from service.adapters.ray.jobs import RayJobs
from service.domain.doctor.measurements import ProbeReply, Reachability
from service.domain.jobs.observation import SubmissionStatus
from service.errors import ClusterError
from train_loop.run_dir import VISIT_MARK, ClusterVisit

_POLL_SECONDS = 0.25
_RAY_SECONDS, _NODE_SECONDS = 30.0, 20.0
"""Seconds to wait for an embedded Ray to start, and for its first node. So the doctor works right after
`trainshed up`."""
_ENDED = (SubmissionStatus.SUCCEEDED, SubmissionStatus.FAILED, SubmissionStatus.STOPPED, SubmissionStatus.MISSING)
_START_SECONDS = 8.0
"""Seconds of a visit that the driver needs to start and to end; the rest is for the nodes."""


class RayProbe:
    """A ClusterProbe that uses `jobs`. `roots` are the URIs that each node must be able to read."""

    def __init__(self, jobs: RayJobs, *, roots: Sequence[str] = ()) -> None:
        self._jobs = jobs
        self._roots = tuple(roots)

    def greet(self) -> ProbeReply:
        """Return how the dashboard answers. Wait up to 30 s for a cluster that is starting."""
        deadline = time.monotonic() + _RAY_SECONDS
        while (reply := self._jobs.greet()).reach is Reachability.STARTING and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        return reply

    def nodes(self) -> int:
        """Return the number of live nodes. Wait up to 20 s for the first one. Raises ClusterError."""
        deadline = time.monotonic() + _NODE_SECONDS
        while not (count := self._jobs.count_nodes()) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        return count

    def visit(self, folder: str | None, *, seconds: float) -> ClusterVisit:
        """Return a report of each node, including whether it sees the files in `folder`. Raises ClusterError."""
        submission_id, deadline = f"doctor-{secrets.token_hex(8)}", time.monotonic() + seconds
        arguments = ["--seconds", f"{max(seconds - _START_SECONDS, seconds / 2):g}"]
        arguments += ["--folder", folder] if folder is not None else []
        arguments += [word for root in self._roots for word in ("--root", root)]
        self._jobs.run(submission_id, "train_loop.doctor.node_check", arguments)
        try:
            while (state := self._jobs.status(submission_id)) not in _ENDED and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
            return _parse(self._jobs.output(submission_id), state, seconds)
        finally:
            self._jobs.forget(submission_id)


def _parse(output: str, state: SubmissionStatus, seconds: float) -> ClusterVisit:
    lines = output.splitlines()
    for line in lines:
        if line.startswith(VISIT_MARK):
            return ClusterVisit.model_validate_json(line.removeprefix(VISIT_MARK))
    how = f"ended as {state}" if state in _ENDED else f"did not end within {seconds:g} s"
    last = next((line.strip() for line in reversed(lines) if line.strip()), "nothing")
    raise ClusterError(f"the Ray job that checks the nodes {how}; last line of its log: {last}")
