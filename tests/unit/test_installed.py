"""What a user's machine has after `pip install`: types for mypy, and a command for each extra."""

import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.support.clients import client_types, model_script
from train_loop.extras import install

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", ROOT / "docs" / "guides" / "client.md")
WRONG = "from trainshed import Client\nClient(3)\n"
NO_SERVICE = f"the service is not installed here; run {install('uvicorn')}"
NOT_IN_CLI = (
    "uvicorn",
    "fastapi",
    "sqlalchemy",
    "alembic",
    "ray",
    "torch",
    "pyarrow",
    "cryptography",
    "jwt",
    "ulid",
    "tenacity",
)


def pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", *arguments, "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--disable-pip-version-check"], check=True, capture_output=True, text=True)


def project(folder: Path) -> Path:
    """Return a copy of what is installed, so that a build writes nothing into the repository."""
    folder.mkdir()
    for name in ("trainshed", "service", "train_loop", "pyproject.toml", "README.md"):
        (folder / name).symlink_to(ROOT / name)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("editable", [False, True], ids=["wheel", "editable"])
def test_mypy_strict_accepts_examples_of_the_docs_and_plain_values_of_every_model(
    tmp_path: Path, editable: bool
) -> None:
    target, script = tmp_path / "site", tmp_path / "user"
    pip("install", "--target", str(target), *(["--editable"] if editable else []), str(project(tmp_path / "project")))
    script.mkdir()
    for page in PAGES:
        examples = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
        (script / f"{page.stem.lower()}.py").write_text("\n".join(examples))
    (script / "models.py").write_text(model_script.model_script())
    (script / "calls.py").write_text(Path(client_types.__file__).read_text())
    (script / "wrong.py").write_text(WRONG)
    # A user's interpreter: its site-packages has Trainshed before the libraries of this one.
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    site = next((tmp_path / "venv").glob("lib/python*/site-packages"))
    installed = [file.read_text().strip() for file in target.glob("*.pth")] if editable else [str(target)]
    (site / "user.pth").write_text("\n".join([*installed, sysconfig.get_path("purelib")]))
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--python-executable", "../venv/bin/python"]
    # Both cases check the same libraries.
    command += ["--cache-dir", str(tmp_path.parent / "mypy")]
    found = subprocess.run([*command, "."], cwd=script, capture_output=True, text=True, check=False)
    assert found.stdout.splitlines() == [
        'wrong.py:2: error: Argument 1 to "Client" has incompatible type "int"; expected "str | None"  [arg-type]',
        "Found 1 error in 1 file (checked 5 source files)",
    ]


def run_without(modules: tuple[str, ...], *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command as if these modules were not installed."""
    code = f"import sys; sys.modules.update(dict.fromkeys({modules})); from trainshed.__main__ import main; main()"
    environment = {"TRAINSHED_URL": "http://127.0.0.1:9", "TRAINSHED_KEY": "key", "TRAINSHED_HOME": "/nowhere"}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=ROOT)


def test_command_without_its_extra_names_the_remedy() -> None:
    found = run_without(("typer",), "ps")
    assert (found.returncode, found.stdout) == (1, "")
    assert found.stderr.startswith("trainshed: the command is not installed (typer is missing); run pip install")
    assert (
        f"{install('typer')} for a service on another machine, or {install('uvicorn')} to run one here" in found.stderr
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ps"], "the service does not answer ("),
        (["up"], NO_SERVICE),
        (["serve"], NO_SERVICE),
        (["backup", "b.tar"], NO_SERVICE),
    ],
)
def test_command_with_the_extra_cli_needs_no_library_of_the_service(arguments: list[str], message: str) -> None:
    found = run_without(NOT_IN_CLI, *arguments)
    assert (found.returncode, found.stdout) == (1, "")
    assert found.stderr.startswith(f"trainshed: {message}")
    assert found.stderr.count("\n") == 1
