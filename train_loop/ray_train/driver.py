"""`python -m train_loop.ray_train.driver --run-dir DIR --attempt N`: one attempt at a job, as a Ray job's entrypoint.

Prepares the data, runs the worker group and restarts it after faults, and says in outcome.json how it ended.
What takes seconds to import comes once the cluster has been asked for processes.
"""

import argparse
import itertools
import logging
import os
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path

import ray

from train_loop.errors import FencedError, MemoryRanOutError, RunEndedError, VersionSkewError
from train_loop.faults.failure import failed, from_ranks, reason
from train_loop.liveness.fencing import NewestEpoch
from train_loop.ray_train.prestart import Environment, start_ahead, worker_environment
from train_loop.run_dir import (
    SERVICE_VERSION_VARIABLE,
    AttemptDir,
    Outcome,
    RunDir,
    Stop,
    expect_run_dir,
    own_version,
    storage_failed,
    storage_may_fail,
)
from train_loop.sinks.forward import forward
from train_loop.spec import JobSpec
from train_loop.system.exit import leave
from train_loop.system.gc import no_automatic_collection
from train_loop.system.retry import retry_storage
from train_loop.telemetry.event_log import Journal, last_loss, last_word, moves, newest_hosts, preempted_ranks
from train_loop.telemetry.logs import log_to

log = logging.getLogger(__name__)
_SHUTDOWN_SECONDS = 10.0
_CATCH_UP_SECONDS, _CLOSE_SECONDS = 2.0, 30.0

# A dead worker is noticed within about this many seconds; Ray's default is 2.
os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "1")
# A node that is drained may be gone in half a minute; Ray's default is 5.
os.environ.setdefault("RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S", "1")


def main() -> None:
    """Run one attempt to its end and acknowledge it."""
    parser = argparse.ArgumentParser(prog="python -m train_loop.ray_train.driver", description=__doc__)
    parser.add_argument("--run-dir", required=True, metavar="DIR")
    parser.add_argument("--attempt", required=True, type=int, metavar="N")
    arguments = parser.parse_args()
    run_dir = RunDir.at(arguments.run_dir)
    expect_run_dir(run_dir.root)
    attempt = run_dir.attempt(arguments.attempt)
    retry_storage(partial(log_to, attempt.driver_log))
    journal = Journal(attempt, epoch=NewestEpoch(run_dir, attempt.number))
    journal.event("attempt_started")
    sinks = forward(run_dir, attempt.number, journal.event, os.environ)
    outcome = run_attempt(run_dir, attempt, journal)
    journal.event("finished", **outcome.model_dump(exclude_none=True))
    with suppress(KeyboardInterrupt):
        # Whoever sees the outcome should find the last numbers too; who cannot wait for them need not.
        sinks.catch_up(seconds=_CATCH_UP_SECONDS)
    acknowledge(attempt, journal, outcome)
    with suppress(KeyboardInterrupt):
        sinks.close(outcome, seconds=_CLOSE_SECONDS)
    leave(1 if outcome.result == "failed" else 0)


def expect_version(service: str | None) -> None:
    """Raise VersionSkewError unless this driver has the version of the service, which None leaves open."""
    own = own_version()
    if service is not None and service != own:
        raise VersionSkewError(
            f"the service runs Trainshed {service} and the cluster {own}; install the same version on both: the job is "
            "tried again until they match"
        )


def a_home() -> dict[str, str]:
    """Return the variable HOME for the processes of this job, if this one has no home; it is set here as well.

    A container's user has none unless somebody says so, and then `ray.train` cannot be imported.
    """
    try:
        Path.home()
    except RuntimeError:
        os.environ["HOME"] = tempfile.gettempdir()
        return {"HOME": os.environ["HOME"]}
    return {}


def acknowledge(attempt: AttemptDir, journal: Journal, outcome: Outcome) -> None:
    """Write all events, then the outcome, retrying while storage is away. Log the outcome if it cannot be written."""
    try:
        with storage_may_fail(partial(log.warning, "the last events could not be written: %s")):
            retry_storage(journal.flush)
        retry_storage(partial(attempt.write_outcome, outcome), may_pass=storage_failed)
    except BaseException:
        log.error("the outcome could not be written: %s", outcome.model_dump_json(exclude_none=True))
        raise


