"""Text of job specs: any bytes yield a spec or a SpecError within milliseconds."""

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.fakes.service import raw_spec
from train_loop.spec import SpecError, dump, load, override, parse_text, read_yaml
from train_loop.system.gc import no_automatic_collection

_YAML = st.text(alphabet="-?:,[]{}#&*!|>'\"%@`ab1.0_~ \n\t\x00\x85\u2028\ud800e+<=", max_size=60)
_TAGS = st.tuples(
    st.sampled_from(["!!int", "!!float", "!!bool", "!!null", "!!str", "!!map", "!!seq", "!!set", "!x", "!"]),
    st.sampled_from(['""', "[1]", "{a: 1}", "~", "1:59", ".inf", "0x", "0b", "09", "1_", "-", "x", "2001-99-99", ""]),
).map(lambda pair: f"name: {pair[0]} {pair[1]}")


def _is_read_or_refused(text: str | bytes) -> None:
    try:
        parse_text(text)
    except SpecError as error:
        # A response with the message can be encoded: this raises for a lone surrogate.
        json.dumps([(one.pointer, one.message) for one in error.problems], ensure_ascii=False).encode()


@given(st.binary(max_size=200))
def test_any_bytes_give_a_spec_or_a_spec_error(body: bytes) -> None:
    _is_read_or_refused(body)


@given(st.one_of(_YAML, _TAGS, st.text(max_size=80)))
def test_any_text_gives_a_spec_or_a_spec_error(text: str) -> None:
    _is_read_or_refused(text)


_json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(st.dictionaries(st.sampled_from(["name", "labels", "model", "data", "training", "project"]), _json_values))
def test_any_json_value_of_any_field_gives_a_spec_or_a_spec_error(parts: dict[str, Any]) -> None:
    _is_read_or_refused(json.dumps(parts))
    _is_read_or_refused(json.dumps({**raw_spec(), **parts}))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("-3", -3),
        ("1_000", 1000),
        ("0x1F", 31),
        ("0o17", 15),
        ("yes", True),
        ("~", None),
        ("", None),
        ("!!str 1", "1"),
        ("!!float 1", 1.0),
        ("! 1", "1"),
        ("'1'", "1"),
        ("2001-01-01", "2001-01-01"),
        ("1:30", "1:30"),
        ("{1: a, true: b}", {"1": "a", "true": "b"}),
        ("a: [1, {b: null}]\nc: |\n  x\n", {"a": [1, {"b": None}], "c": "x\n"}),
    ],
)
def test_values_follow_the_yaml_core_schema(text: str, value: object) -> None:
    read = read_yaml(text)
    assert (type(read), read) == (type(value), value)


def test_aliases_of_other_tools_are_replaced_by_their_values() -> None:
    text = """
        base: &base {a: 1, b: &list [1, x]}
        more: &more {a: 2, c: 3}
        first: {<<: *base, a: 0}
        second: {<<: [*base, *more], d: *list}
    """
    found = read_yaml(text, aliases=True)
    assert found["first"] == {"a": 0, "b": [1, "x"]}
    assert found["second"] == {"a": 1, "b": [1, "x"], "c": 3, "d": [1, "x"]}


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("a: *b", r"line 1, column 4: \*b refers to no anchor before it"),
        ("a: &a {b: *a}", r"column 11: \*a lies inside of its own value"),
        ("a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40)), "over 10000 "),
        ("a0: &a0 x\n" + "".join(f"a{n}: &a{n} [*a{n - 1}]\n" for n in range(1, 40)), "over 32 levels"),
    ],
)
def test_aliases_without_end_are_refused(text: str, rule: str) -> None:
    with pytest.raises(SpecError, match=rule):
        read_yaml(text, aliases=True)


_LARGE: list[tuple[bytes, str]] = [
    ("".join(f"k{number}: 1\n" for number in range(20_000)).encode(), "over 10000 values"),
    (json.dumps({f"k{number}": 1 for number in range(80_000)}).encode(), "over 10000 values"),
    (b"[" + b"[]," * 340_000 + b"[]]", "over 10000 values"),
    (b"a: " + b"x" * 300_000, "at most 262144 bytes"),
    (b"[" * (1 << 20), "nested"),
    (("{" + ",".join(f"k{number}: {number}" for number in range(4_990)) + "}").encode(), "no such field"),
]


@pytest.mark.parametrize(("body", "rule"), _LARGE, ids=["yaml", "json", "list", "text", "deep", "legal"])
def test_largest_bodies_are_rejected_in_milliseconds(body: bytes, rule: str) -> None:
    # A collection would examine the objects of all earlier tests, for up to a second.
    with no_automatic_collection():
        begin = time.thread_time()
        with pytest.raises(SpecError, match=rule):
            parse_text(body)
        # Measured: at most 50 ms; 40,000 keys took 56 s before there were limits.
        assert time.thread_time() - begin < 0.5


def test_largest_spec_is_stored_and_changed_with_its_defaults() -> None:
    config = {**raw_spec()["model"]["config"], "id2label": {str(number): "x" for number in range(4_970)}}
    spec = parse_text(json.dumps(raw_spec(model={"config": config})))
    assert load(dump(spec)) == spec
    assert override(spec, {"name": "other"}).name == "other"


def test_number_of_listed_problems_is_limited() -> None:
    with pytest.raises(SpecError) as caught:
        parse_text(json.dumps({**raw_spec(), **{f"k{number}": 1 for number in range(4_000)}}))
    assert len(caught.value.problems) == 51
    assert caught.value.problems[-1].message == "3950 more problems are not listed; fix these first"
