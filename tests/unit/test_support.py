"""Support of the tests themselves: signals of a suite in the background, and what a timeout reports."""

import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.waiting import wait_for


class Seen(NamedTuple):
    state: str


class Api:
    """An object that conditions ask."""

    got = ("one",)

    def job(self) -> Seen:
        return Seen("QUEUED")

    def lines(self) -> list[str]:
        return [self.job().state]


def test_timeout_reports_what_the_calls_of_a_condition_returned() -> None:
    api, limit = Api(), 3

    def has_ended() -> str | None:
        job = api.job()
        return job.state if job.state == "SUCCEEDED" else None

    with pytest.raises(TimeoutError, match=r"the end did not come true within 0 s; last seen: None\n") as missed:
        wait_for(has_ended, "the end", seconds=0)
    assert "  job = Seen(state='QUEUED')\n" in str(missed.value)
    assert "  Api.job(): Seen(state='QUEUED')\n" in str(missed.value)
    with pytest.raises(TimeoutError, match=r"  limit = 3\n") as missed:
        wait_for(lambda: len(api.lines()) > limit, seconds=0)
    assert "  Api.lines(): ['QUEUED']" in str(missed.value)
    assert sys.getprofile() is None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_suite_receives_signals_that_its_parent_ignores(number: signal.Signals) -> None:
    code = f"import tests.conftest, signal; print(signal.getsignal({number}) is not signal.SIG_IGN)"
    ignoring = f"trap '' {number.name.removeprefix('SIG')}; exec \"$@\""
    command = ["sh", "-c", ignoring, "sh", sys.executable, "-c", code]
    root = Path(__file__).parents[2]
    assert subprocess.run(command, capture_output=True, text=True, cwd=root, check=True).stdout == "True\n"
