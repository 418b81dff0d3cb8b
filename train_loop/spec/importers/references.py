"""Hydra's `defaults` lists and OmegaConf's `${a.b}` references, as far as plain data needs them.

Resolvers (`${oc.env:NAME}`), relative and nested references stay unchanged; a field that the spec needs refuses them.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from train_loop.spec.base import Problem, SpecError
from train_loop.spec.parse import merged
from train_loop.spec.text import MAX_DEPTH, MAX_NODES, MAX_YAML_BYTES, check_data, read_yaml

Read = Callable[[str], bytes | None]
"""A function that returns the bytes of a config by its name without extension, relative to the file; None if absent."""
_MOST_FILES = 16
_MOST_CHARACTERS = 4 * MAX_YAML_BYTES
_REFERENCE = re.compile(r"\$\{([A-Za-z_]\w*(?:\.\w+)*)\}")
_NESTED = re.compile(r"\$\{[^}]*\$\{")
_SELF = "_self_"
_TO_ROOT = frozenset({"_here_", "_global_"})


def compose(data: Mapping[str, Any], read: Read) -> dict[str, Any]:
    """Return a config merged with the configs that its `defaults` list names. Raises SpecError.

    As in Hydra since 1.1, the config itself comes last unless the list has `_self_`.
    """
    return _Composer(read).compose(data)


class _Composer:
    def __init__(self, read: Read) -> None:
        self._read = read
        self._files = 0

    def compose(self, data: Mapping[str, Any]) -> dict[str, Any]:
        own = {name: value for name, value in data.items() if name != "defaults"}
        entries = data.get("defaults") or []
        if not isinstance(entries, list):
            raise _refused("defaults is not a list of configs; write one entry per config")
        whole: dict[str, Any] = {}
        for entry in [*entries, *([] if _SELF in entries else [_SELF])]:
            whole = merged(whole, own if entry == _SELF else self._entry(entry))
        return whole

    def _entry(self, entry: Any) -> dict[str, Any]:
        name, package, optional = _parse(entry)
        if name is None:
            return {}
        self._files += 1
        if self._files > _MOST_FILES:
            raise _refused(f"defaults name over {_MOST_FILES} configs; write their fields into the file")
        text = self._read(name)
        if text is None and optional:
            return {}
        if text is None:
            raise _refused(
                f"the config {name}.yaml of defaults cannot be read; import the file from its folder, or write the "
                "fields of that config into it"
            )
        part = read_yaml(text)
        if part is not None and not isinstance(part, dict):
            raise _refused(f"the config {name}.yaml of defaults is not a mapping of fields")
        if part and part.get("defaults"):
            raise _refused(f"the config {name}.yaml has defaults, too, which are not read; write them into the file")
        for step in reversed(package):
            part = {step: part}
        return part or {}


def _parse(entry: Any) -> tuple[str | None, list[str], bool]:
    """Return a config's name, the steps to the mapping that takes its fields, and whether it may be absent."""
    optional, group = False, ""
    option: Any = entry
    if isinstance(entry, dict) and len(entry) == 1:
        group, option = next(iter(entry.items()))
        words = group.split()
        optional, group = "optional" in words[:-1], words[-1] if words else ""
        if "override" in words[:-1] or option is None:
            return None, [], True
    if not isinstance(option, str) or not option:
        raise _refused(f"the entry {entry!r:.80} of defaults is not the name of a config")
    placed, _, package = (group or option).partition("@")
    name = f"{placed}/{option}" if group else placed
    if package in _TO_ROOT:
        return name, [], optional
    folder = placed if group else placed.rpartition("/")[0]
    if not package and ".." in folder:
        raise _refused(f"the entry {entry!r:.80} of defaults has no package; write {name}@_here_")
    return name, [step for step in re.split(r"[./]", package or folder) if step], optional


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

    def resolve(self, value: Any, inside: tuple[str, ...]) -> Any:
        """Return a value with its references replaced; `inside` are the references that lead to it."""
        self._nodes += 1
        self._characters += len(value) if isinstance(value, str) else 0
        if self._nodes > MAX_NODES or self._characters > _MOST_CHARACTERS:
            raise _refused("references expand the file to more than a spec may hold; remove some")
        if isinstance(value, dict):
            return {name: self.resolve(one, inside) for name, one in value.items()}
        if isinstance(value, list):
            return [self.resolve(one, inside) for one in value]
        return self._text(value, inside) if isinstance(value, str) and "${" in value else value

    def _text(self, text: str, inside: tuple[str, ...]) -> Any:
        if _NESTED.search(text):
            return text
        whole = _REFERENCE.fullmatch(text.strip())
        if whole is not None:
            return self._look_up(whole[1], text, inside)
        return _REFERENCE.sub(lambda found: _joined(self._look_up(found[1], found[0], inside), found[0]), text)

    def _look_up(self, path: str, text: str, inside: tuple[str, ...]) -> Any:
        if len(inside) >= MAX_DEPTH:
            raise _refused(f"references lead to one another over {MAX_DEPTH} times; write one of the values")
        if path in inside:
            raise _refused(f"the references {' -> '.join((*inside, path))} are a circle; write one of the values")
        value: Any = self._data
        for step in path.split("."):
            if isinstance(value, dict) and step in value:
                value = value[step]
            elif isinstance(value, list) and step.isdigit() and int(step) < len(value):
                value = value[int(step)]
            else:
                return text
        return self.resolve(value, (*inside, path))


def _joined(value: Any, text: str) -> str:
    return text if isinstance(value, dict | list) else str(value)


def _refused(message: str) -> SpecError:
    return SpecError([Problem("/defaults" if "defaults" in message else "", message)])
