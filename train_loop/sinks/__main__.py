"""`python -m train_loop.sinks RUN_DIR --sink tensorboard`: send a run's metrics to a sink, from its last position."""

import argparse
import sys
import time
from functools import partial

from train_loop.errors import UserError
from train_loop.run_dir import SINKS, Outcome, RunDir, SinkName
from train_loop.sinks.cursor import SinkCursor
from train_loop.sinks.registry import open_sink

_EVERY_SECONDS = 1.0


def main() -> None:
    """Send the metrics of a run directory to a sink; with --follow, send new metrics until interrupted."""
    parser = argparse.ArgumentParser(prog="python -m train_loop.sinks", description=__doc__)
    parser.add_argument(
        "run_dir", metavar="RUN_DIR", help="run directory: a path, or a URI such as s3://bucket/runs/default/job-…"
    )
    parser.add_argument("--sink", choices=SINKS, default="tensorboard", help="sink to send metrics to [%(default)s]")
    parser.add_argument("--follow", action="store_true", help="send new metrics until Ctrl-C")
    arguments = parser.parse_args()
    try:
        hand_over(RunDir.at(arguments.run_dir), arguments.sink, follow=arguments.follow)
    except FileNotFoundError as error:
        sys.exit(f"{arguments.run_dir} is not a run directory ({error}); name the folder that contains spec.json")
    except (UserError, ValueError) as error:
        sys.exit(str(error))


def hand_over(run_dir: RunDir, name: SinkName, *, follow: bool) -> None:
    """Send a run's metrics to a sink, once or until Ctrl-C. Raises UserError, FileNotFoundError and any sink error."""
    run_dir.spec()
    handover = SinkCursor(run_dir, name, partial(open_sink, name, run_dir))
    try:
        handover.hand_over()
        while follow:
            time.sleep(_EVERY_SECONDS)
            handover.hand_over()
    except KeyboardInterrupt:
        # Ctrl-C is the normal end of --follow.
        follow = False
    finally:
        handover.close(_outcome(run_dir))


def _outcome(run_dir: RunDir) -> Outcome | None:
    """Return the outcome of the newest attempt; None if it has none yet."""
    attempts = run_dir.attempts()
    return attempts[-1].outcome() if attempts else None


if __name__ == "__main__":
    main()
