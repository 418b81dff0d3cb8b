"""YAML or JSON text → plain data, within limits of bytes, nesting and nodes.

Any bytes give data or a SpecError. YAML is built from libyaml's events and not by PyYAML's constructors. Those recurse,
run Python's parsers on tagged values, and take seconds for a body that libyaml reads in milliseconds.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import yaml

from train_loop.spec.base import Problem, SpecError
from train_loop.spec.text.aliases import Anchors, merge_keys
from train_loop.spec.text.limits import (
    MAX_DEPTH,
    MAX_NODES,
    MAX_YAML_BYTES,
    TOO_DEEP,
    TOO_MANY,
    Position,
    as_pointer,
    check_data,
    refused,
)
from train_loop.spec.text.scalars import TAG, read_scalar, show_tag

_JSON_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)


def read_yaml(text: str | bytes, *, aliases: bool = False) -> Any:
    """Return the plain data of YAML or JSON text (JSON is YAML). Raises SpecError with the position.

    `aliases`: replace YAML's aliases and merge keys by their values, as in configurations of other tools.
    """
    _check_count(text if isinstance(text, bytes) else text.encode(errors="surrogatepass"))
    data = _read(text, Anchors() if aliases else None)
    check_data(data)
    return merge_keys(data) if aliases else data


def read_positions(text: str | bytes) -> dict[str, Position]:
    """Return the position of each field of YAML or JSON text, by JSON pointer.

    The position of a field is that of its key. Invalid text gives the fields before its first error. JSON of one line,
    which programs write, and text that is too large for YAML, give none.
    """
    builder = _Builder(positions={}, anchors=Anchors())
    if len(text) <= MAX_YAML_BYTES and not (_is_one_line(text) and _is_json(text)):
        # The fields before an error are known all the same.
        with suppress(yaml.YAMLError, UnicodeError, SpecError):
            _feed(builder, text)
    return builder.positions or {}


def _is_one_line(text: str | bytes) -> bool:
    return (b"\n" not in text.strip()) if isinstance(text, bytes) else "\n" not in text.strip()


def _is_json(text: str | bytes) -> bool:
    try:
        json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        return True
    except ValueError:
        return False
    return True


def _read(text: str | bytes, anchors: Anchors | None) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_mapping_once, parse_constant=_refuse_constant)
    except SpecError:
        raise
    except RecursionError:
        raise refused("", TOO_DEEP) from None
    except ValueError as error:
        # Text that is not JSON is read as YAML, which reports its errors, unless it is too large for YAML.
        if len(text) > MAX_YAML_BYTES:
            raise refused(
                "",
                f"the body is not JSON ({error}), and YAML may have at most {MAX_YAML_BYTES} bytes, not {len(text)}; "
                "send JSON or a smaller spec",
            ) from error
        return _read_events(text, anchors)


def _check_count(text: bytes) -> None:
    """Raise SpecError for JSON of too many values before Python creates an object for each."""
    # Each value or key, except the first of its list or mapping, follows a comma or a colon.
    if text.count(b",") + text.count(b":") > MAX_NODES and text.lstrip()[:1] in (b"{", b"["):
        outside = _JSON_STRING.sub(b"", text)
        if outside.count(b",") + outside.count(b":") > MAX_NODES:
            raise refused("", TOO_MANY)


def _mapping_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(whole := dict(pairs)) < len(pairs):
        twice = next(name for name, times in Counter(name for name, _ in pairs).items() if times > 1)
        raise refused("", _given_twice(twice))
    return whole


def _given_twice(name: str) -> str:
    # JSON may contain a lone surrogate, which a response cannot encode.
    shown = name[:64].encode(errors="replace").decode()
    return f"{shown} is given twice in one mapping; remove one"


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


@dataclass
class _Container:
    """A list or mapping that is being read."""

    data: Any
    step: str = ""
    """The last step of its JSON pointer."""
    key: str | None = None
    """The key of the next value."""


class _Builder:
    """A builder of data from YAML events, without recursion."""

    def __init__(self, positions: dict[str, Position] | None = None, anchors: Anchors | None = None) -> None:
        self.root: Any = None
        self.positions = positions
        """Position of each field by JSON pointer; None if they are not needed."""
        self._anchors = anchors
        """None if aliases are not allowed."""
        self._open: list[_Container] = []
        self._nodes = 0

    def take(self, event: yaml.Event) -> None:
        """Add the data of an event. Raises SpecError."""
        if isinstance(event, yaml.AliasEvent) and self._anchors is None:
            # Nested aliases expand a small body to gigabytes.
            raise self._fault(event, "aliases (*name) are not allowed in a job spec; write the value out")
        if isinstance(event, yaml.CollectionEndEvent):
            self._open.pop()
        elif isinstance(event, yaml.NodeEvent):
            self._count(event, 1)
            self._add(event)

    def _count(self, event: yaml.NodeEvent, nodes: int) -> None:
        self._nodes += nodes
        if self._nodes > MAX_NODES:
            raise self._fault(event, TOO_MANY)

    def _add(self, event: yaml.NodeEvent) -> None:
        above = self._open[-1] if self._open else None
        if above is not None and isinstance(above.data, dict) and above.key is None:
            above.key = self._key(event, above.data)
            self._note(event)
            return
        value = self._value(event)
        if above is None or isinstance(above.data, list):
            self._note(event)
        step = ""
        if above is None:
            self.root = value
        elif isinstance(above.data, dict):
            step, above.key = above.key or "", None
            above.data[step] = value
        else:
            step = str(len(above.data))
            above.data.append(value)
        if isinstance(event, yaml.CollectionStartEvent):
            self._open.append(_Container(value, step))

    def _key(self, event: yaml.NodeEvent, mapping: dict[str, Any]) -> str:
        if not isinstance(event, yaml.ScalarEvent):
            raise self._fault(event, "a key is a list or a mapping; write plain text as key")
        name: str = event.value
        if name in mapping:
            raise self._fault(event, _given_twice(name))
        return name

    def _value(self, event: yaml.NodeEvent) -> Any:
        try:
            value = self._own_value(event)
        except ValueError as error:
            if isinstance(error, SpecError):
                raise
            raise self._fault(event, str(error)) from error
        if self._anchors is not None and not isinstance(event, yaml.AliasEvent):
            self._anchors.note(event.anchor, value)
        return value

    def _own_value(self, event: yaml.NodeEvent) -> Any:
        if isinstance(event, yaml.ScalarEvent):
            return read_scalar(event)
        if isinstance(event, yaml.AliasEvent):
            assert self._anchors is not None, "aliases are refused without anchors"
            value, nodes = self._anchors.copy(event.anchor, [one.data for one in self._open])
            self._count(event, nodes)
            # An alias in the value of another one may nest them deep.
            check_data(value)
            return value
        assert isinstance(event, yaml.CollectionStartEvent), "the other nodes"
        if len(self._open) >= MAX_DEPTH:
            raise self._fault(event, TOO_DEEP)
        kind, data = ("seq", list[Any]()) if isinstance(event, yaml.SequenceStartEvent) else ("map", dict[str, Any]())
        if event.tag not in (None, "!", TAG + kind):
            raise self._fault(event, f"{show_tag(event.tag)} does not fit here; remove the tag")
        return data

    def _note(self, event: yaml.Event) -> None:
        """Note the position of the current field, if positions are needed."""
        if self.positions is not None:
            self.positions[self._pointer()] = _position(event)

    def _pointer(self) -> str:
        """Return the JSON pointer of the current field."""
        steps = [one.step for one in self._open[1:]]
        if self._open:
            here = self._open[-1]
            step = here.key if isinstance(here.data, dict) else str(len(here.data))
            steps += [] if step is None else [step]
        return as_pointer(steps)

    def _fault(self, event: yaml.Event, message: str) -> SpecError:
        return refused(self._pointer(), message, _position(event))


def _position(event: yaml.Event) -> Position:
    mark = event.start_mark
    assert mark is not None, "libyaml marks every event"
    return mark.line + 1, mark.column + 1


def _read_events(text: str | bytes, anchors: Anchors | None) -> Any:
    builder = _Builder(anchors=anchors)
    try:
        _feed(builder, text)
    except (yaml.YAMLError, UnicodeError) as error:
        message = f"the text is neither YAML nor JSON: {_fault_of(error)}"
        mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
        line, column = (None, None) if mark is None else (mark.line + 1, mark.column + 1)
        raise SpecError([Problem("", message, line, column)]) from error
    return builder.root


def _fault_of(error: Exception) -> str:
    """Return libyaml's message, which contains the position, without its name of the text."""
    fault = re.sub(r' in "<[a-z ]+>",', " at", " ".join(str(error).split()))[:500]
    hint = "; indent with spaces, not tabs, and quote text that begins with @, ` or %" if "any token" in fault else ""
    return fault + hint


def _feed(builder: _Builder, text: str | bytes) -> None:
    """Give the events of YAML text to a builder. Raises SpecError, YAMLError, UnicodeError."""
    documents = 0
    # Only its events are used; its constructors are not called.
    for event in _events(yaml.CSafeLoader(text)):
        if isinstance(event, yaml.DocumentStartEvent):
            documents += 1
            if documents > 1:
                raise refused("", "a second document begins; send one spec", _position(event))
        builder.take(event)


def _events(loader: yaml.CSafeLoader) -> Iterator[yaml.Event]:
    try:
        while (event := loader.get_event()) is not None:
            yield event
    finally:
        loader.dispose()
