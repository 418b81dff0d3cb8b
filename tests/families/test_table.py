"""The table of models in `docs/reference/models.json`: complete, without faults, and equal to results computed now.

Each run computes some cases of families that differ in kind, and all cases of another one; the commit draws them.
`make models` computes all families and writes the table. `MODELS_SEED=…` draws the sample of another commit.
"""

import os
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.families.parity import CASES, KINDS
from tests.families.table import entry, faults, kind, read
from tests.support.builders.searches import SEED
from tests.support.families.families import FAMILIES
from tests.support.ranks.ranks import ranks_of_any_number

ALONE = ("one rank, packed", "one rank, chunked loss")
TOGETHER = ("HSDP 2 x 2, plain", "Ulysses 4, plain", "HSDP 2 x Ulysses 2, packed")
"""Cases of the kinds of families: two of these meshes for each."""
SOME = [*KINDS] if os.environ.get("MORE") else random.Random(SEED).sample(KINDS, 4)
"""Kinds of families that this commit computes."""
pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers, about kernels that are not installed
LIBRARY = re.compile(
    r"\bissue|eager|github|BF16|has no attribute|operand|subscriptable|validator|\w+Error\b|not a float|None\b"
)
"""Words of errors of libraries, or of advice that users of this service cannot follow."""


SAMPLE = random.Random(SEED).sample([family for family in FAMILIES if family not in KINDS], 1)


@pytest.fixture(scope="module")
def call_ranks() -> Iterator[Callable[..., Any]]:
    with ranks_of_any_number(4) as call:
        yield call


def test_table_has_every_family_of_transformers() -> None:
    assert sorted(read()) == sorted(FAMILIES), "run `make models`"


def test_no_family_is_wrong_fails_or_hangs() -> None:
    assert {family: found for family, row in read().items() if (found := faults(row))} == {}


def test_reasons_say_what_is_missing_and_what_to_do() -> None:
    reasons = {
        why
        for row in read().values()
        for why in [row.get("rejected"), *row.get("results", {}).values()]
        if isinstance(why, str)
    }
    assert [why for why in reasons if "; " not in why] == []
    assert [why for why in reasons if LIBRARY.search(why)] == []


@pytest.mark.parametrize("family", [*SOME, *SAMPLE])
def test_results_are_those_of_the_table(family: str, call_ranks: Callable[..., Any]) -> None:
    some = (*ALONE, *random.Random(f"{SEED} {family}").sample(TOGETHER, 2))
    cases = CASES if family in SAMPLE or os.environ.get("MORE") else some
    expected = kind(read()[family])
    if "results" in expected:
        expected["results"] = {name: expected["results"][name] for name in cases}
    assert kind(entry(family, call_ranks, cases)) == expected, f"MODELS_SEED={SEED}"
