"""pyproject.toml, compared with other files that list its packages, and the pins of constraints.txt."""

import tomllib
from collections.abc import Iterable, Iterator
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = [name.removesuffix("*") for name in PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]]


@pytest.mark.parametrize("package", PACKAGES)
def test_image_contains_every_package(package: str) -> None:
    assert f"!{package}" in (ROOT / ".dockerignore").read_text().splitlines()
    assert f"COPY {package} ./{package}" in (ROOT / "deploy" / "Dockerfile").read_text().splitlines()


def test_base_installation_contains_only_the_client_libraries() -> None:
    names = {line.partition(">")[0] for line in PROJECT["project"]["dependencies"]}
    assert names == {"httpx", "httpx-sse", "pydantic", "pyyaml"}
    assert PROJECT["project"]["optional-dependencies"]["client"] == []


@pytest.mark.parametrize(("extra", "included"), [("ray", "train"), ("service", "ray,cli")])
def test_extra_includes_another(extra: str, included: str) -> None:
    assert f"trainshed[{included}]" in PROJECT["project"]["optional-dependencies"][extra]


# The patch release counts: 3.11 promises 3.11.0, and Debian 12 has 3.11.2.
OLDEST = {"python_version": "3.11", "python_full_version": "3.11.0"}


def pins() -> dict[str, str]:
    lines = (line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines())
    return {canonicalize_name(name): version for name, version in lines}


@cache
def pinned_distributions() -> list[metadata.Distribution]:
    """Return the installed packages that have the version of their pin. A local part, as in 2.13.0+cpu, is ignored."""
    known = pins()
    every = {canonicalize_name(one.metadata["Name"]): one for one in metadata.distributions()}
    return [one for name, one in every.items() if name in known and Version(one.version).public == known[name]]


def requirements_of(found: metadata.Distribution, extras: Iterable[str] = ("",)) -> Iterator[Requirement]:
    """Yield what a package requires on the oldest Python, with extras of it."""
    for line in found.requires or ():
        required = Requirement(line)
        marker = required.marker
        if marker is None or any(marker.evaluate({**OLDEST, "extra": extra}) for extra in extras):
            yield required


def required_by_pins() -> list[tuple[str, Requirement]]:
    """Return each pinned package with each of its requirements, also of the extras that others ask of it."""
    installed = {canonicalize_name(one.metadata["Name"]): one for one in pinned_distributions()}
    found: list[tuple[str, Requirement]] = [
        (name, one) for name in installed for one in requirements_of(installed[name])
    ]
    for _, asked in found:
        name = canonicalize_name(asked.name)
        if asked.extras and name in installed:
            extra = [(name, one) for one in requirements_of(installed[name], asked.extras)]
            found += [pair for pair in extra if pair not in found]
    return found


def test_oldest_python_is_the_promised_one() -> None:
    assert PROJECT["project"]["requires-python"] == f">={OLDEST['python_version']}"
    assert len(pinned_distributions()) > 0.8 * len(pins()), "install the versions of constraints.txt: make"


def test_pins_are_installable_on_the_oldest_python() -> None:
    metadatas = [one.metadata for one in pinned_distributions()]
    # A backport of importlib.metadata, which some libraries import, raises KeyError for what is missing.
    needs = {one["Name"]: str(one.json.get("requires_python", "")) for one in metadatas}
    assert {name: need for name, need in needs.items() if OLDEST["python_full_version"] not in SpecifierSet(need)} == {}


def test_pins_satisfy_each_other_on_the_oldest_python() -> None:
    """PyTorch's build for CUDA, which is Linux's default, brings packages that the build for CPUs lacks."""
    known, wanted = pins(), required_by_pins()
    missing = {canonicalize_name(required.name) for _, required in wanted} - {*known}
    assert missing <= {"setuptools"}, "not pinned"
    versions = ((name, one, known.get(canonicalize_name(one.name))) for name, one in wanted)
    assert [(name, str(one)) for name, one, pin in versions if pin and not one.specifier.contains(pin, True)] == []
