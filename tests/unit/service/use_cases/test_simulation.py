"""Simulation of thousands of seeds: one live attempt, no committed step lost, quotas hold, and every job ends."""

import multiprocessing
import os
import sys
from collections.abc import Iterator
from multiprocessing.pool import Pool

import pytest
import structlog

from tests.support.builders.searches import seeds
from tests.support.faults.simulated_world import EXPECTED, RuleBroken
from tests.support.faults.simulation import simulate

SEEDS = int(os.environ.get("TRAINSHED_SIMULATION_SEEDS", seeds(2000)))
_BATCH = 100


def _configure_log() -> None:
    structlog.configure(processors=[_check_log_line])


def _check_log_line(logger: object, method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Drop the log line of an injected fault; raise RuleBroken for any other logged exception."""
    error = sys.exc_info()[1]
    if event.get("exc_info") and not isinstance(error, EXPECTED):
        raise RuleBroken(repr(error)) from error
    raise structlog.DropEvent


def _simulate_batch(first: int) -> str | None:
    """Simulate a batch of seeds; return the first broken rule with its seed, or None."""
    for seed in range(first, min(first + _BATCH, SEEDS)):
        try:
            simulate(seed)
        except RuleBroken as error:
            return f"seed {seed}: {error}"
    return None


@pytest.fixture
def workers() -> Iterator[Pool]:
    with multiprocessing.get_context("spawn").Pool(os.cpu_count(), initializer=_configure_log) as pool:
        yield pool


def test_simulated_jobs_end_once_and_correctly_despite_faults(workers: Pool) -> None:
    found = workers.imap_unordered(_simulate_batch, range(0, SEEDS, _BATCH))
    assert [fault for fault in found if fault] == []
