"""A spec under construction: each field of a source is taken, translated or dropped, and gives a row of the report."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Any, get_args

from pydantic import JsonValue
from pydantic_core import PydanticUndefined

from train_loop.spec.base import Problem, SpecError
from train_loop.spec.importers.report import Outcome, Row
from train_loop.spec.job import JobSpec
from train_loop.spec.names import NAMES
from train_loop.spec.text import as_pointer

Convert = Callable[[Any], JsonValue]
_OFF: tuple[JsonValue, ...] = (None, False, "", "no", "NO", "none", [], {})
"""Values that switch a feature off."""
_OPEN = re.compile(r"\$\{([^{}]*)\}")
_NO_NUMBERS = frozenset({"training.logging_steps", "model.gradient_checkpointing", "checkpoint.every_steps",
                         "checkpoint.keep_last"})  # fmt: skip
"""Fields that change no numbers."""
_UNSET = {"training.gradient_accumulation_steps": 1, "training.num_train_epochs": 1, "training.eval_steps": None}
"""Meaning of fields whose default is null."""
_SWITCHES = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False,
             "": False}  # fmt: skip
LOOP = "(loop)"
"""The field of rows about the loop itself, which no field of the source sets."""


class NotSupportedError(ValueError):
    """A value that no spec has. The field is dropped with the message as the reason."""


@dataclass(frozen=True)
class Take:
    """A rule: the field of the spec that takes the value."""

    target: str
    convert: Convert | None = None
    reason: str = ""
    numbers: bool = False


@dataclass(frozen=True)
class Drop:
    """A rule: the job does without the field."""

    reason: str
    outcome: Outcome = Outcome.NOT_SUPPORTED
    numbers: bool = False
    harmless: tuple[JsonValue, ...] = _OFF
    """Values without which nothing is lost."""


Rule = Take | Drop


def unneeded(reason: str) -> Drop:
    """Return the rule of a field without which nothing is lost."""
    return Drop(reason, Outcome.NOT_NEEDED)


def alike(names: str, rule: Rule) -> dict[str, Rule]:
    """Return one rule for several fields, whose names are separated by spaces."""
    return dict.fromkeys(names.split(), rule)


class Draft:
    """A spec under construction.

    `given` has the values of the source, `assumed` its tool's own defaults, which other files may replace.
    """

    def __init__(self, source: Mapping[str, Any]) -> None:
        self.given: dict[str, Any] = {}
        self.assumed: dict[str, Any] = {}
        self.rows: list[Row] = []
        self.pointers: dict[str, str] = {}
        """Pointer in the source of each field of the spec."""
        self.worker: str | None = None
        """Worker that the draft is of, if its tool's files have several."""
        self._source = source
        self._leaves = dict(leaves(source))
        self._noted: set[str] = set()

    def get(self, field: str, default: Any = None) -> Any:
        """Return the value of a field, or the default if it is absent or null. Raises SpecError for open references."""
        value = self._raw(field)
        if value is None:
            return default
        self._check_closed(field, value)
        return value

    def _raw(self, field: str) -> Any:
        value: Any = self._source
        for step in steps_of(field):
            value = value.get(step) if isinstance(value, Mapping) else None
        return value

    def _check_closed(self, field: str, value: Any) -> None:
        found = _OPEN.search(value) if isinstance(value, str) else None
        if found is None:
            return
        name, colon, _ = found[1].partition(":")
        problem = (
            f"the resolver {name} is not evaluated"
            if colon
            else f"${{{found[1]}}} refers to no field of the file, or is not a plain path"
        )
        raise SpecError([Problem(pointer_of(field), f"{problem}; write the value of {field} itself")])

    def has(self, field: str) -> bool:
        """Return whether the source sets a field to anything but null."""
        return self._raw(field) is not None

    def is_null(self, field: str) -> bool:
        """Return whether the source sets a field to null."""
        return field in self._leaves and self._leaves[field] is None

    def flag(self, field: str) -> bool:
        """Return a switch of the source; False if it is not set. Raises SpecError for other values."""
        value = self.get(field, False)
        word = str(value).strip().lower()
        if word not in _SWITCHES:
            shown = f"invalid {field} {word:.40}; expected true or false"
            raise SpecError([Problem(pointer_of(field), shown)])
        return _SWITCHES[word]

    def apply(self, rules: Mapping[str, Rule], *, below: str = "") -> None:
        """Apply the rules to the fields that they name, below a part of the source. `name.*` is all below a name."""
        start = f"{below}." if below else ""
        for field in [one for one in self._leaves if one.startswith(start)]:
            rule = _rule_of(field.removeprefix(start), rules)
            if rule is None or field in self._noted:
                continue
            if isinstance(rule, Take):
                self.take(field, rule.target, rule.convert, reason=rule.reason, numbers=rule.numbers)
            else:
                self.drop(field, rule)

    def take(
        self, field: str, target: str, convert: Convert | None = None, *, reason: str = "", numbers: bool = False
    ) -> None:
        """Write the value of a field, if it is set."""
        value = self.get(field)
        if value is None:
            self.unset(field)
            return
        try:
            written = value if convert is None else convert(value)
        except NotSupportedError as error:
            self.note(field, Outcome.NOT_SUPPORTED, reason=str(error), numbers=True)
            return
        self.write(field, target, written, reason=reason, numbers=numbers)

    def write(self, field: str, target: str, written: JsonValue, *, reason: str = "", numbers: bool = False) -> None:
        """Write a value that a field of the source determines."""
        put(self.given, target, written)
        self.pointers[target] = pointer_of(field)
        given = self._raw(field)
        same = type(given) is type(written) and given == written
        outcome = Outcome.TAKEN if same else Outcome.TRANSLATED
        self.note(field, outcome, target=target, written=written, reason=reason, numbers=numbers)

    def leave(self, field: str, reason: str) -> None:
        """Report that nothing is lost without a field, if it is set and has no row yet."""
        if self.has(field) and field not in self._noted:
            self.note(field, Outcome.NOT_NEEDED, reason=reason)

    def unset(self, field: str) -> None:
        """Report a field that is null, if the source has it."""
        if field in self._leaves and field not in self._noted:
            self.note(field, Outcome.NOT_NEEDED, reason="null: not set")

    def drop(self, field: str, rule: Drop) -> None:
        """Report a field that the job does without."""
        value = self._leaves.get(field)
        if value is None:
            self.unset(field)
        elif rule.outcome is Outcome.NOT_SUPPORTED and value in rule.harmless:
            self.note(field, Outcome.NOT_NEEDED, reason="off")
        else:
            self.note(field, rule.outcome, reason=rule.reason, numbers=rule.numbers)

    def assume(self, field: str, target: str, default: JsonValue, *, tool: str) -> None:
        """Write the tool's own default of a field of the spec that nothing in the source has set, and report it."""
        if has(self.given, target):
            return
        put(self.assumed, target, default)
        ours = default_of(target)
        differs = default != ours
        reason = f"default of {tool}" + (f"; here the default is {_shown(ours)}" if differs else "")
        self._add(Row(field=field, outcome=Outcome.DEFAULT, target=target, written=default, reason=reason,
                      changes_numbers=differs and target not in _NO_NUMBERS))  # fmt: skip

    def need(self, target: str, value: JsonValue, reason: str, *, field: str = "") -> None:
        """Write a value that the user replaces."""
        put(self.given if field else self.assumed, target, value)
        if field:
            self.pointers[target] = pointer_of(field)
        self.note(field, Outcome.NEEDED, target=target, written=value, reason=reason)

    def differ(self, reason: str, *, target: str | None = None, written: JsonValue = None) -> None:
        """Report that the loop itself computes other numbers than the tool's."""
        if target is not None:
            put(self.given, target, written)
        outcome = Outcome.DIFFERS if target is None else Outcome.TRANSLATED
        self.note(LOOP, outcome, target=target, written=written, reason=reason, numbers=True)

    def note(
        self,
        field: str,
        outcome: Outcome,
        *,
        target: str | None = None,
        written: JsonValue = None,
        reason: str = "",
        numbers: bool = False,
    ) -> None:
        """Add a row. A part that is not a leaf stands for all fields below it that have no row yet."""
        fields = [field] if field in self._leaves or not field else [*self._open_below(field)] or [field]
        for one in fields:
            self._noted.add(one)
            self._add(Row(field=one, value=self._leaves.get(one), outcome=outcome, target=target, written=written,
                          reason=reason, changes_numbers=numbers))  # fmt: skip

    def finish(self, tool: str) -> None:
        """Report the fields without a row."""
        for field, value in self._leaves.items():
            if field not in self._noted and value is None:
                self.unset(field)
            elif field not in self._noted:
                reason = f"not a known field of {tool}; it has no effect{_meaning(field)}"
                self.note(field, Outcome.UNKNOWN, reason=reason, numbers=True)

    def _open_below(self, field: str) -> Iterator[str]:
        yield from (one for one in self._leaves if one.startswith(f"{field}.") and one not in self._noted)

    def _add(self, row: Row) -> None:
        self.rows.append(row)


