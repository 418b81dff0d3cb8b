"""Searches over all values: null is like the default, strings stay strings, and numbers have no exponent."""

import json
import os
import random
import re
from collections.abc import Iterator
from copy import deepcopy
from functools import cache
from typing import Any

import helm_python as helm
import pytest
import yaml
from jsonschema import Draft7Validator

from tests.support.builders.searches import seeds
from tests.support.hosts.charts import CHART, Rendered, problems, render

Path = tuple[Any, ...]
DEFAULTS = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA = Draft7Validator(json.loads((CHART / "values.schema.json").read_text()))
FULL: dict[str, Any] = {
    **yaml.safe_load((CHART / "examples/values-production.yaml").read_text()),
    "fullnameOverride": "full",
    "allowedHosts": ["t.example"],
    "ipFamily": "dual",
    "env": [{"name": "OTEL_EXPORTER_OTLP_ENDPOINT", "value": "http://otel:4318"}],
    "home": {"storageClass": "a", "volumeName": "a", "selector": {"a": "b"}, "annotations": {"a": "b"}, "size": "1Gi"},
    "ingress": {"enabled": True, "className": "c", "host": "t", "tlsSecret": "tls", "annotations": {"a.b/c": "d"}},
}
"""Values that use almost every feature."""
FULL["ray"] |= {"allowVersionSkew": True, "tokenSecret": "t", "interface": "eth0", "dashboardUrl": "http://ray"}
FULL["ray"]["image"] |= {"registry": "r"}
FULL["ray"]["workers"] = FULL["ray"]["workers"][:1]
FULL["storage"]["volume"] |= {"volumeName": "a", "selector": {"a": "b"}, "annotations": {"a": "b"}}
FULL["monitoring"] |= {"interval": "15s", "grafanaFolder": "f", "labels": {"a": "b"}}
OWN_RAY: dict[str, Any] = {
    "storage": {"volume": {"existingClaim": "mine", "accessMode": "ReadWriteMany"}, "roots": {"*": ["s3://a"]}},
    "ray": {"create": False, "address": "http://ray:8265", "tokenSecret": "token"},
    "networkPolicy": {"egress": [{"ports": [{"port": 5432}]}]},
    "ingress": {"tlsSecret": ""},
}
HOSTILE = (
    *("1", "0x1f", "1e3", "1.0", "017", "true", "null", "on", "no", "y", "~", "2026-11-27", "12345678901234567890"),
    *("a: b", "a #b", "- a", "{a", "[a", "'", 'a"b', "*a", "&a", "!a", "%a", "@a", "`a", "a\\b", "é", "{{ .b }}", "|"),
)
FORMS = ("{}", "s3://b/{}", "http://{}", "sha256:{}")


