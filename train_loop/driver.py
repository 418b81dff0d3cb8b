"""`python -m train_loop.driver --run-dir DIR --attempt N`: one attempt at a job, as a Ray job's entrypoint.

Prepares the data, runs the worker group and restarts it after faults, and says in outcome.json how it ended.
"""

import argparse
import logging
import math
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from fsspec.core import url_to_fs
from pyarrow.fs import FSSpecHandler, PyFileSystem
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

from train_loop.controller import TellOfLosses, last_word, work
from train_loop.data.cache import evaluation_spec, pin, pinned_dataset
from train_loop.data.dataset import Dataset
from train_loop.data.prepare import prepare
from train_loop.errors import FencedError
from train_loop.failure import failed
from train_loop.journal import Journal
from train_loop.leave import leave
from train_loop.logs import log_to
from train_loop.run_dir import AttemptDir, Outcome, RunDir, is_remote
from train_loop.sinks.forward import forward
from train_loop.spare import worker_environment
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
        _prepare(spec, run_dir, journal)
        fit(spec, run_dir, attempt)
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


def _prepare(spec: JobSpec, run_dir: RunDir, journal: Journal) -> None:
    """Have the samples of the run ready, to train on and to evaluate on: those that its first attempt prepared."""
    dataset = _dataset(spec, run_dir.data, run_dir.cache, journal)
    numbers = {
        "dataset": dataset.fingerprint,
        "samples": dataset.samples,
        "tokens": dataset.tokens,
        "utilisation": round(dataset.utilisation, 4),
        "rows": sum(part.rows for part in dataset.parts),
        "bad_rows": sum(part.bad_rows for part in dataset.parts),
        "sources": [
            {
                "path": ", ".join(source.paths),
                "dataset": part.fingerprint,
                "rows": part.rows,
                "samples": part.samples,
                "tokens": part.tokens,
                "utilisation": round(part.tokens / (part.samples * dataset.sequence_length), 4),
            }
            for source, part in zip(spec.data.sources, dataset.parts, strict=True)
        ],
    }
    other = evaluation_spec(spec, dataset)
    if other is not None:
        evaluation = _dataset(other, run_dir.eval_data, run_dir.cache, journal)
        numbers |= {"eval_dataset": evaluation.fingerprint, "eval_samples": evaluation.samples}
    journal.event("prepared", **numbers)


def _dataset(spec: JobSpec, pointer: Path, cache: Path, journal: Journal) -> Dataset:
    dataset = pinned_dataset(spec, pointer)
    if dataset is None:
        dataset = prepare(spec, cache, journal.event)
        pin(dataset, pointer)
    return dataset


def fit(spec: JobSpec, run_dir: RunDir, attempt: AttemptDir) -> None:
    """Run the worker group, started again after faults up to failure.max_failures times."""
    resources = spec.scaling.resources_per_worker
    trainer = TorchTrainer(
        work,
        train_loop_config={"run_dir": str(run_dir.root), "attempt": attempt.number},
        torch_config=TorchConfig(
            backend="cpu:gloo,cuda:nccl" if resources.get("GPU") else "gloo",
            timeout_s=math.ceil(spec.failure.hang_timeout_seconds),
        ),
        scaling_config=ScalingConfig(
            num_workers=spec.scaling.world,
            use_gpu=bool(resources.get("GPU")),
            resources_per_worker=resources,
            placement_strategy=spec.scaling.placement_strategy,
        ),
        run_config=RunConfig(
            # A name of its own for every attempt: two drivers under one name would share Ray's bookkeeping.
            name=f"{spec.name} ({run_dir.root.name}-{attempt.number})",
            **_storage(attempt.ray),
            failure_config=FailureConfig(max_failures=spec.failure.max_failures),
            callbacks=[TellOfLosses(attempt)],
            worker_runtime_env=_environment(spec),
        ),
    )
    _wait_for(trainer.fit)


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


def _storage(folder: Path) -> dict[str, Any]:
    """Where Ray Train keeps books of its own."""
    if not is_remote(folder):
        return {"storage_path": str(folder)}
    system, path = url_to_fs(str(folder))
    return {"storage_path": path, "storage_filesystem": PyFileSystem(FSSpecHandler(system))}


def _environment(spec: JobSpec) -> dict[str, Any]:
    cpus = spec.scaling.resources_per_worker.get("CPU", 1)
    return dict(worker_environment(cpus=cpus)) if spec.failure.spare_workers else {}


if __name__ == "__main__":
    main()
