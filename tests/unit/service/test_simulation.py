"""Thousands of worlds: one live attempt, no committed step lost, ends are final, quotas hold, and every job ends."""

import multiprocessing
import os
import sys
from collections.abc import Iterator
from multiprocessing.pool import Pool

import pytest
import structlog

from tests.support.searches import seeds
from tests.support.simulated_world import EXPECTED, RuleBroken
from tests.support.simulation import simulate

SEEDS = int(os.environ.get("TRAINSHED_SIMULATION_SEEDS", seeds(4000)))
_AT_ONCE = 100


def _quiet() -> None:
    structlog.configure(processors=[_hear])


def _hear(logger: object, method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """What fails on purpose is told in vain; what else fails is a fault."""
    error = sys.exc_info()[1]
    if event.get("exc_info") and not isinstance(error, EXPECTED):
        raise RuleBroken(repr(error)) from error
    raise structlog.DropEvent


def _worlds(first: int) -> str | None:
    """What goes wrong in so many worlds, with the seed; None where nothing does."""
    for seed in range(first, min(first + _AT_ONCE, SEEDS)):
        try:
            simulate(seed)
        except RuleBroken as error:
            return f"seed {seed}: {error}"
    return None


@pytest.fixture
def workers() -> Iterator[Pool]:
    with multiprocessing.get_context("spawn").Pool(os.cpu_count(), initializer=_quiet) as pool:
        yield pool


def test_whatever_fails_every_job_ends_once_and_as_it_should(workers: Pool) -> None:
    found = workers.imap_unordered(_worlds, range(0, SEEDS, _AT_ONCE))
    assert [fault for fault in found if fault] == []
