"""Import of the functions that a spec's `code` names, and errors of users' code with their file and line."""

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from train_loop.errors import ModelError, UserError
from train_loop.spec import CodeSpec, show

_LONGEST = 500
"""Maximum characters of an error's own text in a message."""


@dataclass(frozen=True)
class OwnCode:
    """The functions of a user's package."""

    spec: CodeSpec
    folder: Path
    """Folder with the unpacked package."""
    model: Callable[..., Any]
    loss: Callable[..., Any]
    batch: Callable[..., Any]

    @contextmanager
    def faults_of(self, entry_point: str) -> Iterator[None]:
        """Raise ModelError with file and line for errors of the code of one of the functions."""
        with _faults(f"{entry_point} failed", self.folder):
            yield


def load_code(spec: CodeSpec, folder: Path, *, begin: Callable[[str], object] = lambda field: None) -> OwnCode:
    """Import the functions of a spec from a folder with its unpacked package. Raises ModelError.

    The process keeps imported modules, and finds further modules of the package after all installed ones. `begin`
    is called with the name of each field before its function is imported.
    """
    found = dict[str, Callable[..., Any]]()
    with _importable(folder):
        for field in ("model", "loss", "batch"):
            begin(field)
            found[field] = _function(field, getattr(spec, field), folder)
        _check_siblings(folder)
    return OwnCode(spec, folder, **found)


def _function(field: str, entry_point: str, folder: Path) -> Callable[..., Any]:
    module_name, _, path = entry_point.partition(":")
    found: Any = _module(module_name, folder)
    for step in path.split("."):
        if not hasattr(found, step):
            raise ModelError(f"code.{field}={entry_point}: {module_name} has no {path}; correct the name")
        found = getattr(found, step)
    if not callable(found):
        raise ModelError(f"code.{field}={entry_point} is a {type(found).__name__}, not a function; name a function")
    function: Callable[..., Any] = found
    return function


def _module(name: str, folder: Path) -> ModuleType:
    """Import a module of the package. Raises ModelError for errors of its code, and for a module from elsewhere."""
    top = name.partition(".")[0]
    if not any((folder / f"{top}{ending}").exists() for ending in ("", ".py")):
        kept = ", ".join(sorted({one.name.removesuffix(".py") for one in folder.iterdir()})[:5])
        raise ModelError(f"the module {top} is not in code.package, which has {kept}; correct the name or the package")
    _check_own(top, folder)
    with _faults(f"{name} cannot be imported", folder):
        return importlib.import_module(name)


def _check_siblings(folder: Path) -> None:
    """Raise ModelError for a module of the package in whose place the code has got an installed one of its name."""
    for one in folder.iterdir():
        top = one.name.removesuffix(".py")
        if top in sys.modules and not top.startswith("__"):
            _check_own(top, folder)


def _check_own(top: str, folder: Path) -> None:
    """Raise ModelError if an installed module has the name of a module of the package."""
    found = sys.modules.get(top) or importlib.util.find_spec(top)
    place = getattr(found, "__file__", None) or getattr(found, "origin", None)
    if top in sys.stdlib_module_names or place is None or not Path(place).is_relative_to(folder):
        raise ModelError(
            f"the module {top} of code.package has the name of an installed one{f' ({place})' if place else ''}; "
            "rename it, or add __init__.py to its folder"
        )


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """Let Python find the modules of a folder, and none that it has from another package of users' code."""
    home = str(folder.parent)
    for name, module in list(sys.modules.items()):
        place = getattr(module, "__file__", None) or ""
        if place.startswith(home) and not place.startswith(f"{folder}/"):
            del sys.modules[name]
    sys.path[:] = [place for place in sys.path if Path(place).parent != folder.parent]
    # Installed modules come first: a package cannot replace a library that the loop uses.
    sys.path.append(str(folder))
    importlib.invalidate_caches()
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        yield
    finally:
        sys.dont_write_bytecode = before


@contextmanager
def _faults(what: str, folder: Path) -> Iterator[None]:
    """Raise ModelError for errors of users' code; `what` says what failed. SystemExit is one, too."""
    try:
        yield
    except (UserError, MemoryError):
        raise
    except (Exception, SystemExit) as error:
        raise ModelError(describe_fault(what, error, folder)) from error


def describe_fault(what: str, error: BaseException, folder: Path) -> str:
    """Return the message of an error of users' code, with its file and line; `what` says what failed."""
    text = show(" ".join(str(error).split()), lines=False)[:_LONGEST]
    return f"{what}: {type(error).__name__}: {text}{_place_of(error, folder)}; correct the code"


def _place_of(error: BaseException, folder: Path) -> str:
    """Return file, line and function of the innermost call in a package's folder, in parentheses; empty if unknown."""
    if isinstance(error, SyntaxError) and error.filename and Path(error.filename).is_relative_to(folder):
        return f" ({Path(error.filename).relative_to(folder)}, line {error.lineno})"
    return innermost_place(traceback.extract_tb(error.__traceback__), folder)


def innermost_place(stack: Iterable[traceback.FrameSummary], folder: Path) -> str:
    """Return file, line and function of the innermost call in a package's folder, in parentheses; empty if none is."""
    frames = [one for one in stack if Path(one.filename).is_relative_to(folder)]
    if not frames:
        return ""
    return f" ({Path(frames[-1].filename).relative_to(folder)}, line {frames[-1].lineno}, in {frames[-1].name})"
