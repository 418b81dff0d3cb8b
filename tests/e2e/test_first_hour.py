"""README and docs/get-started/first-hour.md, run as a new user types them, with the packages of `make demo` alone."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.clients.typed import Shell, Typed, typed_in
from tests.support.forks.sitecustomize import ABSENT_VARIABLE
from tests.support.packages import extras_of_make, modules_outside
from tests.support.servers.worker_forks import worker_forks
from train_loop.run_dir import read_lines

README, FIRST_HOUR = Path("README.md"), Path("docs/get-started/first-hour.md")
TEMPLATES = sorted(path.stem for path in Path("trainshed/cli/templates").glob("*.yaml"))
NOT_TYPED = ("make demo", ". .venv/bin/activate")
"""Commands of the README that the fixture replaces."""


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
        ABSENT_VARIABLE: ",".join(modules_outside(extras_of_make("FOR_USERS"))),
    }
    with Shell(environment | worker_forks(ranks_read=True)) as shell:
        # The folder contains only the examples, so that no output ends up in the source tree.
        (tmp_path / "examples").symlink_to(Path("examples").absolute())
        shell.type(f"cd {tmp_path}; unset TRAINSHED_URL TRAINSHED_KEY")
        yield shell
        shell.type("trainshed down")


def succeed(shell: Shell, *commands: str | Typed) -> None:
    """Type commands, each of which must succeed and have the output of its page."""
    for one in commands:
        typed = Typed(one, "…\n") if isinstance(one, str) else one
        output, code = shell.type(typed.command)
        assert code == 0, f"$ {typed.command}\n{output}"
        assert typed.fits(output), f"$ {typed.command}\n{output}\n--- the page says\n{typed.answer}"


@pytest.mark.timeout(900)
def test_first_hour_matches_its_page_and_the_quickstart_learns(shell: Shell, tmp_path: Path) -> None:
    commands = typed_in(FIRST_HOUR)
    verbs = {one.command.split("trainshed ")[1].split()[0] for one in commands if "trainshed " in one.command}
    assert verbs >= {"up", "submit", "watch", "pause", "resume", "clone", "export", "doctor"}
    succeed(shell, *commands)
    (events,) = (path for path in tmp_path.glob("home/runs/default/*/attempts/1/events.jsonl") if is_quickstart(path))
    (prepared,) = (line for line in read_lines(events) if line["event"] == "prepared")
    assert prepared["utilisation"] >= 0.97, "expected samples without padding"
    first, last = (list(read_lines(events.parents[1] / attempt / "metrics.jsonl")) for attempt in ("1", "2"))
    assert last[-1]["loss"] < first[0]["loss"] - 1, "expected a lower loss"


@pytest.mark.timeout(1200)
def test_commands_of_the_readme_and_templates_need_only_the_packages_of_make_demo(shell: Shell) -> None:
    commands = [one.command for one in typed_in(README)]
    assert commands[:2] == [*NOT_TYPED]
    succeed(shell, *commands[2:])
    succeed(shell, "trainshed plan job.yaml --set strategy.fsdp_size=node")
    for name in TEMPLATES:
        made = f"trainshed init {name}.yaml --from {name}"
        succeed(shell, made, f"trainshed plan {name}.yaml")
        # The README has trained the first one.
        if name != "pretrain":
            succeed(shell, f"trainshed submit {name}.yaml --wait")
    # docs/guides/metrics.md names this viewer.
    succeed(shell, "tensorboard --inspect --logdir home/runs/default")
    output, code = shell.type("python -c 'import pytest'")
    assert (code, "No module named 'pytest'" in output) == (1, True), "expected only what users need"


def is_quickstart(events: Path) -> bool:
    """Return True for the first job of the page, which was paused."""
    return events.parents[1].joinpath("2").is_dir()
