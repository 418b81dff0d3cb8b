"""Questions to a Ray cluster: how it answers, and, by a Ray job, what its nodes are and see."""

import secrets
import time
from collections.abc import Sequence

from service.adapters.ray_jobs import RayJobs
from service.domain.checkup import Greeting, Reach
from service.domain.decide import Submission
from service.errors import ClusterError
from train_loop.run_dir import VISIT_MARK, ClusterVisit

_LOOK_SECONDS = 0.25
_RAY_SECONDS, _NODE_SECONDS = 30.0, 20.0
"""An embedded Ray takes some of them to start, and more to say that it has a node; whoever has just said `trainshed up`
need not ask twice."""
_ENDED = (Submission.SUCCEEDED, Submission.FAILED, Submission.STOPPED, Submission.MISSING)
_START_SECONDS = 8.0
"""What a driver takes until it asks the nodes, and to end, of the time that it has."""


class RayProbe:
    """Asks through `jobs`; `roots` are what nodes must be able to read."""

    def __init__(self, jobs: RayJobs, *, roots: Sequence[str] = ()) -> None:
        self._jobs = jobs
        self._roots = tuple(roots)

    def greet(self) -> Greeting:
        """How the cluster answers, once one that is starting has started."""
        deadline = time.monotonic() + _RAY_SECONDS
        while (greeting := self._jobs.greet()).reach is Reach.STARTING and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
        return greeting

    def nodes(self) -> int:
        """How many are alive, after a moment where there are none. Raises ClusterError."""
        deadline = time.monotonic() + _NODE_SECONDS
        while not (count := self._jobs.count_nodes()) and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
        return count

    def visit(self, folder: str | None, *, seconds: float) -> ClusterVisit:
        """What each node is, and whether it sees what lies in a folder. Raises ClusterError."""
        submission_id, deadline = f"doctor-{secrets.token_hex(8)}", time.monotonic() + seconds
        asked = ["--seconds", f"{max(seconds - _START_SECONDS, seconds / 2):g}"]
        asked += ["--folder", folder] if folder is not None else []
        asked += [word for root in self._roots for word in ("--root", root)]
        self._jobs.run(submission_id, "train_loop.doctor", asked)
        try:
            while (state := self._jobs.status(submission_id)) not in _ENDED and time.monotonic() < deadline:
                time.sleep(_LOOK_SECONDS)
            return _parse(self._jobs.output(submission_id), state, seconds)
        finally:
            self._jobs.forget(submission_id)


def _parse(output: str, state: Submission, seconds: float) -> ClusterVisit:
    lines = output.splitlines()
    for line in lines:
        if line.startswith(VISIT_MARK):
            return ClusterVisit.model_validate_json(line.removeprefix(VISIT_MARK))
    how = f"ended as {state}" if state in _ENDED else f"did not end within {seconds:g} s"
    last = next((line.strip() for line in reversed(lines) if line.strip()), "nothing")
    raise ClusterError(f"a Ray job that asks the nodes {how}; its last word: {last}")
