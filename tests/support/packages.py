"""Installed packages, by the extras of the project that bring them."""

import re
import tomllib
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = tomllib.loads(Path("pyproject.toml").read_text())["project"]


def extras_of_make(variable: str) -> list[str]:
    """Return the extras of a variable of the Makefile, such as FOR_USERS."""
    found = re.search(rf"^{variable} := (.*)$", Path("Makefile").read_text(), re.MULTILINE)
    assert found is not None
    return found[1].split(",")


def required_by(extras: Iterable[str]) -> set[str]:
    """Return the names of the project and of all distributions that it requires with these extras."""
    installed = {canonicalize_name(one.metadata["Name"]): one for one in metadata.distributions()}
    waiting, found = [(PROJECT["name"], extra) for extra in ("", *extras)], set[tuple[str, str]]()
    while waiting:
        name, extra = pair = waiting.pop()
        if pair not in found and name in installed:
            found.add(pair)
            needed = _requirements(installed[name], name, extra)
            waiting += [(canonicalize_name(one.name), more) for one in needed for more in ("", *one.extras)]
    return {name for name, _ in found}


def _requirements(package: metadata.Distribution, name: str, extra: str) -> Iterator[Requirement]:
    if name == PROJECT["name"]:
        # The installed metadata may be older than pyproject.toml.
        own = PROJECT["optional-dependencies"][extra] if extra else PROJECT["dependencies"]
        yield from map(Requirement, own)
        return
    for one in map(Requirement, package.requires or ()):
        if one.marker is None or one.marker.evaluate({"extra": extra}):
            yield one


def modules_outside(extras: Iterable[str]) -> list[str]:
    """Return the top-level modules of all installed distributions that these extras do not bring."""
    there, modules = required_by(extras), metadata.packages_distributions()
    outside = {name for name, owners in modules.items() if there.isdisjoint(map(canonicalize_name, owners))}
    # Ray has its own copies of some.
    ray = Path(metadata.distribution("ray").locate_file("ray"))  # type: ignore[arg-type]
    return sorted(outside - {path.stem for folder in ray.rglob("thirdparty_files") for path in folder.iterdir()})
