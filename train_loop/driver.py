"""`python -m train_loop.driver --run-dir DIR --attempt N`: one attempt at a job, as a Ray job's entrypoint.

Prepares the data, runs the worker group and restarts it after faults, and says in outcome.json how it ended.
What takes seconds to import comes once the cluster has been asked for processes.
"""

import argparse
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress

import ray

from train_loop.errors import FencedError
from train_loop.failure import failed
from train_loop.journal import Journal, last_word
from train_loop.leave import leave
from train_loop.logs import log_to
from train_loop.run_dir import AttemptDir, Outcome, RunDir
from train_loop.sinks.forward import forward
from train_loop.spare import Environment, start_ahead, worker_environment
from train_loop.spec import JobSpec

log = logging.getLogger(__name__)
_SHUTDOWN_SECONDS = 10.0
_CATCH_UP_SECONDS, _CLOSE_SECONDS = 2.0, 30.0

# A dead worker is noticed within about this many seconds; Ray's default is 2.
os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "1")
# A node that is drained may be gone in half a minute; Ray's default is 5.
os.environ.setdefault("RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S", "1")


def main() -> None:
    """Run one attempt to its end and acknowledge it."""
    parser = argparse.ArgumentParser(prog="python -m train_loop.driver", description=__doc__)
    parser.add_argument("--run-dir", required=True, metavar="DIR")
    parser.add_argument("--attempt", required=True, type=int, metavar="N")
    arguments = parser.parse_args()
    run_dir = RunDir.at(arguments.run_dir)
    attempt = run_dir.attempt(arguments.attempt)
    log_to(attempt.driver_log)
    journal = Journal(attempt)
    journal.event("attempt_started")
    sinks = forward(run_dir, attempt.number, journal.event, os.environ)
    outcome = run_attempt(run_dir, attempt, journal)
    journal.event("finished", **outcome.model_dump(exclude_none=True))
    with suppress(KeyboardInterrupt):
        # Whoever sees the outcome should find the last numbers too; who cannot wait for them need not.
        sinks.catch_up(seconds=_CATCH_UP_SECONDS)
    attempt.write_outcome(outcome)
    with suppress(KeyboardInterrupt):
        sinks.close(outcome, seconds=_CLOSE_SECONDS)
    leave(1 if outcome.result == "failed" else 0)


def run_attempt(run_dir: RunDir, attempt: AttemptDir, journal: Journal) -> Outcome:
    """Prepare and train; whatever happens becomes an outcome."""
    try:
        if (early := _asked_early(run_dir, attempt)) is not None:
            return early
        ray.init(address="auto", logging_level=logging.WARNING)
        spec = attempt.spec(run_dir.spec())
        environment = _environment(spec)
        if environment:
            start_ahead(spec.scaling, environment, group=spec.strategy.ulysses_size)
        from train_loop.attempt import prepare_samples, trainer  # noqa: PLC0415 - it takes seconds

        prepare_samples(spec, run_dir, journal)
        _wait_for(trainer(spec, run_dir, attempt, environment).fit)
        end = last_word(attempt)
        if end is None:
            raise RuntimeError("the workers ended without saying how; their logs lie beside this one")
        return Outcome.model_validate(end)
    except KeyboardInterrupt:
        stop = run_dir.stop(attempt=attempt.number)
        if stop is not None:
            return Outcome(result=stop.result, reason="ended without a last checkpoint, because its time was up")
        return Outcome(result="failed", code="interrupted", reason="the driver was interrupted", retryable=True)
    except Exception as error:
        log.exception("the attempt failed")
        return failed(error)
    finally:
        # An outcome says that the workers are gone; a cluster that is stuck is not waited for.
        _wait_for(ray.shutdown, seconds=_SHUTDOWN_SECONDS)


def _asked_early(run_dir: RunDir, attempt: AttemptDir) -> Outcome | None:
    """How an attempt ends that nobody waits for any more: it was asked to stop, or replaced, before it began."""
    if run_dir.fence() > attempt.number:
        return failed(FencedError(f"attempt {run_dir.fence()} has taken over before this one began"))
    stop = run_dir.stop(attempt=attempt.number)
    return Outcome(result=stop.result) if stop is not None else None


def _wait_for(call: Callable[[], object], *, seconds: float | None = None) -> None:
    """Call it in another thread, and wait for its end, at most so long; what it raises is raised.

    In the main thread Ray Train would take SIGINT for itself, and wait for ever where there is no room for its workers.
    """
    ended = Future[object]()

    def run() -> None:
        try:
            ended.set_result(call())
        except BaseException as error:
            ended.set_exception(error)

    threading.Thread(target=run, name=call.__name__, daemon=True).start()
    with suppress(TimeoutError):
        ended.result(timeout=seconds)


def _environment(spec: JobSpec) -> Environment:
    cpus = spec.scaling.resources_per_worker.get("CPU", 1)
    return worker_environment(cpus=cpus) if spec.failure.spare_workers else {}


if __name__ == "__main__":
    main()
