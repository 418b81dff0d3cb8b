"""`python -m train_loop.ray_train.driver --run-dir DIR --attempt N`: one attempt of a job, as a Ray job's entrypoint.

Prepares the data, runs the worker group, restarts it after faults and writes the result to outcome.json.
Slow imports follow the request for worker processes.
"""

import argparse
import itertools
import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NoReturn

import ray

from train_loop.errors import FencedError, MemoryRanOutError, RunEndedError, VersionSkewError
from train_loop.faults.failure import failed, from_ranks, reason
from train_loop.liveness.fencing import NewestEpoch
from train_loop.liveness.stops import StopWatch
from train_loop.ray_train.prestart import start_ahead
from train_loop.run_dir import (
    NODE_NAME_VARIABLE,
    SERVICE_VERSION_VARIABLE,
    AttemptDir,
    Outcome,
    RunDir,
    expect_run_dir,
    own_version,
    storage_failed,
    storage_may_fail,
)
from train_loop.sinks.forward import Forwarders, forward
from train_loop.spec import JobSpec
from train_loop.system.exit import leave
from train_loop.system.gc import no_automatic_collection
from train_loop.system.ray_env import Environment, worker_environment
from train_loop.system.retry import retry_storage
from train_loop.system.signals import SignalPipe
from train_loop.telemetry.event_log import EventLog, last_loss, last_word, moves, newest_hosts, preempted_ranks
from train_loop.telemetry.logs import log_to

log = logging.getLogger("train_loop.ray_train.driver")
_SHUTDOWN_SECONDS = 10.0
_CATCH_UP_SECONDS, _CLOSE_SECONDS, _END_SECONDS, _SIGNAL_SECONDS = 2.0, 30.0, 30.0, 0.1

# Ray Train detects a dead worker within about this many seconds; its default is 2.
os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "1")
# A drained node may disappear within 30 s; Ray's default is 5.
os.environ.setdefault("RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S", "1")


def main() -> None:
    """Run one attempt to its end and acknowledge it."""
    signals = SignalPipe()
    parser = argparse.ArgumentParser(prog="python -m train_loop.ray_train.driver", description=__doc__)
    parser.add_argument("--run-dir", required=True, metavar="DIR")
    parser.add_argument("--attempt", required=True, type=int, metavar="N")
    arguments = parser.parse_args()
    run_dir = RunDir.at(arguments.run_dir)
    expect_run_dir(run_dir.root)
    attempt = run_dir.attempt(arguments.attempt)
    retry_storage(partial(log_to, attempt.driver_log))
    journal = EventLog(attempt, epoch=NewestEpoch(run_dir, attempt.number))
    journal.event("attempt_started", **head_node())
    sinks = forward(run_dir, attempt.number, journal.event, os.environ)
    finish = partial(_finish, attempt, journal, sinks)
    watch = StopWatch(
        run_dir,
        attempt,
        report=journal.event,
        wait=signals.wait,
        end=partial(finish, disconnects=False),
    )
    watch.start()
    outcome = run_attempt(run_dir, attempt, journal, connected=signals.install, ended=watch.close)
    finish(outcome, disconnects=True)


def _finish(
    attempt: AttemptDir, journal: EventLog, sinks: Forwarders, outcome: Outcome, *, disconnects: bool
) -> NoReturn:
    """Acknowledge the end of the attempt, and exit, which ends its workers.

    Set `disconnects` only if no thread waits for Ray Train: Ray crashes a process in which one does so meanwhile.
    If that happens, the service takes the event `finished` for the outcome.
    """
    journal.event("finished", **outcome.model_dump(exclude_none=True))
    if disconnects:
        _disconnect()
    # The sinks should have the last metrics before the outcome appears.
    sinks.catch_up(seconds=_CATCH_UP_SECONDS)
    acknowledge(attempt, journal, outcome)
    sinks.close(outcome, seconds=_CLOSE_SECONDS)
    leave(1 if outcome.result == "failed" else 0)


def head_node() -> dict[str, str]:
    """Return the name of the Kubernetes node that this driver runs on, if the chart has made the head."""
    name = os.environ.get(NODE_NAME_VARIABLE)
    return {"node": name} if name else {}


def expect_version(service: str | None) -> None:
    """Raise VersionSkewError if the driver's version differs from the service's; None skips the check."""
    own = own_version()
    if service is not None and service != own:
        raise VersionSkewError(
            f"the service runs Trainshed {service} and the cluster {own}; install the same version on both: the job is "
            "retried until they match"
        )


def a_home() -> dict[str, str]:
    """Set HOME and return it for the job's other processes, if this user has no home directory.

    A container's user may have none, and then `ray.train` cannot be imported.
    """
    try:
        Path.home()
    except RuntimeError:
        os.environ["HOME"] = tempfile.gettempdir()
        return {"HOME": os.environ["HOME"]}
    return {}


def acknowledge(attempt: AttemptDir, journal: EventLog, outcome: Outcome) -> None:
    """Write all events, then the outcome, with retries for storage. Log the outcome if it cannot be written."""
    try:
        with storage_may_fail(partial(log.warning, "the last events could not be written: %s")):
            retry_storage(journal.flush)
        retry_storage(partial(attempt.write_outcome, outcome), may_pass=storage_failed)
    except BaseException:
        log.error("the outcome could not be written: %s", outcome.model_dump_json(exclude_none=True))
        raise


