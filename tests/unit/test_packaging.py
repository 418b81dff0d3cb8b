"""pyproject.toml, compared with other files that list its packages."""

import tomllib
from pathlib import Path

import pytest

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


@pytest.mark.parametrize(("extra", "included"), [("ray", "train"), ("service", "ray")])
def test_extra_includes_another(extra: str, included: str) -> None:
    assert f"trainshed[{included}]" in PROJECT["project"]["optional-dependencies"][extra]