def run_attempt(run_dir: RunDir, attempt: AttemptDir, journal: Journal) -> Outcome:
    """Prepare and train; whatever happens becomes an outcome."""
    try:
        if (early := retry_storage(partial(_asked_early, run_dir, attempt))) is not None:
            return early
        expect_version(os.environ.get(SERVICE_VERSION_VARIABLE))
        # The logs of ranks lie beside the driver's: it need not repeat them.
        home = {"env_vars": a_home()}
        ray.init(address="auto", runtime_env=home, logging_level=logging.WARNING, log_to_driver=False)
        spec = retry_storage(lambda: attempt.spec(run_dir.spec()))
        environment = _environment(spec)
        if environment:
            start_ahead(spec.scaling, environment, group=spec.strategy.ulysses_size)
        with no_automatic_collection():
            from train_loop.ray_train.trainer import prepare_samples, trainer  # noqa: PLC0415 - it takes seconds

        prepare_samples(spec, run_dir, journal)
        for start in itertools.count(1):
            _fit(trainer(spec, run_dir, attempt, environment, start=start).fit)
            end = retry_storage(partial(last_word, attempt))
            if end is not None:
                return Outcome.model_validate(end)
            if retry_storage(partial(moves, attempt)) < start:
                raise RuntimeError("the ranks ended without an outcome; their logs are beside this one")
            if retry_storage(run_dir.spec).scaling.elastic:
                # The service may have to choose another size.
                return Outcome(result="moved", reason="hosts are about to be taken away")
            ranks, hosts = preempted_ranks(attempt), newest_hosts(attempt)
            left = sorted({hosts[str(rank)] for rank in ranks if str(rank) in hosts})
            journal.event("moving", ranks=ranks, hosts=left)
        raise AssertionError("unreachable")
    except KeyboardInterrupt:
        stop = _asked(run_dir, attempt)
        if stop is not None:
            return Outcome(result=stop.result, reason="ended without a last checkpoint, because its time was up")
        return Outcome(result="failed", code="interrupted", reason="the driver was interrupted", retryable=True)
    except Exception as error:
        if (outcome := _trained(attempt)) is not None:
            # What fails after the workers have finished is cleanup.
            log.warning("cleanup failed after training had ended: %s", reason(error))
            return outcome
        # The traceback of an error in a rank is in that rank's log.
        log.error("the attempt failed: %s", reason(error), exc_info=None if from_ranks(error) else error)
        return _with_cause(failed(error), attempt) if from_ranks(error) else failed(error)
    finally:
        _disconnect()


def _fit(fit: Callable[[], object]) -> None:
    """Wait for Ray Train. It is no failure that an earlier worker group has ended the run."""
    from ray.train import ControllerError  # noqa: PLC0415 - it takes seconds

    try:
        _wait_for(fit)
    except ControllerError as error:
        if not isinstance(error.controller_failure, RunEndedError):
            raise


def _trained(attempt: AttemptDir) -> Outcome | None:
    """Return how training ended if it did not fail, by the workers' own event."""
    try:
        end = last_word(attempt)
        outcome = None if end is None else Outcome.model_validate(end)
    except Exception as error:
        log.warning("the workers' events cannot be read: %s", error)
        return None
    return None if outcome is None or outcome.result == "failed" else outcome


def _with_cause(outcome: Outcome, attempt: AttemptDir) -> Outcome:
    """Return an outcome whose reason is that of the newest event that names the ranks which died.

    Ray Train reports what the ranks raised, of which most only lost the connection to the one that died.
    """
    with storage_may_fail(partial(log.warning, "the loss of ranks cannot be read: %s")):
        loss = last_loss(attempt)
        if loss is not None and loss.get("cause") != "error" and outcome.code == "worker_failure":
            survivors = f" ({loss['survivors']})" if loss.get("survivors") else ""
            code = MemoryRanOutError.code if loss.get("cause") == "out_of_memory" else outcome.code
            return outcome.model_copy(update={"code": code, "reason": f"{loss['error']}{survivors}"})
    return outcome


def _disconnect() -> None:
    """Leave the cluster, so that an outcome implies that the workers are gone; a stuck cluster is not waited for."""
    try:
        _wait_for(ray.shutdown, seconds=_SHUTDOWN_SECONDS)
    except Exception as error:
        log.warning("the driver could not disconnect from Ray: %s", error)


def _asked_early(run_dir: RunDir, attempt: AttemptDir) -> Outcome | None:
    """How an attempt ends that nobody waits for any more: it was asked to stop, or replaced, before it began."""
    newer = run_dir.fence().attempt
    if newer > attempt.number:
        return failed(FencedError(f"attempt {newer} has taken over before this one began"))
    stop = run_dir.stop(attempt=attempt.number)
    return Outcome(result=stop.result) if stop is not None else None


def _asked(run_dir: RunDir, attempt: AttemptDir) -> Stop | None:
    """Return what the service asks for; None if it asks for nothing or storage is away: there is no time to wait."""
    try:
        return run_dir.stop(attempt=attempt.number)
    except Exception as error:
        log.warning("why the driver was interrupted cannot be read: %s", error)
        return None


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