def run_attempt(
    run_dir: RunDir,
    attempt: AttemptDir,
    journal: EventLog,
    *,
    connected: Callable[[], None] = lambda: None,
    ended: Callable[[], None] = lambda: None,
) -> Outcome:
    """Prepare and train. Return an outcome in all cases, also after an exception.

    `connected` is called once Ray has set its signal handlers. `ended` is called at the end of training; if the attempt
    is being stopped, it does not return.
    """
    try:
        try:
            return _prepare_and_train(run_dir, attempt, journal, connected)
        finally:
            ended()
    except Exception as error:
        if (outcome := _trained(attempt)) is not None:
            # The workers had finished: only cleanup failed.
            log.warning("cleanup failed after training had ended: %s", reason(error))
            return outcome
        outcome = _with_cause(failed(error), attempt) if from_ranks(error) else failed(error)
        # The log of a rank contains the traceback of its error.
        log.error("the attempt failed: %s", outcome.reason, exc_info=None if from_ranks(error) else error)
        return outcome


def _prepare_and_train(
    run_dir: RunDir, attempt: AttemptDir, journal: EventLog, connected: Callable[[], None]
) -> Outcome:
    if (early := retry_storage(partial(_early_outcome, run_dir, attempt))) is not None:
        return early
    expect_version(os.environ.get(SERVICE_VERSION_VARIABLE))
    connect(connected)
    # What the driver does is the same for all kinds of jobs.
    spec = retry_storage(lambda: attempt.spec(run_dir.spec())).run
    environment = _environment(spec)
    if environment:
        start_ahead(spec.scaling, environment, group=spec.strategy.peers, whole=spec.strategy.whole_group)
    with no_automatic_collection():
        from train_loop.ray_train.trainer import prepare_samples, trainer  # noqa: PLC0415 - it takes seconds

    prepare_samples(spec, run_dir, journal)
    for start in itertools.count(1):
        _fit(trainer(spec, run_dir, attempt, environment, start=start).fit)
        end = retry_storage(partial(last_word, attempt))
        if end is not None:
            return Outcome.model_validate(end)
        if retry_storage(partial(moves, attempt)) < start:
            raise RuntimeError("the ranks ended without an outcome; see their logs in the folder of this log")
        if retry_storage(run_dir.spec).scaling.elastic:
            # The service may have to choose another number of workers.
            return Outcome(result="moved", reason="hosts will be preempted")
        ranks, hosts = preempted_ranks(attempt), newest_hosts(attempt)
        left = sorted({hosts[str(rank)] for rank in ranks if str(rank) in hosts})
        journal.event("moving", ranks=ranks, hosts=left)
    raise AssertionError("unreachable")


def connect(connected: Callable[[], None]) -> None:
    """Connect to Ray, and call `connected`. Raises SystemExit if the stop watch does not end the process on SIGTERM."""
    # Each rank has its own log file; the driver's log need not repeat it.
    home = {"env_vars": a_home()}
    try:
        ray.init(address="auto", runtime_env=home, logging_level=logging.WARNING, log_to_driver=False)
    except SystemExit:
        # Ray's own handler raised it. The stop watch has got the signal, too.
        deadline = time.monotonic() + _END_SECONDS
        while time.monotonic() < deadline:
            # Until Ray's handler is replaced, another signal may raise again.
            with suppress(SystemExit):
                connected()
                time.sleep(_SIGNAL_SECONDS)
        raise
    connected()


def _fit(fit: Callable[[], object]) -> None:
    """Wait for Ray Train. RunEndedError is not a failure: an earlier worker group has ended the run."""
    from ray.train import ControllerError  # noqa: PLC0415 - it takes seconds

    try:
        _wait_for(fit)
    except ControllerError as error:
        if not isinstance(error.controller_failure, RunEndedError):
            raise


def _trained(attempt: AttemptDir) -> Outcome | None:
    """Return the outcome in the event of the workers' end; None without one, or if it is a failure."""
    try:
        end = last_word(attempt)
        outcome = None if end is None else Outcome.model_validate(end)
    except Exception as error:
        log.warning("the workers' events cannot be read: %s", error)
        return None
    return None if outcome is None or outcome.result == "failed" else outcome


def _with_cause(outcome: Outcome, attempt: AttemptDir) -> Outcome:
    """Replace the reason by that of the newest `workers_lost` event, which names the dead ranks.

    Ray Train reports the errors of all ranks. Most ranks only lost the connection to the dead one.
    """
    with storage_may_fail(partial(log.warning, "the loss of ranks cannot be read: %s")):
        loss = last_loss(attempt)
        if loss is not None and loss.get("cause") != "error" and outcome.code == "worker_failure":
            survivors = f" ({loss['survivors']})" if loss.get("survivors") else ""
            codes = {"out_of_memory": MemoryRanOutError.code, "hung": "hung"}
            code = codes.get(str(loss.get("cause")), outcome.code)
            return outcome.model_copy(update={"code": code, "reason": f"{loss['error']}{survivors}"})
    return outcome


def _disconnect() -> None:
    """Disconnect from Ray, which kills the workers: the outcome is written only after they are gone."""
    try:
        if ray.is_initialized():
            _wait_for(ray.shutdown, seconds=_SHUTDOWN_SECONDS)
    except Exception as error:
        log.warning("the driver could not disconnect from Ray: %s", error)


def _early_outcome(run_dir: RunDir, attempt: AttemptDir) -> Outcome | None:
    """Return the outcome of an attempt that was stopped or superseded before it began, else None."""
    newer = run_dir.fence().attempt
    if newer > attempt.number:
        return failed(FencedError(f"attempt {newer} has taken over before this one began"))
    stop = run_dir.stop(attempt=attempt.number)
    return None if stop is None else Outcome(result=stop.result, reason="stopped before its driver had started")


def _wait_for(call: Callable[[], object], *, seconds: float | None = None) -> None:
    """Run `call` in another thread and wait for it, at most `seconds`. Raises what `call` raises.

    In the main thread Ray Train would handle SIGINT itself, and wait forever if the cluster has no room for workers.
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
