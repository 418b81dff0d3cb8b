"""Drift of the list of events: the loop writes each listed event, and no other."""

import ast
from collections.abc import Iterator
from pathlib import Path

from tools.docs.events import page
from train_loop.telemetry.events import EVENTS

LOOP = Path("train_loop")
WRITERS = {"event", "event_of_any_rank", "report", "_report"}


def calls_and_constants() -> tuple[list[ast.Call], dict[str, str]]:
    """Return all calls in the loop, and the strings that modules assign to a name."""
    calls, constants = list[ast.Call](), dict[str, str]()
    for file in LOOP.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            match node:
                case ast.Call():
                    calls.append(node)
                case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=str(value))):
                    constants[name] = value
    return calls, constants


def written_events() -> Iterator[str]:
    calls, constants = calls_and_constants()
    for call in calls:
        # Lines that wait for storage name their event by keyword.
        first = next((word.value for word in call.keywords if word.arg == "event"), None)
        function = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        if first is None and function in WRITERS and call.args:
            first = call.args[0]
        match first:
            case ast.Constant(value=str(name)):
                yield name
            case ast.Name(id=name) if name in constants:
                yield constants[name]


def test_every_written_event_is_listed_and_every_listed_event_is_written() -> None:
    assert set(written_events()) == EVENTS.keys()


def test_events_page_has_every_event() -> None:
    assert [name for name in EVENTS if f"| `{name}` |" not in page()] == []
