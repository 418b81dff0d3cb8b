"""The `trainshed` command: one short function per verb, in the other modules of this package."""

import typer

from trainshed.cli.commands import (
    audit,
    backup,
    checkpoints,
    diff,
    doctor,
    init,
    jobs,
    keys,
    local,
    nodes,
    runs,
    schema,
    usage,
    watch,
    webhooks,
)
from trainshed.cli.exit_codes import EPILOG

app = typer.Typer(no_args_is_help=True, help="Distributed training jobs that survive faults.", epilog=EPILOG)

_PANELS = {
    "Service": (local.up, local.down, local.serve, doctor.doctor, nodes.nodes, backup.backup, backup.restore),
    "Specs": (init.init, schema.schema),
    "Jobs": (
        *(jobs.submit, jobs.plan, jobs.ps, jobs.show, watch.watch),
        *(jobs.pause, jobs.resume, jobs.cancel, jobs.clone, jobs.rm),
    ),
    "Runs": (runs.logs, runs.metrics, runs.events, diff.diff),
    "Checkpoints": (checkpoints.checkpoints, checkpoints.verify, checkpoints.pin, checkpoints.export),
    "Access": (keys.whoami, audit.audit, usage.usage),
}
for _panel, _verbs in _PANELS.items():
    for _verb in _verbs:
        app.command(rich_help_panel=_panel)(_verb)
app.add_typer(keys.app, name="keys", rich_help_panel="Access")
app.add_typer(webhooks.app, name="webhooks", rich_help_panel="Access")


if __name__ == "__main__":
    app()
