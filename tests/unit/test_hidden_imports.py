"""Imports that import-linter cannot see: module names in strings, held against the layers of the contracts."""

import ast
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PACKAGES = ("service", "train_loop", "trainshed")
_NAME = re.compile(r"(?:service|train_loop|trainshed)(?:\.[a-z_0-9]+)+(?::[a-z_]+)?")
UPWARDS = {
    # Ray imports the hook in the process of a worker; the module that names it must not import it.
    ("train_loop.system.ray_env", "train_loop.ray_train.warm_up.get_ready"),
    # The head's hook finds drivers by their command line.
    ("train_loop.liveness.planned_end", "train_loop.ray_train.driver"),
}
"""Module and the name that it must have as a string, although the name is in a higher layer."""


def modules() -> dict[str, Path]:
    files = [file for package in PACKAGES for file in Path(package).rglob("*.py")]
    return {".".join(file.with_suffix("").parts).removesuffix(".__init__"): file for file in files}


MODULES = modules()


@cache
def hidden_imports() -> tuple[tuple[str, str], ...]:
    """Return each module with each string in it that names another module of ours, or an attribute of one."""
    return tuple(_hidden_imports())


def _hidden_imports() -> Iterator[tuple[str, str]]:
    for module, file in MODULES.items():
        tree = ast.parse(file.read_text())
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if not (isinstance(node, ast.Constant) and isinstance(node.value, str)) or id(node) in docstrings:
                continue
            if _NAME.fullmatch(node.value) and module_of(node.value) not in (None, module):
                yield module, node.value


def module_of(name: str) -> str | None:
    """Return the longest prefix of a name that is a module below a package."""
    parts = name.partition(":")[0].split(".")
    prefixes = (".".join(parts[:count]) for count in range(len(parts), 1, -1))
    return next((one for one in prefixes if one in MODULES), None)


def layers(contract: str) -> list[list[str]]:
    """Return the layers of a contract in pyproject.toml, the highest first, as full names."""
    found = tomllib.loads(Path("pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (one,) = [each for each in found if contract in each["name"]]
    prefix = f"{one['containers'][0]}." if "containers" in one else ""
    return [[prefix + name.strip(" ()") for name in layer.split("|")] for layer in one["layers"]]


def layer_of(module: str, order: list[list[str]]) -> int | None:
    """Return the position of a module's layer, from the top."""
    for position, layer in enumerate(order):
        if any(module == name or module.startswith(f"{name}.") for name in layer):
            return position
    return None


def test_strings_name_modules_of_lower_layers() -> None:
    wrong = []
    for contract in ("The loop never imports the service", "The service's layers"):
        order = layers(contract)
        for module, name in hidden_imports():
            above, below = layer_of(module, order), layer_of(module_of(name) or "", order)
            if above is not None and below is not None and below < above and (module, name) not in UPWARDS:
                wrong.append((module, name))
    assert wrong == []


def test_allowed_strings_exist() -> None:
    assert UPWARDS - set(hidden_imports()) == set()
