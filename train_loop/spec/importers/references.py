"""Hydra's `defaults` lists and OmegaConf's `${a.b}` references, as far as plain data needs them.

Resolvers (`${oc.env:NAME}`) and nested references stay unchanged; a field that the spec needs refuses them.
"""

import posixpath
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from train_loop.spec.base import Problem, SpecError
from train_loop.spec.parse import merged
from train_loop.spec.text import MAX_DEPTH, MAX_NODES, MAX_YAML_BYTES, check_data, read_yaml

Read = Callable[[str], bytes | None]
"""A function that returns the bytes of a config by its name without extension, relative to the file; None if absent."""
_MOST_FILES = 16
_MOST_CHARACTERS = 4 * MAX_YAML_BYTES
_REFERENCE = re.compile(r"\$\{(\.*[A-Za-z_][\w-]*(?:\.[\w-]+|\[[\w-]+\])*)\}")
_NESTED = re.compile(r"\$\{[^}]*\$\{")
_HEADER = re.compile(rb"(?:#[^\n]*\n|\s)*?#\s*@package[ \t]+(\S+)")
_SELF, _HERE, _GLOBAL, _GROUP = "_self_", "_here_", "_global_", "_group_"


def compose(data: Mapping[str, Any], read: Read) -> dict[str, Any]:
    """Return a config merged with the configs that its `defaults` list names, and theirs. Raises SpecError.

    As in Hydra since 1.1, a config itself comes last unless its list has `_self_`.
    """
    composer = _Composer(read)
    whole = composer.compose(data, "", ())
    composer.check_overrides()
    return whole


class _Entry(NamedTuple):
    """An entry of a `defaults` list."""

    group: str
    """Folder of the choice, below that of the config with the list; empty if the entry names a config itself."""
    name: str
    package: str
    """Mapping that takes the fields, from `@`; empty for the config's own choice."""
    optional: bool
    overrides: bool


class _Composer:
    def __init__(self, read: Read) -> None:
        self._read = read
        self._files = 0
        self._overrides: dict[str, str] = {}
        """Options by group, in place of those of the lists that follow."""
        self._replaced: set[str] = set()

    def compose(self, data: Mapping[str, Any], folder: str, package: tuple[str, ...]) -> dict[str, Any]:
        """Return a config's fields at their package with those of its defaults, which lie relative to its folder."""
        listed = data.get("defaults") or []
        if not isinstance(listed, list):
            raise _refused("defaults is not a list of configs; write one entry per config")
        entries = [one if one == _SELF else _parse(one) for one in listed]
        for entry in entries:
            if isinstance(entry, _Entry) and entry.overrides:
                # Those of outer configs win.
                self._overrides.setdefault(_path(folder, entry.group), entry.name)
        own = _nested({name: value for name, value in data.items() if name != "defaults"}, package)
        whole: dict[str, Any] = {}
        for entry in [*entries, *([] if _SELF in entries else [_SELF])]:
            if not isinstance(entry, _Entry):
                whole = merged(whole, own)
            elif not entry.overrides:
                whole = merged(whole, self._of_entry(entry, folder, package))
        return whole

    def check_overrides(self) -> None:
        """Raise SpecError for an override of a group that no list has; settings of Hydra itself have none here."""
        for group in self._overrides.keys() - self._replaced:
            if group.partition("/")[0] != "hydra":
                raise _refused(f"the file overrides {group}, which no entry of defaults names; remove the override")

    def _of_entry(self, entry: _Entry, folder: str, package: tuple[str, ...]) -> dict[str, Any]:
        group, name = _path(folder, entry.group), entry.name
        if entry.group and group in self._overrides:
            self._replaced.add(group)
            name = self._overrides[group]
        if not name:
            return {}
        self._files += 1
        if self._files > _MOST_FILES:
            raise _refused(f"defaults name over {_MOST_FILES} configs; write their fields into the file")
        path = _path(group if entry.group else folder, name)
        text = self._read(path)
        if text is None and entry.optional:
            return {}
        if text is None:
            raise _refused(
                f"the config {path}.yaml of defaults cannot be read; import the file from its folder, or write the "
                "fields of that config into it"
            )
        part = read_yaml(text, aliases=True)
        if part is not None and not isinstance(part, dict):
            raise _refused(f"the config {path}.yaml of defaults is not a mapping of fields")
        header = _HEADER.match(text)
        given = entry.package or ("" if header is None else header[1].decode(errors="replace"))
        return self.compose(part or {}, posixpath.dirname(path), _place(entry, given, package))