def leaves(data: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the fields of nested mappings by dotted path. Lists and empty mappings are values."""
    if isinstance(data, Mapping) and data:
        for name, value in data.items():
            step = str(name).replace(".", "\\.")
            yield from leaves(value, f"{before}.{step}" if before else step)
    elif before:
        yield before, data


def steps_of(field: str) -> list[str]:
    """Return the names of a dotted path; a dot inside a name is escaped."""
    return [step.replace("\\.", ".") for step in re.split(r"(?<!\\)\.", field)]


def pointer_of(field: str) -> str:
    """Return the JSON pointer of a dotted path."""
    return as_pointer(steps_of(field))


def put(data: dict[str, Any], target: str, value: JsonValue) -> None:
    """Set the value at a dotted path."""
    *above, name = target.split(".")
    for step in above:
        data = data.setdefault(step, {})
    data[name] = value


def has(data: Mapping[str, Any], target: str) -> bool:
    """Return whether nested mappings have a value at a dotted path."""
    value: Any = data
    for step in target.split("."):
        if not isinstance(value, Mapping) or step not in value:
            return False
        value = value[step]
    return True


def default_of(target: str) -> JsonValue:
    """Return the default of a field of the spec; None if it is required."""
    part, *names = target.split(".")
    fields: Any = JobSpec.model_fields[part].annotation
    # An optional part is a union with None.
    fields = next((one for one in get_args(fields) if one is not NoneType), fields)
    for name in names[:-1]:
        inner = fields.model_fields[name]
        optional = next((one for one in get_args(inner.annotation) if one is not NoneType), None)
        fields = optional if inner.default is None else type(inner.default)
    default: Any = fields.model_fields[names[-1]].get_default() if names[-1] in fields.model_fields else None
    default = [] if default == () else default
    return _UNSET.get(target, None if default is PydanticUndefined else default)


def _meaning(field: str) -> str:
    """Return the field of a spec with the meaning that other tools give to a name."""
    other = NAMES.get(steps_of(field)[-1].replace("-", "_").lower())
    return f"; in a spec, it is {other.meaning}" if other is not None and other.kind == "field" else ""


def _rule_of(field: str, rules: Mapping[str, Rule]) -> Rule | None:
    if field in rules:
        return rules[field]
    steps = field.split(".")
    above = (".".join(steps[:count]) for count in range(len(steps) - 1, 0, -1))
    return next((rules[f"{one}.*"] for one in above if f"{one}.*" in rules), None)


def _shown(value: JsonValue) -> str:
    return "none" if value is None else str(value)
