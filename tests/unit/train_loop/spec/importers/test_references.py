"""Hydra's defaults and references: their values, and their limits."""

from typing import Any

import pytest

from train_loop.spec import SpecError
from train_loop.spec.importers.references import compose, resolve


def test_references_take_values_of_any_type_through_other_references() -> None:
    given: dict[str, Any] = {"a": {"b": [1, {"c": 2}]}, "n": "${m}", "m": 3}
    found = resolve({**given, "whole": "${a}", "deep": "${a.b.1.c}", "text": "x-${n}-${a.b.0}"})
    assert found == {**given, "n": 3, "whole": given["a"], "deep": 2, "text": "x-3-1"}


def test_references_may_be_relative_to_their_mapping_and_have_brackets() -> None:
    given: dict[str, Any] = {"a": {"b": [1, {"c": "${..d}"}], "e": "${.b[0]}"}, "f": "${a.b[1].c}-${.g-h}", "g-h": 5}
    given["a"] |= {"d": 4}
    assert resolve(given) == {"a": {"b": [1, {"c": "${..d}"}], "e": 1, "d": 4}, "f": "${..d}-5", "g-h": 5}
    assert resolve({"a": {"b": {"c": "${..d}"}, "d": 4}, "e": "${a.b.c}"})["e"] == 4


@pytest.mark.parametrize("text", ["${oc.env:HOME}", "${.sibling}", "${a.${b}}", "${missing}", "x ${oc.env:HOME,y}"])
def test_other_references_stay_as_they_are(text: str) -> None:
    assert resolve({"a": text, "b": "c"})["a"] == text


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"a": "${b}", "b": "${a}"}, "circle"),
        ({"a": ["${a}"]}, "circle"),
        ({f"a{n}": f"${{a{n + 1}}}" for n in range(100)}, "over 32 times"),
        ({f"a{n}": f"${{a{n + 1}}}${{a{n + 1}}}" for n in range(30)} | {"a30": "x"}, "more than a spec may hold"),
        ({f"a{n}": ["${big}"] * 10 for n in range(30)} | {"big": list(range(100))}, "more than a spec may hold"),
        ({"a": ["${big}"] * 9, "big": "x" * 200_000}, "more than a spec may hold"),
    ],
)
def test_references_without_end_are_refused(data: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        resolve(data)


FILES = {
    "base": b"a: 1\nb: {x: 1, y: 1}",
    "model/small": b"size: 1",
    "../up": b"a: 3\nup: true",
    "nested": b"defaults: [base, model: small]\na: 5",
    "server/apache": b"defaults: [{tls: strict}, /model: small]\nport: 80",
    "server/tls/strict": b"defaults: [{/model@_global_.other: large}]\nkey: 1",
    "model/large": b"size: 9",
    "roots/fsdp": b"# a comment\n# @package _global_\nfsdp: 2",
    "roots/inner": b"# @package net.inner\nsize: 3",
    "circle": b"defaults: [circle]",
}


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({"defaults": ["base"], "a": 2, "b": {"y": 2}}, {"a": 2, "b": {"x": 1, "y": 2}}),
        ({"defaults": ["_self_", "base"], "a": 2}, {"a": 1, "b": {"x": 1, "y": 1}}),
        ({"defaults": [{"model": "small"}]}, {"model": {"size": 1}}),
        ({"defaults": ["model/small"]}, {"model": {"size": 1}}),
        ({"defaults": [{"model@net.inner": "small"}]}, {"net": {"inner": {"size": 1}}}),
        ({"defaults": ["../up@_here_"], "a": 2}, {"a": 2, "up": True}),
        ({"defaults": ["base.yaml"], "a": 2}, {"a": 2, "b": {"x": 1, "y": 1}}),
        ({"defaults": ["nested"]}, {"a": 5, "b": {"x": 1, "y": 1}, "model": {"size": 1}}),
        ({"defaults": [{"roots": "fsdp"}, "roots/inner"]}, {"fsdp": 2, "net": {"inner": {"size": 3}}}),
        ({"defaults": [{"roots@here": "fsdp"}]}, {"here": {"fsdp": 2}}),
        (
            {"defaults": [{"server": "apache"}]},
            {"server": {"port": 80, "tls": {"key": 1}, "model": {"size": 1}}, "other": {"size": 9}},
        ),
        (
            {"defaults": ["nested", {"override model": "large"}]},
            {"a": 5, "b": {"x": 1, "y": 1}, "model": {"size": 9}},
        ),
        (
            {"defaults": [{"optional model": "absent"}, {"override hydra/launcher": "x"}, {"model": None}], "a": 2},
            {"a": 2},
        ),
    ],
)
def test_defaults_are_composed_as_hydra_does(data: dict[str, Any], expected: dict[str, Any]) -> None:
    assert compose(data, FILES.get) == expected


@pytest.mark.parametrize(
    ("defaults", "message"),
    [
        (["absent"], "absent.yaml of defaults cannot be read"),
        (["circle"], "over 16 configs"),
        ([{"override model": "large"}], "overrides model, which no entry of defaults names"),
        (["../up"], "has no package; write ../up@_here_"),
        (["base"] * 17, "over 16 configs"),
        ([3], "is not the name of a config"),
        ("base", "defaults is not a list"),
    ],
)
def test_defaults_that_cannot_be_composed_are_refused(defaults: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        compose({"defaults": defaults}, FILES.get)
