"""Import of users' code, and its errors with file and line."""

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from train_loop.code.load import OwnCode, load_code
from train_loop.code.package import Package, unpack
from train_loop.errors import ModelError
from train_loop.spec import CodeSpec

GOOD = "from mymodel.layers import width\n\n\ndef build(config):\n    return width\n\n\nloss = collate = build\n"


@pytest.fixture(autouse=True)
def _private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


def load(files: dict[str, str], **more: str) -> OwnCode:
    entries = {"model": "mymodel:build", "loss": "mymodel:loss", "batch": "mymodel:collate"} | more
    package = Package("x", {name: text.encode() for name, text in files.items()})
    return load_code(CodeSpec(package="/x", **entries), unpack(package))  # type: ignore[arg-type]


def test_functions_are_imported_with_their_siblings_and_nothing_is_written() -> None:
    deep = "from importlib.resources import files\n\nfrom .. import layers\n\n"
    deep += "width = int(files('mymodel.sub').joinpath('width.txt').read_text())\n"
    files = {
        "mymodel/__init__.py": GOOD,
        "mymodel/layers.py": "from .sub.deep import width",
        "mymodel/sub/width.txt": "3",
    }
    code = load(files | {"mymodel/sub/__init__.py": "", "mymodel/sub/deep.py": deep})
    assert code.model({}) == 3
    assert list(code.folder.rglob("*.pyc")) == []


def test_second_package_does_not_get_the_modules_of_the_first() -> None:
    for width in (3, 4):
        files = {"mymodel.py": GOOD.replace("mymodel.layers", "layers"), "layers.py": f"width = {width}"}
        assert load(files).model({}) == width


@pytest.mark.parametrize(
    ("files", "entries", "problem"),
    [
        ({"other.py": ""}, {}, "the module mymodel is not in code.package, which has other"),
        ({"mymodel.py": ""}, {}, "code.model=mymodel:build: mymodel has no build"),
        ({"mymodel.py": "build = 3"}, {}, "is a int, not a function"),
        ({"mymodel.py": "\n\ndef build(:"}, {}, r"SyntaxError: .* \(mymodel.py, line 3\); correct the code"),
        ({"mymodel.py": "\nimport nothing_of_this"}, {}, r"ModuleNotFoundError: .* \(mymodel.py, line 2, in <module>"),
        ({"mymodel.py": "raise SystemExit(0)"}, {}, r"SystemExit: 0 \(mymodel.py, line 1"),
        ({"mymodel.py": "raise ValueError('a\\x1b[2J\\nb')"}, {}, r"ValueError: a\\x1b\[2J b \(mymodel.py, line 1"),
        ({"torch/__init__.py": ""}, {"model": "torch:build"}, "torch of code.package has the name of an installed one"),
        ({"json.py": ""}, {"model": "json:build"}, "json of code.package has the name of an installed one"),
        (
            {"mymodel.py": GOOD.replace("mymodel.layers", "layers"), "layers.py": "width = 3", "types.py": ""},
            {},
            "module types",
        ),
        ({"pip.py": ""}, {"model": "pip:build"}, "pip of code.package has the name of an installed one"),
    ],
)
def test_errors_of_the_code_say_where_they_are(files: dict[str, str], entries: dict[str, str], problem: str) -> None:
    with pytest.raises(ModelError, match=problem):
        load(files, **entries)


def test_error_in_a_call_names_file_line_and_function() -> None:
    code = load({"mymodel/__init__.py": GOOD, "mymodel/layers.py": "width = 3\n\ndef deep():\n    return 1 / 0\n"})
    with (
        pytest.raises(ModelError, match=r"mymodel:loss failed: ZeroDivisionError.*layers.py, line 4, in deep\)"),
        code.faults_of("mymodel:loss"),
    ):
        sys.modules["mymodel.layers"].deep()
