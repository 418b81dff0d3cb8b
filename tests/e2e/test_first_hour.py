"""docs/get-started/first-hour.md, run as a new user types it: its commands must print the page's output."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.clients.typed import Shell, typed_in
from tests.support.servers.worker_forks import worker_forks
from train_loop.run_dir import read_lines

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
    with Shell(environment | worker_forks(ranks_read=True)) as shell:
        # The folder contains only the examples, so that no output ends up in the source tree.
        (tmp_path / "examples").symlink_to(Path("examples").absolute())
        shell.type(f"cd {tmp_path}; unset TRAINSHED_URL TRAINSHED_KEY")
        yield shell
        shell.type("trainshed down")


@pytest.mark.timeout(900)
def test_first_hour_matches_its_page_and_the_quickstart_learns(shell: Shell, tmp_path: Path) -> None:
    commands = typed_in(PAGE)
    verbs = {one.command.split("trainshed ")[1].split()[0] for one in commands if "trainshed " in one.command}
    assert verbs >= {"up", "submit", "watch", "pause", "resume", "clone", "export", "doctor"}
    for one in commands:
        output, code = shell.type(one.command)
        assert code == 0, f"$ {one.command}\n{output}"
        assert one.fits(output), f"$ {one.command}\n{output}\n--- the page says\n{one.answer}"
    (events,) = (path for path in tmp_path.glob("home/runs/default/*/attempts/1/events.jsonl") if is_quickstart(path))
    (prepared,) = (line for line in read_lines(events) if line["event"] == "prepared")
    assert prepared["utilisation"] >= 0.97, "expected samples without padding"
    first, last = (list(read_lines(events.parents[1] / attempt / "metrics.jsonl")) for attempt in ("1", "2"))
    assert last[-1]["loss"] < first[0]["loss"] - 1, "expected a lower loss"


def is_quickstart(events: Path) -> bool:
    """Return True for the first job of the page, which was paused."""
    return events.parents[1].joinpath("2").is_dir()
