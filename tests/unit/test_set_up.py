"""Set-up of `.venv`: what `make` prints, and which build of PyTorch it takes."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

from tools.set_up import progress

ROOT = Path(__file__).parents[2]
PYPROJECT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "project"
version = "1"
[project.optional-dependencies]
train = ["torch>=2.11"]
[tool.setuptools]
py-modules = []
"""
CUDA = (("torch", "2.13.0", 'nvidia-nccl-cu13>=2.29; platform_system == "Linux"'), ("torch", "2.14.0", None))
CUDA_LIBRARIES = (("nvidia_nccl_cu13", "2.29.7", None), ("nvidia_nccl_cu13", "2.31", None))
CPU = (("torch", "2.13.0+cpu", None), ("torch", "2.14.0+cpu", None))


def wheel(folder: Path, name: str, version: str, requirement: str | None) -> None:
    """Write an empty wheel into a package index."""
    page = folder / name.replace("_", "-")
    page.mkdir(parents=True, exist_ok=True)
    info = f"{name}-{version}.dist-info"
    file = f"{name}-{version}-py3-none-any.whl"
    with ZipFile(page / file, "w") as archive:
        needs = f"Requires-Dist: {requirement}\n" if requirement else ""
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    with (page / "index.html").open("a") as links:
        links.write(f'<a href="{file.replace("+", "%2B")}">{file}</a>\n')


def planned(folder: Path, torch_index: str) -> str:
    """Return the last line of the set-up of a project in an environment without packages, which installs nothing."""
    for package in (*CUDA, *CUDA_LIBRARIES):
        wheel(folder / "default", *package)
    for package in CPU:
        wheel(folder / "cpu", *package)
    (folder / "pyproject.toml").write_text(PYPROJECT)
    shutil.copy(ROOT / "constraints.txt", folder)
    ours = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    options = {"DRY_RUN": "1", "IGNORE_INSTALLED": "1", "NO_BUILD_ISOLATION": "0", "CONFIG_FILE": os.devnull}
    environment = ours | {f"PIP_{name}": value for name, value in options.items()}
    environment |= {"PIP_INDEX_URL": f"file://{folder}/default", "TORCH_INDEX": torch_index, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tools.set_up", "train"]
    found = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    return found.stdout


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only on Linux is the default build one for CUDA")
def test_constraints_serve_the_default_build_and_that_of_another_index(tmp_path: Path) -> None:
    answer = planned(tmp_path, "").replace("_", "-").splitlines()
    assert answer[-2] == "  would install nvidia-nccl-cu13-2.29.7 project-1 torch-2.13.0"
    answer = planned(tmp_path, f"file://{tmp_path}/cpu").splitlines()
    assert answer[-2] == "  would install project-1 torch-2.13.0+cpu"


def test_progress_names_large_files_and_sums_up_the_others() -> None:
    lines = """
        Collecting torch>=2.11
          Downloading torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl.metadata (30 kB)
        Downloading torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl (526.6 MB)
          Using cached nvidia_cublas-13.1.1.3-py3-none-manylinux_2_27_x86_64.whl (1.2 GB)
          Downloading peft-0.21.2-py3-none-any.whl (835 kB)
          Downloading grapheme-0.6.0.tar.gz (207 bytes)
        Installing collected packages: peft, nvidia-cublas, torch, grapheme
        Successfully installed peft-0.21.2
    """
    assert list(progress(line.strip() for line in lines.splitlines())) == [
        "downloading torch 2.13.0: 527 MB",
        "using cached nvidia_cublas 13.1.1.3: 1,200 MB",
        "2 smaller files, 1,727 MB in all; unpacking 4 packages",
    ]


@pytest.mark.parametrize(("earlier", "code"), [("file:///cpu", 0), ("", 2)])
def test_other_build_is_not_ignored_in_an_environment_that_has_one(tmp_path: Path, earlier: str, code: int) -> None:
    (tmp_path / ".venv").mkdir()
    for name, text in {".service": "", ".torch-index": earlier}.items():
        (tmp_path / ".venv" / name).write_text(text)
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_text("")
        os.utime(tmp_path / name, (0, 0))
    command = ["make", "--dry-run", "serve", f"PYTHON={sys.executable}", "TORCH_INDEX=file:///cpu"]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert found.returncode == code, found.stderr
    assert ("Remedy: remove .venv, or leave TORCH_INDEX out" in found.stderr) == bool(code)
