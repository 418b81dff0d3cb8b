"""`python -m trainshed`: the `trainshed` command."""

from trainshed.cli.main import app

app(prog_name="trainshed")
