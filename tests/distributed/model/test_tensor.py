"""Ranks that share layers (tensor parallelism): equal to transformers' own model on one rank."""

from typing import Any

import pytest
import torch

from tests.families.parity import NONE, Case, difference
from tests.support.ranks.gradients import forget_meshes
from tests.support.ranks.ranks import on_ranks

FAMILIES = ("qwen3", "llama", "phi3", "gemma2", "gemma3_text", "olmo2")
MESHES = (
    Case("fsdp 2 x tp 2", 4, tp_size=2),
    Case("ddp 2 x tp 2, packed", 4, sharded=False, tp_size=2, packed=True),
    Case("sp 2 x tp 2, packed", 4, tp_size=2, ulysses_size=2, packed=True),
)


def differences(families: tuple[str, ...]) -> dict[tuple[str, str], Any]:
    """Return the largest relative difference of loss and gradients, by family and mesh."""
    torch.set_num_threads(1)
    forget_meshes()
    found: dict[tuple[str, str], Any] = {}
    for family in families:
        for case in MESHES:
            found[family, case.mesh] = difference(family, case, NONE)
    return found


@pytest.fixture(scope="module")
def found() -> dict[tuple[str, str], Any]:
    return on_ranks(4, differences, FAMILIES)[0]


@pytest.mark.parametrize("mesh", [case.mesh for case in MESHES])
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_are_those_of_one_rank(found: dict[tuple[str, str], Any], family: str, mesh: str) -> None:
    assert found[family, mesh] < 1e-5
