"""Loss and every gradient of every mesh, compared with one rank on the same samples."""

import os
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
import torch.distributed as dist

from tests.support.builders.specs import LONGROPE, TINY, spec
from tests.support.ranks.gradients import Gradients, one_step, random_rows
from tests.support.ranks.ranks import on_ranks

SAMPLES, LENGTH, HEADS = 24, 32, 8
MORE = bool(os.environ.get("MORE"))
Result = tuple[float, Gradients]


@dataclass(frozen=True)
class Case:
    """A mesh, a model and its data."""

    world: int
    fsdp: int
    sp: int
    accumulation: int = 1
    packed: bool = True
    kv_heads: int = 2
    tied: bool = False
    model: str = "qwen3"

    def __str__(self) -> str:
        mesh = f"{self.world}ranks-fsdp{self.fsdp}-sp{self.sp}-ga{self.accumulation}"
        data = "packed" if self.packed else "unpacked"
        return f"{mesh}-{data}-kv{self.kv_heads}-{'tied' if self.tied else 'untied'}-{self.model}"

    @property
    def reference(self) -> "Case":
        """Return the same model and data on one rank, with all samples in one micro-batch."""
        return replace(self, world=1, fsdp=0, sp=1, accumulation=1)


def grid() -> list[Case]:
    """Return every mesh x kv heads below, equal to and above sp, each with two settings of the three switches.

    The two are opposite: each value of accumulation, packing and tying occurs in each. Four neighbours in the grid
    have all eight settings. With `MORE=1`, each mesh x kv heads has all eight, and there is a mesh of eight ranks.
    """
    kv_heads = {1: (1, 2), 2: (1, 2, 4), 4: (2, 4, 8)}
    blocks = [(4, fsdp, sp, kv) for fsdp, sp in ((4, 1), (2, 1), (4, 2), (2, 2), (4, 4)) for kv in kv_heads[sp]]
    # KV heads are distributed within a group of sp ranks, in the same way as on four.
    blocks += [(8, 4, 4, 2)] if MORE else []
    cases = [
        Case(world, fsdp, sp, accumulation, packed, kv, tied)
        for number, (world, fsdp, sp, kv) in enumerate(blocks)
        for place, (accumulation, packed, tied) in enumerate(product((1, 3), (True, False), (False, True)))
        if MORE or number % 4 in (place, 7 - place)
    ]
    families = [Case(4, 4, 2, kv_heads=4, model="llama"), Case(4, 4, 2, model="qwen2"), Case(4, 4, 1, model="mistral")]
    # Documents shorter and longer than those for which longrope has short factors.
    lengths = [Case(4, 4, sp, packed=packed, model="phi3") for sp in (1, 2) for packed in (True, False)]
    return cases + families + lengths


CASES = grid()


def gradients(case: Case) -> Result:
    """Return the gradients of one accumulated step of a case on the existing ranks."""
    config = TINY | {
        "model_type": case.model,
        "num_attention_heads": HEADS,
        "num_key_value_heads": case.kv_heads,
        "tie_word_embeddings": case.tied,
    }
    if case.model == "mistral":
        config["sliding_window"] = 5
    if case.model == "phi3":
        config = LONGROPE | {name: config[name] for name in ("num_attention_heads", "num_key_value_heads")}
        config["rope_parameters"] = LONGROPE["rope_parameters"] | {"short_factor": [1.0] * 2, "long_factor": [4.0] * 2}
    per_rank = SAMPLES // (case.world // case.sp)
    job = spec(
        model={"config": config, "gradient_checkpointing": "full"},
        data={"sequence_length": LENGTH},
        training={"per_device_train_batch_size": per_rank // case.accumulation},
        strategy={"fsdp_size": case.fsdp, "ulysses_size": case.sp},
        scaling={"num_workers": dist.get_world_size()},
    )
    return one_step(job, random_rows(SAMPLES, LENGTH, vocab=TINY["vocab_size"], packed=case.packed))


def all_cases(cases: list[Case]) -> dict[Case, Result]:
    """Run every case on the same ranks, because starting ranks takes most of the time."""
    results = {case: gradients(case) for case in cases}
    return results if dist.get_rank() == 0 else {}


@pytest.fixture(scope="module")
def found() -> dict[Case, Result]:
    cases = {*CASES, *(case.reference for case in CASES)}
    results: dict[Case, Result] = {}
    for world in sorted({case.world for case in cases}):
        results |= on_ranks(world, all_cases, sorted((case for case in cases if case.world == world), key=str))[0]
    return results


@pytest.mark.parametrize("case", CASES, ids=str)
def test_loss_and_every_gradient_equal_one_rank(case: Case, found: Any) -> None:
    (loss, gradient), (expected_loss, expected) = found[case], found[case.reference]
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert gradient.keys() == expected.keys()
    for name, value in expected.items():
        assert (gradient[name] - value).norm() <= 1e-5 * value.norm(), name
        assert value.norm() > 0, f"{name} has no gradient to compare"
