"""`torchrun --nproc-per-node N -m train_loop.run SPEC.yaml --run-dir DIR`: the same loop without Ray and service.

A repeated run on the same DIR resumes from the newest valid checkpoint.
"""

import argparse
import logging
import math
import os
import signal
import sys
import threading
import uuid
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from train_loop.code.use import keep_code, with_own_code
from train_loop.data.prepare.cache import evaluation_spec, find_dataset
from train_loop.data.prepare.pointer import as_begun, as_in_parent, pin, pinned_dataset
from train_loop.data.stream.local import local_stream
from train_loop.errors import FencedError, UserError
from train_loop.faults.failure import USER_ERRORS, failed, report_failure
from train_loop.kinds import WORK
from train_loop.liveness.fencing import begin_group, check_fence, fence_watched
from train_loop.loop.session import Session
from train_loop.model.lora.peft_config import with_adapter
from train_loop.model.sentence.rule import rule_problems
from train_loop.run_dir import (
    RUN_MARKER,
    Fence,
    Outcome,
    RootMarker,
    RunDir,
    default_cache,
    expect_run_dir,
    size_of,
    storage_may_fail,
    write_run_marker,
)
from train_loop.spec import NODE, AnyJobSpec, SpecError, describe, parse_any_text, with_lora
from train_loop.system.deterministic import deterministic_settings
from train_loop.system.exit import leave
from train_loop.system.retry import retry_storage
from train_loop.telemetry.logs import log_to

log = logging.getLogger("train_loop.run")
_NEEDS_SERVICE = (
    "needs the service, which finds the checkpoint; give model.path the folder that `trainshed export` prints"
)


def main() -> None:
    """Run a job under torchrun."""
    parser = argparse.ArgumentParser(prog="python -m train_loop.run", description=__doc__)
    parser.add_argument("spec", type=Path, metavar="SPEC.yaml")
    parser.add_argument("--run-dir", required=True, metavar="DIR")
    parser.add_argument("--cache", type=Path, default=default_cache(), help="folder of prepared data [%(default)s]")
    arguments = parser.parse_args()
    try:
        spec = parse_any_text(arguments.spec.read_bytes())
    except SpecError as error:
        sys.exit("\n".join(describe(one, str(arguments.spec)) for one in error.problems))
    if spec.run.model.is_of_job and not spec.run.model.has_source:
        sys.exit(f"{arguments.spec}: model.job {_NEEDS_SERVICE}")
    fewest, most = spec.scaling.bounds
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if spec.scaling.elastic and not fewest <= world <= most:
        sys.exit(f"{arguments.spec}: invalid --nproc-per-node {world}; expected num_workers, {fewest} to {most}")
    if spec.run.training.deterministic:
        os.environ.update(deterministic_settings(os.environ))
    stop_requested = _watch_signals()
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=spec.failure.hang_timeout_seconds))
    try:
        check_embedding(spec, RunDir.at(arguments.run_dir))
        spec = with_shards_per_host(resolve_adapter(spec, RunDir.at(arguments.run_dir)))
        spec = spec.at(world) if spec.scaling.elastic else spec
        run(spec, _session(spec, RunDir.at(arguments.run_dir), stop_requested), arguments.cache)
    except USER_ERRORS as error:
        sys.exit(str(error))
    finally:
        dist.destroy_process_group()


