"""The `trainshed` command: one short function per verb, in the other modules of this package."""

from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from trainshed.cli.commands import (
    audit,
    backup,
    check_model,
    checkpoints,
    doctor,
    init,
    jobs,
    keys,
    local,
    nodes,
    runs,
    watch,
    webhooks,
    weights,
)
from trainshed.cli.exit_codes import EPILOG

_OF_OTHER_TOOLS = {
    "ls": "ps",
    "list": "ps",
    "jobs": "ps",
    "queue": "ps",
    "get": "show",
    "status": "show",
    "top": "watch",
    "run": "submit",
    "launch": "submit",
    "create": "submit",
    "log": "logs",
    "stop": "cancel",
    "kill": "cancel",
    "delete": "rm",
    "remove": "rm",
    "start": "up",
    "compare": "diff",
    "convert": "weights convert",
    "login": "whoami",
}
"""Commands that other tools have, and ours for the same purpose."""


class Commands(TyperGroup):
    """All commands. Errors of their options do not contain the prefix of pydantic, which typer uses."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that the arguments name. Raises a usage error, with the command that they may mean."""
        meant = _OF_OTHER_TOOLS.get(args[0]) if args else None
        if meant is not None and not ctx.resilient_parsing:
            ctx.fail(f"No such command {args[0]!r}. Did you mean {meant!r}?")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command that the arguments name."""
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            error.message = error.message.removeprefix("Value error, ")
            raise


app = typer.Typer(
    cls=Commands, no_args_is_help=True, help="Distributed training jobs that survive faults.", epilog=EPILOG
)


def _show_version(*, asked: bool) -> None:
    if asked:
        typer.echo(f"trainshed {version('trainshed')}")
        raise typer.Exit


@app.callback()
def _main(
    *,
    _: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=lambda asked: _show_version(asked=asked),
            is_eager=True,
            help="Show the version and exit.",
        ),
    ] = False,
) -> None:
    """Take options that belong to no command."""


_PANELS = {
    "Service": (local.up, local.down, local.serve, doctor.doctor, nodes.nodes, backup.backup, backup.restore),
    "Specs": (init.init, init.schema, check_model.check_model),
    "Jobs": (
        *(jobs.submit, jobs.plan, jobs.ps, jobs.show, watch.watch),
        *(jobs.pause, jobs.resume, jobs.cancel, jobs.clone, jobs.rm),
    ),
    "Runs": (runs.logs, runs.metrics, runs.events, runs.describe, runs.results, runs.diff),
    "Checkpoints": (checkpoints.checkpoints, checkpoints.verify, checkpoints.pin, checkpoints.export),
    "Access": (keys.whoami, audit.audit, audit.usage),
}
app.command("import", rich_help_panel="Specs")(init.import_)
for _panel, _verbs in _PANELS.items():
    for _verb in _verbs:
        app.command(rich_help_panel=_panel)(_verb)
app.add_typer(weights.app, name="weights", rich_help_panel="Specs")
app.add_typer(keys.app, name="keys", rich_help_panel="Access")
app.add_typer(webhooks.app, name="webhooks", rich_help_panel="Access")


if __name__ == "__main__":
    app()