def _parse(entry: Any) -> _Entry:
    words, option = [""], entry
    if isinstance(entry, dict) and len(entry) == 1:
        ((text, option),) = entry.items()
        words = str(text).split() or [""]
        # A group may have no choice.
        option = "" if option is None else str(option)
    if not isinstance(option, str) or (option == "" and not words[-1]):
        raise _refused(f"the entry {entry!r:.80} of defaults is not the name of a config")
    group, _, package = words[-1].partition("@")
    if not group:
        option, _, package = option.partition("@")
    option = option.removesuffix(".yaml")
    return _Entry(group, option, package, "optional" in words[:-1], "override" in words[:-1])


def _path(folder: str, name: str) -> str:
    """Return the path of a config or a group, relative to the file; with a leading / it does not depend on a folder."""
    path = posixpath.normpath(name.lstrip("/") if name.startswith("/") else posixpath.join(folder, name))
    return "" if path == "." else path


def _place(entry: _Entry, given: str, package: tuple[str, ...]) -> tuple[str, ...]:
    """Return the steps to the mapping that takes the fields of an entry, which `given` may name."""
    if given == _GLOBAL or given.startswith(f"{_GLOBAL}."):
        return _steps(given.removeprefix(_GLOBAL))
    if given == _HERE:
        return package
    if given and given != _GROUP:
        return (*package, *_steps(given))
    folder = entry.group or posixpath.dirname(entry.name)
    if ".." in folder:
        raise _refused(f"the entry {entry.name} of defaults has no package; write {entry.name}@{_HERE}")
    return (*package, *_steps(folder))


def _steps(package: str) -> tuple[str, ...]:
    return tuple(step for step in re.split(r"[./]", package) if step)


def _nested(part: dict[str, Any], package: tuple[str, ...]) -> dict[str, Any]:
    for step in reversed(package):
        part = {step: part}
    return part


def resolve(data: dict[str, Any]) -> dict[str, Any]:
    """Return the data with its references replaced. Raises SpecError for circles and for data that grows too large."""
    whole: dict[str, Any] = _Resolver(data).resolve(data, ())
    check_data(whole)
    return whole


class _Resolver:
    def __init__(self, data: Mapping[str, Any]) -> None:
        self._data = data
        self._nodes = 0
        self._characters = 0

    def resolve(self, value: Any, inside: tuple[str, ...], place: tuple[str, ...] = ()) -> Any:
        """Return the value at a place with its references replaced; `inside` are the references that lead to it."""
        self._nodes += 1
        self._characters += len(value) if isinstance(value, str) else 0
        if self._nodes > MAX_NODES or self._characters > _MOST_CHARACTERS:
            raise _refused("references expand the file to more than a spec may hold; remove some")
        if isinstance(value, dict):
            return {name: self.resolve(one, inside, (*place, str(name))) for name, one in value.items()}
        if isinstance(value, list):
            return [self.resolve(one, inside, (*place, str(number))) for number, one in enumerate(value)]
        return self._text(value, inside, place) if isinstance(value, str) and "${" in value else value

    def _text(self, text: str, inside: tuple[str, ...], place: tuple[str, ...]) -> Any:
        if _NESTED.search(text):
            return text
        whole = _REFERENCE.fullmatch(text.strip())
        if whole is not None:
            return self._look_up(whole[1], text, inside, place)
        return _REFERENCE.sub(lambda found: _joined(self._look_up(found[1], found[0], inside, place), found[0]), text)

    def _look_up(self, reference: str, text: str, inside: tuple[str, ...], place: tuple[str, ...]) -> Any:
        steps = _absolute(reference, place)
        path = ".".join(steps)
        if len(inside) >= MAX_DEPTH:
            raise _refused(f"references lead to one another over {MAX_DEPTH} times; write one of the values")
        if path in inside:
            raise _refused(f"the references {' -> '.join((*inside, path))} are a circle; write one of the values")
        value: Any = self._data
        for step in steps:
            if isinstance(value, dict) and step in value:
                value = value[step]
            elif isinstance(value, list) and step.isdigit() and int(step) < len(value):
                value = value[int(step)]
            else:
                return text
        return self.resolve(value, (*inside, path), steps)


def _absolute(reference: str, place: tuple[str, ...]) -> tuple[str, ...]:
    """Return the steps of a reference from the root; one dot before it is the mapping around it, two the one above."""
    path = reference.lstrip(".")
    dots = len(reference) - len(path)
    steps = tuple(step for step in re.split(r"[.\[\]]", path) if step)
    return (*place[: max(len(place) - dots, 0)], *steps) if dots else steps


def _joined(value: Any, text: str) -> str:
    return text if isinstance(value, dict | list) else str(value)


def _refused(message: str) -> SpecError:
    return SpecError([Problem("/defaults" if "defaults" in message else "", message)])