def leaves(tree: Any, path: Path = ()) -> Iterator[Path]:
    """Yield the path of every node below the root."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for name, value in items:
        yield (*path, name)
        yield from leaves(value, (*path, name))


def at(tree: Any, path: Path) -> Any:
    """Return the node at a path."""
    for name in path:
        tree = tree[name]
    return tree


def replace(tree: dict[str, Any], path: Path, value: object) -> dict[str, Any]:
    """Return a copy with another value at a path; objects on the way are created."""
    made = deepcopy(tree)
    place: Any = made
    for name in path[:-1]:
        place = place.setdefault(name, {}) if isinstance(place, dict) else place[name]
    place[path[-1]] = value
    return made


def objects(made: Rendered) -> Any:
    """Return the objects with all JSON in strings parsed, and without digests and random keys."""

    def plain(one: Any) -> Any:
        if isinstance(one, dict):
            return {name: plain(value) for name, value in one.items() if one.get("kind") != "Secret" or name != "data"}
        if isinstance(one, list):
            return [plain(value) for value in one]
        if isinstance(one, str) and one.startswith('{"'):
            return plain(json.loads(one))
        if not isinstance(one, str):
            return one
        # Alerts quote the dots of host names.
        return re.sub(r"\b([0-9a-f]{64}|[0-9a-f]{16})\b", "(digest)", one.replace(r"\\.", "."))

    return plain(list(made.objects))


def outcome(values: dict[str, Any]) -> Any:
    """Return the plain objects, or the refusal as text."""
    made = attempt(values)
    return made if isinstance(made, str) else objects(made)


def attempt(values: dict[str, Any], *, name: str = "demo") -> Rendered | str:
    """Render the chart, or return the refusal as text. A refusal must name the value."""
    try:
        return render(values, name=name)
    except helm.HelmError as error:
        text = str(error)
        assert re.search(r"at '/[^']*': |templates/guards\.yaml", text), text
        assert not re.search(r"nil pointer|interface \{\}|reflect|error calling|unmarshal", text), text
        return text


DEFAULT_OBJECTS = objects(render())
PLATFORM_USER = objects(render({"user": {"uid": None, "gid": None}}))


@pytest.mark.parametrize(
    "path", [one for one in leaves(DEFAULTS) if not any(type(name) is int for name in one)], ids=str
)
def test_null_renders_like_the_default(path: Path) -> None:
    values = replace({}, path, None)
    if len(path) == 2 and path[0] == "user":
        # Both or none: null means that the platform assigns them.
        assert "must both be set or both be null" in outcome(values)
        assert outcome({"user": {"uid": None, "gid": None}}) == PLATFORM_USER != DEFAULT_OBJECTS
    else:
        assert outcome(values) == DEFAULT_OBJECTS


@pytest.mark.parametrize("seed", range(400 if "MORE" in os.environ else seeds(30)))
def test_nulls_are_like_missing_values_or_refused_by_name(seed: int) -> None:
    draw = random.Random(seed)
    nulled, without = deepcopy(FULL), deepcopy(FULL)
    for _ in range(draw.randint(1, 3)):
        path = draw.choice([one for one in leaves(without) if at(without, one) is not None])
        nulled = replace(nulled, path, None)
        if isinstance(path[-1], str):
            del at(without, path[:-1])[path[-1]]
        else:
            without = replace(without, path, None)
    made = outcome(nulled)
    assert isinstance(made, str) or made == outcome(without)


def accepted(values: dict[str, Any]) -> bool:
    """Return whether the schema accepts values."""
    return bool(SCHEMA.is_valid(values))


def strings(base: dict[str, Any]) -> Iterator[tuple[Path, str]]:
    """Yield the path of every string that the schema leaves open, with a form for it that the schema accepts."""
    defaults = [one for one in leaves(DEFAULTS) if not any(type(name) is int for name in one)]
    for path in dict.fromkeys([*leaves(base), *defaults]):
        try:
            own = isinstance(at(base, path), str)
        except KeyError:
            own = isinstance(at(DEFAULTS, path), str)
        # The chart creates a cluster with FULL, and so needs no address.
        if own and (path != ("ray", "address") or base is OWN_RAY):
            yield from ((path, form) for form in FORMS if accepted(replace(base, path, form.format("zz0zz"))))


BASES = {"full": FULL, "own Ray": OWN_RAY}
# Without MORE, each hostile string fills one of the two.
FILLED = [
    (base, hostile)
    for place, base in enumerate(BASES)
    for number, hostile in enumerate(HOSTILE)
    if "MORE" in os.environ or place == number % len(BASES)
]


@cache
def open_strings(name: str) -> dict[Path, str]:
    """Return a form of each string of BASES[name] that the schema leaves open."""
    return dict(reversed(list(strings(BASES[name]))))


@pytest.mark.parametrize(("name", "hostile"), FILLED)
def test_strings_stay_strings(name: str, hostile: str) -> None:
    """Fill all strings that the schema leaves open: objects contain the text, as they contain a mark otherwise."""
    given, marked = deepcopy(BASES[name]), deepcopy(BASES[name])
    for number, (path, form) in enumerate(open_strings(name).items()):
        with_text = replace(given, path, form.format(hostile))
        if accepted(with_text):
            given, marked = with_text, replace(marked, path, form.format(f"zz{number}zz"))
    made = render(given)
    expected = re.sub(r"zz\d+zz", lambda _: json.dumps(hostile)[1:-1], json.dumps(objects(render(marked))))
    assert objects(made) == json.loads(expected)


@pytest.mark.parametrize("name", ["on", "true", "null", "yes", "no", "off", "y", "nan", "a1e3"])
def test_release_names_stay_strings(name: str) -> None:
    assert objects(render(name=name)) == json.loads(json.dumps(DEFAULT_OBJECTS).replace("demo", name))


ODD: tuple[Any, ...] = (
    *("", " ", "-", "x", "X y", "a..b", "a,b", "a/b", "é", "*", "1", "-1", "1.5", "1e3", "true", "null", "x" * 300),
    *("10.0.0.1", "http://x y", "0Gi", 0, -1, 1, 1.5, 1e30, 5e10, True, False, [], {}, [[]], [{}], ["x"], [1]),
    *({"x": "y"}, {"x": 1}, {"": "x"}, {"a b": "x"}, {"key": "a"}, [{"key": "a"}], [{"x": 1}], [{"name": "A B"}]),
    *([{"name": "a", "value": "b", "valueFrom": {}}], [{"operator": "Exists", "tolerationSeconds": 1}]),
)
"""Values of a wrong type or form for most paths."""
ALL_PATHS = list(dict.fromkeys([*leaves(FULL), *(one for one in leaves(DEFAULTS) if 0 not in one)]))


@pytest.mark.parametrize("seed", range(seeds(12, more=len(ALL_PATHS))))
def test_odd_values_are_refused_by_name_or_render_valid_objects(seed: int) -> None:
    draw = random.Random(seed)
    path, odd = ALL_PATHS[seed % len(ALL_PATHS)], draw.sample(ODD, len(ODD))
    if "MORE" not in os.environ:
        path = draw.choice(ALL_PATHS)
        # Helm refuses most: try one of these, and two that reach the templates.
        odd = [*odd[:1], *(one for one in odd if accepted(replace(FULL, path, one)))][:3]
    for value in odd:
        values = replace(FULL, path, value)
        made = attempt(values)
        if isinstance(made, str):
            assert str(path[0]) in made, (path, value, made)
        else:
            wrong = [f"{one['kind']}{problem}" for one in made.objects for problem in problems(one)]
            assert wrong == [], (path, value)


def test_numbers_have_no_exponent() -> None:
    values = {**deepcopy(FULL), "resources": {"requests": {"cpu": 2}, "limits": {"memory": 99e15}}}
    values |= {"nodeLossSeconds": 1, "settings": {"preflight_memory_bytes": 268435456, "retry_seconds": 1}}
    numbers = {**DEFAULTS, **values}
    for path in [one for one in leaves(numbers) if type(at(numbers, one)) in (int, float) and one[0] != "resources"]:
        number = 12345678.0 if path[-1] not in ("cpu", "retry_seconds") else 12345678.5
        if accepted(replace(values, path, number)) and path[-1] != "preflight_memory_bytes":
            values = replace(values, path, number)
    made = render(values)
    for name, text in made.files.items():
        text = re.sub("job.yaml: .+?---", "", text, flags=re.DOTALL)
        assert not re.search(r"\d(\.\d+)?[eE][+-]?\d", re.sub(r"\b[0-9a-f]{16,}\b", "", text)), name
    assert "12345678.5" in made.files["trainshed/templates/raycluster.yaml"]
