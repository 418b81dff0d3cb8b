"""The plan's bytes of a step on two ranks, compared with the measured ones: for every family, objective and size.

A commit draws some of them, MORE takes all.
"""

import os
import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.families import heads
from tests.families.objectives import OBJECTIVES, write_rows
from tests.families.parity import KINDS, NONE, Settings, advised
from tests.families.runs import Kind, default_job, measure_memory, shape_of, unpacked_job
from tests.families.table import read
from tests.support.builders.datasets import prepare_tokens
from tests.support.builders.searches import SEED, drawn
from tests.support.builders.specs import may_read
from tests.support.own_code import forget_imports
from tests.support.ranks.ranks import ranks_of_any_number
from train_loop.conformance.measure import Memory
from train_loop.preflight.model import check_model

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers, about kernels that are not installed
CallRanks = Callable[..., Any]
TOKENS, LABELS = "token cross entropy", "classes of tokens, encoder"
HEADS = (LABELS, "classes of rows, encoder", "masked tokens", "embeddings")
_draw = random.Random(SEED)
_tokens = [(family, TOKENS) for family in KINDS]
_objectives = [(one.families[-1], name) for name, one in OBJECTIVES.items() if name != TOKENS]
MORE = bool(os.environ.get("MORE"))
KNOWN = _tokens + _objectives if MORE else _draw.sample(_tokens, 2) + _draw.sample(_objectives, 1)
OTHERS = [
    *((family, TOKENS) for family, row in read().items() if "rejected" not in row and family not in KINDS),
    *((family, name) for name in HEADS for family in heads.FAMILIES),
]
"""Families that the table of models accepts, and all with a head, of which some are refused."""


@pytest.fixture(scope="module")
def call_ranks() -> Iterator[CallRanks]:
    with ranks_of_any_number(2) as call:
        yield call


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("rows"), 11)


@pytest.fixture(autouse=True)
def _unpacked_here(rows: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # Tests import own code from the folder of its rows, and forget it.
    monkeypatch.setattr(tempfile, "tempdir", str(rows.parent))
    with forget_imports():
        yield


@pytest.mark.parametrize(("family", "objective"), KNOWN)
def test_planned_bytes_are_those_of_a_step(family: str, objective: str, call_ranks: CallRanks, rows: Path) -> None:
    check_bytes(accepted(Kind(family, objective, NONE, rows)), call_ranks)


@pytest.mark.parametrize(("family", "objective"), drawn(OTHERS, 3))
def test_planned_bytes_of_every_family(family: str, objective: str, call_ranks: CallRanks, rows: Path) -> None:
    check_bytes(accepted(Kind(family, objective, NONE, rows)), call_ranks)


LARGE: list[tuple[str, str, dict[str, Any]]] = [
    ("qwen3", TOKENS, {"tie_word_embeddings": True}),
    ("qwen3", TOKENS, {"tie_word_embeddings": False}),
    ("qwen3", "classes of tokens", {}),
    ("bert", "masked tokens", {}),
]


@pytest.mark.parametrize(("family", "objective", "config"), drawn(LARGE, 1))
def test_tables_of_a_large_vocabulary_are_planned(
    family: str, objective: str, config: dict[str, Any], call_ranks: CallRanks, rows: Path
) -> None:
    large = config | {"vocab_size": 8000, "hidden_size": 256}
    check_bytes(accepted(Kind(family, objective, Settings(tuple(large.items())), rows)), call_ranks)


def test_scores_of_relative_attention_are_planned(call_ranks: CallRanks, rows: Path) -> None:
    relative = Settings((("relative_attention", True), ("pos_att_type", ["c2p", "p2c"])))
    check_bytes(accepted(Kind("deberta-v2", "masked tokens", relative, rows)), call_ranks)


def test_lists_of_tables_are_not_layers(call_ranks: CallRanks, rows: Path) -> None:
    check_bytes(accepted(Kind("markuplm", LABELS, NONE, rows)), call_ranks)


@pytest.mark.parametrize(("family", "objective", "used"), [("luke", LABELS, 0.31), ("bart", TOKENS, 0.7)])
def test_gradients_that_text_does_not_give_are_not_planned(
    family: str, objective: str, used: float, call_ranks: CallRanks, rows: Path
) -> None:
    """Rows of text use neither a table of entities, nor attention to an encoder that does not exist."""
    planned, found = check_bytes(accepted(Kind(family, objective, NONE, rows)), call_ranks)
    assert found.used == pytest.approx(used, rel=0.02)
    assert planned["gradients"] == pytest.approx(used * planned["parameters"], rel=0.02)


FROZEN = [
    ("qwen3", TOKENS, "model.embed_tokens"),
    ("bert", LABELS, "bert.embeddings"),
    ("gpt2", TOKENS, "transformer.h.0"),
]


@pytest.mark.parametrize(("family", "objective", "prefix"), drawn(FROZEN, 1))
def test_frozen_parts_are_planned(family: str, objective: str, prefix: str, call_ranks: CallRanks, rows: Path) -> None:
    kind = accepted(Kind(family, objective, Settings(frozen=(prefix,)), rows))
    planned, _ = check_bytes(kind, call_ranks)
    assert planned["gradients"] < planned["parameters"]


def accepted(kind: Kind) -> Kind:
    """Return a kind with the settings that each refusal advises; skip the test if it is refused all the same."""
    while True:
        _, problems = check_model(unpacked_job(kind, world=2), may_read())
        if not problems:
            prepare_tokens(default_job(kind, world=1), kind.rows.parent)
            return kind
        better = advised(kind.family, problems[0].message, kind.settings)
        if better == kind.settings:
            pytest.skip(f"refused: {problems[0].message}")
        kind = kind._replace(settings=better)


def check_bytes(kind: Kind, call_ranks: CallRanks) -> tuple[dict[str, int], Memory]:
    """Compare the bytes, and return them: planned by term, and measured."""
    planned, found = call_ranks(2, measure_memory, kind, shape_of(unpacked_job(kind, world=2)), 2)
    for name in ("parameters", "gradients", "optimizer"):
        assert getattr(found, name) == pytest.approx(planned[name], rel=0.05)
    total = sum(size for name, size in planned.items() if name != "checkpoint_staging")
    # Modules of RecurrentGemma keep the last state with its graph until the next call.
    assert found.peak == pytest.approx(total, rel=0.12 if kind.family == "recurrent_gemma" else 0.1)
    return planned, found
