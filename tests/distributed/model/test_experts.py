"""Mixtures of experts on real ranks: losses of routers, idle experts, recomputation, units of experts and fp32 routers.

Each case is compared with a plain loop over transformers' own model and its own auxiliary loss. The first half of the
rows has no labels, so that some data ranks train no token.
"""

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.families.routed import Case, Found, compare, precision
from tests.families.table import read
from tests.support.builders.families import small
from tests.support.ranks.ranks import ranks_of_any_number
from train_loop.model.families.anatomy import Experts
from train_loop.model.families.causal.family import CAUSAL
from train_loop.spec import ModelSpec

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers, about kernels that are not installed
AUX = {"router_aux_loss": {"coef": 0.1}, "router_z_loss": 0.01}
BY_DOCUMENT = {"router_aux_loss": {"coef": 0.1, "scope": "sequence"}}
MORE = bool(os.environ.get("MORE"))


def experts_by_family() -> dict[str, Experts]:
    """Return the experts of each mixture that is trained."""
    named = [one for one, row in read().items() if "results" in row and any("expert" in name for name in small(one))]
    found = {family: CAUSAL.build(ModelSpec(config=small(family))).experts for family in named}
    return {family: experts for family, experts in found.items() if experts is not None}


MIXTURES = experts_by_family() if MORE else {}
FAMILIES = [one for one in MIXTURES if one != "minimax"] or ["gpt_oss", "deepseek_v3"]
"""Mixtures that compute in half precision."""
PLAIN = {"gradient_checkpointing": "none"}
CASES = {
    "aux and z, FSDP, accumulation, recomputation": Case(world=2, training=AUX),
    "aux, HSDP, packed": Case(world=4, strategy={"fsdp_size": 2}, training=AUX, packed=True),
    "aux, Ulysses, padding": Case(world=2, strategy={"ulysses_size": 2}, training=AUX, model=PLAIN),
    "aux by document, Ulysses, packed": Case(world=4, strategy={"ulysses_size": 2}, training=BY_DOCUMENT, packed=True),
    "aux by document, one rank, packed": Case(training=BY_DOCUMENT, packed=True),
    "units of experts, prefetched": Case(
        world=2, strategy={"wrap_policy": {"moe_experts": ["Qwen3MoeMLP"]}, "forward_prefetch": 2}, training=AUX
    ),
    "idle experts, grouped": Case("gpt_oss", world=2, training=AUX, idle=True),
    "idle experts, eager": Case("gpt_oss", world=2, model={"experts_implementation": "eager"}, idle=True),
    "idle experts, correction bias": Case("deepseek_v3", world=4, strategy={"fsdp_size": 2}, idle=True),
    "experts that ranks do not divide": Case(world=4, config={"num_experts": 6}, training=AUX),
    "frozen routers": Case(
        world=2,
        training=AUX,
        model={"freeze_module_prefix": ["model.layers.0.mlp.gate", "model.layers.1.mlp.gate"]},
    ),
}

if MORE:
    with_loss = [family for family, experts in MIXTURES.items() if experts.auxiliary is not None]
    CASES |= {f"aux, {family}": Case(family, training=AUX) for family in with_loss}


@pytest.fixture(scope="module")
def call_ranks() -> Iterator[Callable[..., Any]]:
    with ranks_of_any_number(4) as call:
        yield call


@pytest.mark.parametrize("name", CASES)
def test_a_step_equals_a_plain_loop(name: str, call_ranks: Callable[..., Any]) -> None:
    case = CASES[name]
    found: Found = call_ranks(case.world, compare, case)
    assert found.error < 1e-5
    assert found.named_error < 1e-5
    assert {sum(layer) for layer in found.loads} == {found.expected_tokens}
    if case.idle:
        assert [sum(layer[2:]) for layer in found.loads] == [0] * len(found.loads)


BF16 = {"dtype": "bf16"}


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        (Case(world=2, model=BF16), torch.float32),
        (Case(world=2, model=BF16 | {"router_dtype": None}), torch.bfloat16),
        (Case(world=2, model=BF16, strategy={"wrap_policy": {"moe_experts": ["Qwen3MoeExperts"]}}), torch.float32),
        *((Case(family, world=2, model=BF16), torch.float32) for family in FAMILIES),
    ],
)
def test_routers_compute_in_their_dtype(case: Case, dtype: torch.dtype, call_ranks: Callable[..., Any]) -> None:
    assert call_ranks(case.world, precision, case) == (dtype, True)
