"""Heads of labels of every family: equal to transformers' own classes on one rank and FSDP 2, or rejected by name.

Each run computes the families whose heads differ in kind, and a sample that depends on the commit; with `MORE=1`, all.
"""

import os
import random
from collections.abc import Iterator
from typing import Any

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from tests.families.heads import FAMILIES, HEADS, result
from tests.families.table import read
from tests.families.test_table import LIBRARY
from tests.support.builders.searches import SEED
from tests.support.ranks.ranks import ranks_of_any_number

KINDS = (
    "gpt2",  # another forward pass than the generic one
    "ctrl",  # neither positions nor masks as arguments
    "modernbert-decoder",  # more layers before the scores
    "bert",  # an encoder whose head reads a pooler
)
DRAWN = FAMILIES if os.environ.get("MORE") else (*KINDS, *random.Random(SEED).sample(FAMILIES, 2))
pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers, about kernels that are not installed


@pytest.fixture(scope="module")
def call_ranks() -> Iterator[Any]:
    with ranks_of_any_number(2) as call:
        yield call


@pytest.mark.parametrize("family", dict.fromkeys(DRAWN))
def test_head_equals_that_of_transformers_or_is_rejected_by_name(family: str, call_ranks: Any) -> None:
    is_decoder = "results" in read().get(family, {}) and family not in MODEL_FOR_MASKED_LM_MAPPING_NAMES
    for head, (_, classes) in HEADS.items():
        found = result(family, head, call_ranks) if family in classes else "equal"
        if found == "equal":
            continue
        assert not is_decoder or "are not those of the row's last token" in found, f"{found}; MODELS_SEED={SEED}"
        assert "; " in found, f"MODELS_SEED={SEED}"
        assert not LIBRARY.search(found), f"MODELS_SEED={SEED}"
