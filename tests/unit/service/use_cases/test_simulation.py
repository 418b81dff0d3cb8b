"""Simulation of many seeds: one live attempt, no committed step lost, quotas hold, and every job ends."""

import os
import sys
from collections.abc import Iterator

import pytest
import structlog

from tests.support.builders.searches import seeds
from tests.support.faults.simulated_world import EXPECTED, RuleBroken
from tests.support.faults.simulation import simulate

SEEDS = int(os.environ.get("TRAINSHED_SIMULATION_SEEDS", seeds(320, more=5_000)))
"""More than it took to find the rarest of fifteen faults that were put into the service one by one."""


def _check_log_line(logger: object, method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Drop the log line of an injected fault; raise RuleBroken for any other logged exception."""
    error = sys.exc_info()[1]
    if event.get("exc_info") and not isinstance(error, EXPECTED):
        raise RuleBroken(repr(error)) from error
    raise structlog.DropEvent


@pytest.fixture
def checked_log() -> Iterator[None]:
    structlog.configure(processors=[_check_log_line])
    yield
    structlog.reset_defaults()


@pytest.mark.usefixtures("checked_log")
def test_simulated_jobs_end_once_and_correctly_despite_faults() -> None:
    for seed in range(SEEDS):
        try:
            simulate(seed)
        except RuleBroken as error:
            raise AssertionError(f"seed {seed}: {error}") from error