def with_shards_per_host(spec: AnyJobSpec) -> AnyJobSpec:
    """Return a spec whose fsdp_size is a number: node becomes that of a host's workers. A collective call.

    Raises UserError if hosts run no equal groups of several workers.
    """
    if spec.strategy.fsdp_size != NODE:
        return spec
    # torchrun numbers the ranks of a host one after another.
    sizes = [0] * dist.get_world_size()
    dist.all_gather_object(sizes, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    size, strategy = math.gcd(*sizes), spec.strategy
    if size % strategy.peers or size == strategy.tp_size < len(sizes):
        hosts = ", ".join(map(str, sorted(set(sizes))))
        raise UserError(
            f"fsdp_size=node finds no equal groups of several workers: hosts run {hosts} of {len(sizes)} workers, in "
            f"multiples of {strategy.peers}; start the same number on each host, or write fsdp_size as a number"
        )
    shards = strategy.model_copy(update={"fsdp_size": size // strategy.tp_size})
    return spec.model_copy(update={"strategy": shards})


def resolve_adapter(spec: AnyJobSpec, run_dir: RunDir) -> AnyJobSpec:
    """Return a spec with the settings of the adapters that it names; those of a resumed run are in its directory."""
    if spec.model.adapter is None:
        return spec
    with suppress(FileNotFoundError, SpecError):
        begun = run_dir.spec().model
        if begun.adapter == spec.model.adapter and spec.model.lora in (None, begun.lora):
            return with_lora(spec, begun.lora)
    return with_adapter(spec)


def check_embedding(spec: AnyJobSpec, run_dir: RunDir) -> None:
    """Raise UserError if a new run contradicts the rules by which the folder of its model embeds texts."""
    with suppress(FileNotFoundError, SpecError):
        run_dir.spec()
        return
    for problem in rule_problems(spec.run):
        raise UserError(problem.message)


def run(spec: AnyJobSpec, session: Session, cache: Path) -> None:
    """Run with the same logs as under the service, and write the outcome, also of an error."""
    expect_run_dir(session.run_dir.root)
    attempt = session.run_dir.attempt(session.attempt)
    retry_storage(partial(log_to, attempt.rank_log(session.rank)))
    with fence_watched(session.run_dir, session.token):
        try:
            with report_failure(session):
                outcome = _work(spec, session, cache)
        except FencedError:
            # The newer group writes the outcome.
            raise
        except Exception as error:
            with storage_may_fail(partial(log.error, "the outcome could not be written: %s")):
                retry_storage(partial(_acknowledge, session, failed(error)), seconds=session.patience)
            raise
        if session.rank == 0:
            retry_storage(partial(_write_outcome, session, outcome), seconds=session.patience)
            _acknowledge_stop(session)


def _acknowledge_stop(session: Session) -> None:
    """Remove the stop request, so that the next start on this directory resumes."""
    try:
        check_fence(session.run_dir, session.token)
        session.run_dir.stop_file.unlink(missing_ok=True)
    except (FencedError, OSError) as error:
        log.warning("the stop request could not be removed: %s", error)


def _acknowledge(session: Session, outcome: Outcome) -> None:
    # Peers of a failed rank fail with lost connections: an error that is not retryable overrides theirs.
    if not outcome.retryable or session.run_dir.attempt(session.attempt).outcome() is None:
        _write_outcome(session, outcome)


def _write_outcome(session: Session, outcome: Outcome) -> None:
    check_fence(session.run_dir, session.token)
    session.run_dir.attempt(session.attempt).write_outcome(outcome)


def _work(job: AnyJobSpec, session: Session, cache: Path) -> Outcome:
    run_dir = session.run_dir
    job = with_own_code(job, run_dir)
    spec = job.run
    dataset = pinned_dataset(spec, run_dir.data)
    if dataset is None:
        dataset = as_begun(as_in_parent(find_dataset(spec, cache), run_dir), run_dir.data)
    other, evaluation = evaluation_spec(spec, dataset), None
    if other is not None:
        evaluation = pinned_dataset(other, run_dir.eval_data) or as_begun(find_dataset(other, cache), run_dir.eval_data)
    # All ranks must resolve the dataset before rank 0 writes the pointer, so that all read the same samples.
    dist.barrier()
    if session.rank == 0:
        pin(dataset, run_dir.data)
        if evaluation is not None:
            pin(evaluation, run_dir.eval_data)
    return WORK[job.kind].run(job, session, dataset, evaluation)


def _watch_signals() -> Callable[[], bool]:
    """Handle SIGTERM and SIGINT as a stop with a checkpoint. Return a function that reports whether one has arrived."""
    came = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: came.set())
    return came.is_set


def _session(spec: AnyJobSpec, run_dir: RunDir, stop_requested: Callable[[], bool]) -> Session:
    rank = dist.get_rank()
    # All ranks wait for the claim: none may write into another run's directory.
    claimed = [_claim(run_dir, spec) if rank == 0 else None]
    dist.broadcast_object_list(claimed, src=0)
    token = claimed[0]
    if isinstance(token, Exception):
        raise token
    assert token is not None, "rank 0 sends a token or an error"
    return Session(
        rank=rank,
        world=dist.get_world_size(),
        local_rank=int(os.environ["LOCAL_RANK"]),
        attempt=token.attempt,
        epoch=token.epoch,
        run_dir=run_dir,
        open_stream=local_stream,
        timeout=timedelta(seconds=spec.failure.hang_timeout_seconds),
        stop_requested=stop_requested,
        end_event=WORK[spec.kind].end_event,
    )


def _claim(run_dir: RunDir, spec: AnyJobSpec) -> Fence | Exception:
    """Claim the directory for this run and supersede earlier starts on it. Return its token, or the error."""
    try:
        run_dir.write_spec(spec)
        if size_of(run_dir.root / RUN_MARKER, below=run_dir.root) is None:
            write_run_marker(run_dir.root, RootMarker.new())
        keep_code(spec, run_dir, log.warning)
        token = begin_group(run_dir, 1, by=uuid.uuid4().hex)
        # A repeated run on the same directory has not ended yet.
        run_dir.attempt(1).outcome_file.unlink(missing_ok=True)
    except ValueError as error:
        return UserError(str(error))
    except (FencedError, OSError) as error:
        return error
    return token


if __name__ == "__main__":
    main()
    leave()
