"""`make test` runs each file once, at the place where the Makefile has it."""

import os
import subprocess
from pathlib import Path

import pytest


def commands_of(target: str, **variables: str) -> list[list[Path]]:
    """Return the paths of each pytest command of a target."""
    environment = {name: value for name, value in os.environ.items() if name != "MORE"} | variables
    command = ["make", "-n", target]
    lines = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout.splitlines()
    words = [line.split() for line in lines if "-m pytest" in line]
    return [[Path(word.rstrip(";")) for word in line if word.startswith("tests/")] for line in words]


@pytest.fixture(scope="module")
def commands() -> list[list[Path]]:
    """Return the paths of each pytest command of `make more`."""
    return commands_of("test", MORE="1")


def test_no_file_loses_its_place_to_a_folder_of_the_same_command(commands: list[list[Path]]) -> None:
    for paths in commands:
        assert [path for path in paths if set(path.parents) & set(paths)] == []


def test_all_files_but_those_for_gpus_are_run(commands: list[list[Path]]) -> None:
    named = {path for paths in commands for path in paths}
    files = {path for path in Path("tests").rglob("test_*.py") if "gpu" not in path.parts}
    assert {path for path in files if not {path, *path.parents} & named} == set()


def test_commit_runs_one_file_of_each_group_and_all_commits_run_each(commands: list[list[Path]]) -> None:
    show = ["make", "--no-print-directory", "--eval", "show:; @echo $(TURNS)", "show"]
    shown = subprocess.run(show, capture_output=True, text=True, check=True).stdout
    groups = [{Path(name) for name in group.split("+")} for group in shown.split()]
    everything = {path for paths in commands for path in paths}
    left_out = [
        everything - {path for paths in commands_of("test", MODELS_SEED=str(seed)) for path in paths}
        for seed in range(28)
    ]
    for files in left_out:
        # The unit tests run as a folder.
        assert [len(group & files) for group in groups if group & everything] == [
            len(group) - 1 for group in groups if group & everything
        ]
    assert set.union(*left_out) == set.union(*groups) & everything


@pytest.mark.parametrize(("locale", "passed"), [("C", "C.UTF-8"), ("C.UTF-8", "C.UTF-8")])
def test_ascii_locale_is_not_passed_on(locale: str, passed: str) -> None:
    command = ["make", "--no-print-directory", "--eval", "show:; @echo $$LC_ALL", "show"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "LC_ALL": locale})
    assert shown.stdout.strip() == passed
