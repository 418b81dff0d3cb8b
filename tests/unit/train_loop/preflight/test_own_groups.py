"""Parameter groups of own code, by the names of its module."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.own_code import own_spec
from tests.unit.train_loop.preflight.test_own_code import _private, check, with_layers
from train_loop.spec import parse

__all__ = ["_private"]
TWICE = "x = self.layers[1](self.layers[0](x))"


def groups_of(tmp_path: Path, **training: Any) -> Any:
    """Return the groups of a module with a first layer, two blocks and a last layer, or its problems by pointer."""
    raw = own_spec(tmp_path, with_layers(TWICE))
    raw["training"] |= {"weight_decay": 0.1} | training
    _, shape, problems = check(raw, tmp_path)
    return problems or [(one["name"], one["lr"], one["parameters"]) for one in shape.counts.groups]  # type: ignore[union-attr]


def test_groups_and_layers_are_those_of_the_module(tmp_path: Path) -> None:
    # Each map has a matrix, which decays, and a bias.
    assert groups_of(tmp_path, groups=[{"params": ["last"], "lr_scale": 2.0}], layer_decay=0.5) == [
        ("layer 1", 5e-4, 9),
        ("layer 1", 5e-4, 3),
        ("layer 0", 2.5e-4, 9),
        ("layer 0", 2.5e-4, 3),
        ("before layers", 1.25e-4, 6),
        ("before layers", 1.25e-4, 3),
        ("last, after layers", 2e-3, 3),
        ("last, after layers", 2e-3, 1),
    ]


@pytest.mark.parametrize(
    ("training", "pointer", "message"),
    [
        (
            {"groups": [{"params": ["lats"], "lr_scale": 2.0}]},
            "/training/groups",
            "lats matches no parameter; choose for",
        ),
        ({"layer_decay": 0.5}, "/training/layer_decay", "layer_decay needs layers, and Model states none; remove it"),
    ],
)
def test_names_and_layers_that_are_absent_are_refused(
    tmp_path: Path, training: dict[str, Any], pointer: str, message: str
) -> None:
    raw = own_spec(tmp_path)
    raw["training"] |= training
    assert len(parse(raw).training.groups) == len(training.get("groups", []))
    _, _, problems = check(raw, tmp_path)
    assert list(problems) == [pointer]
    assert message in problems[pointer]
