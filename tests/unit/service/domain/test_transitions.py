"""Legal state transitions: the whole table as in the design."""

import pytest

from service.domain.jobs.job import LIVE, TRANSITIONS, JobState
from tests.support.fakes.service import a_job

LEGAL = """
QUEUED → STARTING PAUSING CANCELLING
STARTING → RUNNING PAUSING CANCELLING SUCCEEDED FAILED
RUNNING → RECOVERING PAUSING CANCELLING SUCCEEDED FAILED
RECOVERING → RUNNING PAUSING CANCELLING SUCCEEDED FAILED
PAUSING → PAUSED CANCELLING SUCCEEDED FAILED
PAUSED → QUEUED CANCELLING
CANCELLING → CANCELLED
CANCELLED →
SUCCEEDED →
FAILED →
"""


def test_transitions_equal_the_design() -> None:
    table = {
        JobState(before): frozenset(map(JobState, after.split()))
        for before, _, after in (line.partition(" →") for line in LEGAL.strip().splitlines())
    }
    assert dict(TRANSITIONS) == table


@pytest.mark.parametrize("before", JobState)
@pytest.mark.parametrize("after", JobState)
def test_move_follows_the_table(before: JobState, after: JobState) -> None:
    job = a_job()
    object.__setattr__(job, "state", before)
    if after in TRANSITIONS[before]:
        moved = job.move(after, now=5.0)
        assert (moved.state, moved.updated_at, moved.times[after]) == (after, 5.0, 5.0)
        assert (moved.finished_at is not None) == after.terminal
    else:
        with pytest.raises(ValueError, match=f"cannot go from {before} to {after}"):
            job.move(after, now=5.0)


def test_every_live_state_but_cancelling_can_be_cancelled() -> None:
    assert all(JobState.CANCELLING in TRANSITIONS[state] for state in LIVE if state is not JobState.CANCELLING)
