"""docs/get-started/first-hour.md, run as a new user types it: its commands must print the page's output."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.clients.typed import Shell, typed_in

PAGE = Path("docs/get-started/first-hour.md")


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    """Return a new user's shell with only the commands; its service is stopped afterwards."""
    environment = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "TRAINSHED_HOME": str(tmp_path / "home"),
        "TRAINSHED_PORT": "0",
        "TRAINSHED_RAY_CPUS": "3",
        "RAY_AUTH_MODE": "token",
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "200",
    }
    with Shell(environment) as shell:
        # The folder contains only the examples, so that no output ends up in the source tree.
        (tmp_path / "examples").symlink_to(Path("examples").absolute())
        shell.type(f"cd {tmp_path}; unset TRAINSHED_URL TRAINSHED_KEY")
        yield shell
        shell.type("trainshed down")


@pytest.mark.timeout(900)
def test_first_hour_matches_its_page(shell: Shell) -> None:
    commands = typed_in(PAGE)
    verbs = {one.command.split("trainshed ")[1].split()[0] for one in commands if "trainshed " in one.command}
    assert verbs >= {"up", "submit", "watch", "pause", "resume", "clone", "export", "doctor"}
    for one in commands:
        output, code = shell.type(one.command)
        assert code == 0, f"$ {one.command}\n{output}"
        assert one.fits(output), f"$ {one.command}\n{output}\n--- the page says\n{one.answer}"
