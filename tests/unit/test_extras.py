"""Errors about missing packages: each names the extra of pyproject.toml that installs the package."""

import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from service.adapters.sql.database import Database
from service.errors import DatabaseUnusable
from train_loop import extras
from train_loop.data.files import file_system
from train_loop.errors import DataError
from train_loop.extras import EXTRAS, install
from train_loop.run_dir.remote import remote_path

ROOT = Path(__file__).parents[2]
OPTIONAL: dict[str, list[str]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
    "optional-dependencies"
]
FOR_DEVELOPERS = {"client", "ray", "docs", "dev", "bench"}
"""Extras that no error names: the first is empty, the second a part of `service`."""


def test_each_extra_for_users_is_the_remedy_for_a_package_that_it_lists() -> None:
    assert set(EXTRAS.values()) == {*OPTIONAL} - FOR_DEVELOPERS
    for package, extra in EXTRAS.items():
        names = [Requirement(line).name for line in OPTIONAL[extra]]
        assert any(name.lower().startswith(package.lower()) for name in names), f"{package} is not in {extra}: {names}"


def test_install_names_the_clone_or_the_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert install("peft") == f"pip install -e '.[lora]' in {ROOT}"
    monkeypatch.setattr(extras, "_ROOT", tmp_path)
    assert install("peft") == "pip install 'trainshed[lora]'"


def test_no_other_module_writes_a_command_of_pip() -> None:
    files = [path for name in ("train_loop", "service", "trainshed") for path in (ROOT / name).rglob("*.py")]
    assert {path.name for path in files if "pip install" in path.read_text()} == {"extras.py"}


@pytest.mark.parametrize(("function", "error"), [(file_system, DataError), (remote_path, ValueError)])
def test_missing_package_of_object_storage_is_named(
    monkeypatch: pytest.MonkeyPatch, function: Any, error: type[Exception]
) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(sys.modules["fsspec.registry"].__dict__["_registry"], "s3", raising=False)
    with pytest.raises(error) as caught:
        function("s3://bucket/rows")
    assert str(caught.value).endswith(f"; run {install('s3fs')}, or use file://")


def test_missing_package_of_a_database_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(DatabaseUnusable) as caught:
        Database("postgresql+psycopg://shed@127.0.0.1:9/shed")
    assert str(caught.value).startswith("TRAINSHED_DATABASE_URL needs psycopg, which cannot be imported here (")
    assert str(caught.value).endswith(f"; run {install('psycopg')}")
