"""The reference of commands, from the Typer application."""

import re
from collections.abc import Iterator
from typing import Any

import typer

from tools.docs.markdown import code, sentence, table
from trainshed.cli.main import app

_PROGRAM = "trainshed"
_HELP = "--help"
_VALUES = {
    r"<list\[(.*)\]>": r"\1",
    "<str>": "TEXT",
    "<int[^>]*>": "N",
    "<float[^>]*>": "SECONDS",
    "<path>": "FILE",
    r"<(.*)>": r"\1",
}
"""Patterns of the values in --help, and their words on the page."""


def page() -> str:
    """Return the Markdown of the page."""
    commands = "\n".join(_section(name, command) for name, command in commands_of(typer.main.get_command(app)))
    return (
        "# Commands\n\n"
        "[The command line](../guides/cli.md) describes ids, overrides, output and exit codes. Every command has "
        f"`{_HELP}`. `{_PROGRAM} --version` shows the version.\n\n{commands}"
    )


def commands_of(group: Any, prefix: str = _PROGRAM) -> Iterator[tuple[str, Any]]:
    """Yield the full name of each command and the command, groups of commands included."""
    for name, command in group.commands.items():
        if getattr(command, "commands", None):
            yield from commands_of(command, f"{prefix} {name}")
        elif not command.hidden:
            yield f"{prefix} {name}", command


def _section(name: str, command: Any) -> str:
    arguments = [one for one in command.params if one.param_type_name == "argument"]
    options = [one for one in command.params if one.param_type_name == "option" and _HELP not in one.opts]
    context = typer.Context(command, info_name=name)
    usage = " ".join([name, *(["[OPTIONS]"] if options else []), *map(_argument, arguments)])
    parts = [f"## {name}\n\n{sentence(command.help or '')}\n\n```text\n{usage}\n```\n"]
    if arguments:
        parts.append(table(("argument", "meaning"), [(code(_argument(one)), _help(one)) for one in arguments]))
    if options:
        rows = [(_option(one, context), _default(one), _help(one)) for one in options]
        parts.append(table(("option", "default", "meaning"), rows))
    return "\n".join(parts)


def _option(option: Any, context: Any) -> str:
    """Return the names of an option and its value, as in the output of --help."""
    text: str = option.get_help_record(context)[0]
    for pattern, word in _VALUES.items():
        text = re.sub(pattern, word, text)
    return code(text)


def _argument(argument: Any) -> str:
    name = argument.metavar or argument.name.upper()
    name = name if argument.nargs == 1 or name.endswith("...") else f"{name}..."
    return name if argument.required or name.startswith("[") else f"[{name}]"


def _default(option: Any) -> str:
    value = option.default
    if value is None or value is False or value == [] or callable(value):
        return ""
    if isinstance(value, bool):
        return code(option.opts[0])
    return code(", ".join(map(str, value)) if isinstance(value, list | tuple) else str(getattr(value, "value", value)))


def _help(parameter: Any) -> str:
    return sentence(parameter.help or "")
