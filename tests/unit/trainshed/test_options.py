"""Invalid values of the command's options and arguments: the message names the option, without words of libraries."""

from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from trainshed.cli.main import _OF_OTHER_TOOLS, app


def values(command: Any, *words: str) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield each option that takes a value: the words of its command, and its name."""
    for name, one in getattr(command, "commands", {}).items():
        yield from values(one, *words, name)
    yield from ((words, one.opts[0]) for one in command.params if one.opts[0].startswith("-") and not one.is_flag)


OPTIONS = [*values(typer.main.get_command(app))]


@pytest.mark.parametrize(("words", "option"), OPTIONS, ids=[f"{' '.join(words)} {name}" for words, name in OPTIONS])
def test_invalid_value_is_named_without_the_prefix_of_pydantic(
    words: tuple[str, ...], option: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRAINSHED_HOME", str(tmp_path))
    result = CliRunner(env={"COLUMNS": "500"}).invoke(app, [*words, option, "no/BOGUS"], prog_name="trainshed")
    assert result.exit_code in (1, 2), result.output
    assert "Value error" not in result.output
    assert "Traceback" not in result.output


def test_version_is_that_of_the_package() -> None:
    found = CliRunner().invoke(app, ["--version"])
    assert (found.exit_code, found.output) == (0, f"trainshed {version('trainshed')}\n")


def test_command_of_another_tool_is_answered_with_ours() -> None:
    group = typer.main.get_command(app)
    for name, meant in _OF_OTHER_TOOLS.items():
        assert name not in group.commands  # type: ignore[attr-defined] # the command is a group
        assert meant.split()[0] in group.commands  # type: ignore[attr-defined]
        found = CliRunner().invoke(app, [name, "--json"])
        assert (found.exit_code, f"No such command {name!r}. Did you mean {meant!r}?" in found.output) == (2, True)
