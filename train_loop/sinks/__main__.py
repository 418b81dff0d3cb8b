"""`python -m train_loop.sinks RUN_DIR --sink tensorboard`: hand a run's metrics to a sink, from where that was left."""

import argparse
import sys
import time
from functools import partial

from train_loop.errors import UserError
from train_loop.run_dir import SINKS, Outcome, RunDir, SinkName
from train_loop.sinks.cursor import Handover
from train_loop.sinks.registry import open_sink

_EVERY_SECONDS = 1.0


def main() -> None:
    """Hand over what there is; with --follow, what comes too, until it is interrupted."""
    parser = argparse.ArgumentParser(prog="python -m train_loop.sinks", description=__doc__)
    parser.add_argument("run_dir", metavar="RUN_DIR", help="a path, or a URI such as s3://bucket/runs/default/job-…")
    parser.add_argument("--sink", choices=SINKS, default="tensorboard", help="default: %(default)s")
    parser.add_argument("--follow", action="store_true", help="go on with what comes, until Ctrl-C")
    arguments = parser.parse_args()
    try:
        hand_over(RunDir.at(arguments.run_dir), arguments.sink, follow=arguments.follow)
    except FileNotFoundError as error:
        sys.exit(f"{arguments.run_dir} is no run directory ({error}); name the folder in which spec.json lies")
    except (UserError, ValueError) as error:
        sys.exit(str(error))


def hand_over(run_dir: RunDir, name: SinkName, *, follow: bool) -> None:
    """Hand over what there is, or what comes too. Raises UserError, FileNotFoundError, and what the sink raises."""
    run_dir.spec()
    handover = Handover(run_dir, name, partial(open_sink, name, run_dir))
    try:
        handover.hand_over()
        while follow:
            time.sleep(_EVERY_SECONDS)
            handover.hand_over()
    except KeyboardInterrupt:
        # How one who follows is told to stop.
        follow = False
    finally:
        handover.close(_outcome(run_dir))


def _outcome(run_dir: RunDir) -> Outcome | None:
    """How the newest attempt ended, if it has."""
    attempts = run_dir.attempts()
    return attempts[-1].outcome() if attempts else None


if __name__ == "__main__":
    main()
