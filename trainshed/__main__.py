"""The `trainshed` command, also as `python -m trainshed`."""

import importlib
import sys

from train_loop.extras import install


def main() -> None:
    """Run the command. Without its libraries, print how to install them, and exit with 1."""
    try:
        command = importlib.import_module("trainshed.cli.main")
    except ModuleNotFoundError as error:
        # One of our own modules is missing: a fault of the installation, for which the traceback is right.
        if (error.name or "").partition(".")[0] in ("trainshed", "service", "train_loop"):
            raise
        sys.exit(
            f"trainshed: the command is not installed ({error.name} is missing); run {install('typer')} for a service "
            f"on another machine, or {install('uvicorn')} to run one here"
        )
    command.app(prog_name="trainshed")


if __name__ == "__main__":
    main()
