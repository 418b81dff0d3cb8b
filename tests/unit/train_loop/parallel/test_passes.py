"""The order of passes, and the passes that a spec needs."""

from typing import Any

import pytest

from tests.support.builders.specs import spec
from train_loop.parallel.passes import PASSES
from train_loop.plan import plan_mesh


@pytest.mark.parametrize(
    ("parts", "ulysses", "expected"),
    [
        ({"model": {"gradient_checkpointing": "none"}}, 1, ["Positions", "Shard", "Timing"]),
        (
            {"model": {"gradient_checkpointing": "full", "compile": True}, "strategy": {"apply_tiled_mlp": True}},
            2,
            ["Positions", "Sequence", "Tiles", "Recompute", "Compile", "Shard", "Timing"],
        ),
    ],
)
def test_passes_that_a_spec_needs_are_in_order(parts: dict[str, Any], ulysses: int, expected: list[str]) -> None:
    job, mesh = spec(**parts), plan_mesh(world=2, fsdp_size=0, ulysses_size=ulysses)
    assert [type(one).__name__ for one in PASSES if one.applies(job, mesh)] == expected
