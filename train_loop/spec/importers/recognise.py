"""Recognition of the tool that a configuration was written for: by fields that no other tool has."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from train_loop.spec.base import Problem, SpecError
from train_loop.spec.importers.defaults import Answer
from train_loop.spec.importers.draft import Draft, pointer_of
from train_loop.spec.importers.references import Read

_ANYWHERE = "*."
_MOST_SHOWN = 4


@dataclass(frozen=True)
class Source:
    """A configuration of another tool."""

    data: Mapping[str, Any]
    read: Read
    """Reads configs next to the file, which Hydra's `defaults` name."""
    worker: str | None = None
    """Path of a worker in ROLL's file; None if the command names none."""


def names_of(text: str) -> tuple[str, ...]:
    """Return the names of fields in a text that separates them by spaces."""
    return tuple(text.split())


Convert = Callable[[Source], Draft]


@dataclass(frozen=True)
class Tool:
    """A tool whose configurations are imported, or refused by its name."""

    name: str
    marks: tuple[str, ...]
    """Fields that no other tool has, with underscores, the best known first; `*.name` is a field below any mapping."""
    convert: Convert | None = None
    """Returns the draft of a job; None if the tool's files are not imported."""
    shared: Collection[str] = ()
    """Fields of its files that other tools have, too."""
    alone: Collection[str] = ()
    """A file without marks is the tool's if all its fields are among these."""
    defaults: Mapping[str, Answer] = field(default_factory=dict)
    """The answer of the tool to each field of `data:`, `model:` and `training:`, if its files describe a run."""
    extends: str | None = None
    """The tool whose fields its files may have, too."""
    refusal: str = "which is not imported; write a spec, starting from trainshed init"
    """The end of the answer to a file that is not imported."""

    def marks_of(self, paths: Mapping[str, str]) -> list[str]:
        """Return the fields of a file that no other tool has, by all its paths."""
        anywhere = tuple(mark.removeprefix("*") for mark in self.marks if mark.startswith(_ANYWHERE))
        return [path for path in paths if path in self.marks or path.endswith(anywhere)]


def recognise(data: Mapping[str, Any], tools: Sequence[Tool]) -> tuple[str, Convert]:
    """Return the name and the importer of the tool that a file was written for.

    Raises SpecError if that is unclear, or if files of the tool are not imported.
    """
    paths = dict(_paths(data))
    top = [path for path in paths if "." not in path]
    marks = {tool.name: fields for tool in tools if (fields := tool.marks_of(paths))} or {
        tool.name: top for tool in tools if top and set(tool.alone).issuperset(top)
    }
    # The files of a tool that extends another have the fields of both.
    found = [tool for tool in tools if tool.name in marks and not _is_extended(tool, marks, tools)]
    if not found:
        raise _unknown(paths, tools)
    if len(found) > 1:
        listed = " and of ".join(f"{tool.name} ({_listed(marks[tool.name])})" for tool in found)
        message = f"the file has fields of {listed}, and a file is read as that of one tool; remove the others' fields"
        raise _refused(message, paths[marks[found[-1].name][0]])
    (tool,) = found
    if tool.convert is None:
        message = f"the file is a configuration of {tool.name} ({_listed(marks[tool.name])}), {tool.refusal}"
        raise _refused(message, paths[marks[tool.name][0]])
    _check_fields_of_others(tool, paths, tools)
    return tool.name, tool.convert


def marked_tools(data: Mapping[str, Any], tools: Sequence[Tool]) -> list[Tool]:
    """Return the tools of which a file has fields that no other tool has."""
    paths = dict(_paths(data))
    return [tool for tool in tools if tool.marks_of(paths)]


def _paths(data: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    """Yield the dotted paths of all fields with underscores, and as the file writes them."""
    for name, value in data.items():
        written = before + str(name).replace(".", "\\.")
        yield written.replace("-", "_"), written
        if isinstance(value, Mapping):
            yield from _paths(value, f"{written}.")


def _is_extended(tool: Tool, names: Collection[str], tools: Sequence[Tool]) -> bool:
    return any(tool.name in _ancestors(other, tools) for other in tools if other.name in names)


def _ancestors(tool: Tool, tools: Sequence[Tool]) -> list[str]:
    """Return the tools that a tool extends, directly or not."""
    if tool.extends is None:
        return []
    above = next(one for one in tools if one.name == tool.extends)
    return [above.name, *_ancestors(above, tools)]


def _check_fields_of_others(tool: Tool, paths: Mapping[str, str], tools: Sequence[Tool]) -> None:
    """Raise SpecError for fields that only tools which extend this one have: the file may be of one of them."""
    heirs = [other for other in tools if tool.name in _ancestors(other, tools)]
    known = {*tool.shared, *tool.marks}
    foreign = {path: [one.name for one in heirs if path in one.shared] for path in paths if path not in known}
    foreign = {path: names for path, names in foreign.items() if names}
    if foreign:
        candidates = [
            other
            for other in heirs
            if any(other.name in names for names in foreign.values())
            and not any(other.extends == one.name for one in heirs)
        ]
        message = (
            f"{_listed([*foreign])} may be of {_either(candidates)}; {_signs(candidates)}, or remove it from a file of "
            f"{tool.name}"
        )
        raise _refused(message, paths[next(iter(foreign))])


def _unknown(paths: Mapping[str, str], tools: Sequence[Tool]) -> SpecError:
    """Return the error about a file without any field that only one tool has."""
    candidates = [tool for tool in tools if paths.keys() & tool.shared]
    if not candidates:
        names = ", ".join(tool.name for tool in tools if tool.convert is not None)
        return _refused(f"unknown format; expected a file of {names}")
    common = sorted(path for path in paths if any(path in tool.shared for tool in candidates))
    message = (
        f"unknown format; {_listed(common)} may be of {_either(candidates)}; "
        f"{_signs([tool for tool in candidates if tool.convert is not None])}"
    )
    return _refused(message)


def _signs(tools: Sequence[Tool]) -> str:
    shown = " or ".join(f"{tool.marks[0]} ({tool.name})" for tool in tools)
    return f"add a field that only one of them has, such as {shown}"


def _either(tools: Sequence[Tool]) -> str:
    *some, last = [tool.name for tool in tools]
    return f"{', '.join(some)} or {last}" if some else last


def _listed(fields: Sequence[str]) -> str:
    more = ", …" if len(fields) > _MOST_SHOWN else ""
    return ", ".join(f"{field:.60}" for field in fields[:_MOST_SHOWN]) + more


def _refused(message: str, field: str | None = None) -> SpecError:
    return SpecError([Problem("" if field is None else pointer_of(field), message)])
