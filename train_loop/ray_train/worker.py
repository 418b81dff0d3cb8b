"""One rank of an attempt under Ray Train."""

import functools
import os
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from ray.train import get_context, get_preemption_info

from train_loop.code.use import with_own_code
from train_loop.data.dataset import Dataset
from train_loop.data.stream.takeover import ray_stream
from train_loop.faults.failure import report_failure
from train_loop.kinds import WORK
from train_loop.liveness.fencing import EPOCH_VARIABLE, fence_watched
from train_loop.liveness.heartbeat import mark
from train_loop.loop.session import Preemption, Session
from train_loop.model.folder import model_shape
from train_loop.plan import lay_out
from train_loop.ray_train.inputs import read_inputs
from train_loop.ray_train.prestart import Standby
from train_loop.ray_train.raylet import room_that_stays, this_node
from train_loop.run_dir import Fence, RunDir, StorageUnavailable, expect_run_dir, read_whole
from train_loop.spec import MEMORY, JobSpec
from train_loop.system.memory_limit import limit_rank
from train_loop.system.retry import retry_storage
from train_loop.telemetry.event_log import last_word
from train_loop.telemetry.logs import log_to


def work(config: dict[str, Any]) -> None:
    """Do the work of one rank of Ray Train's worker group."""
    run_dir = RunDir.at(config["run_dir"])
    token = Fence(config["attempt"], int(os.environ.get(EPOCH_VARIABLE, "0")))
    expect_run_dir(run_dir.root)
    # Before the first read: heartbeats then report that storage does not answer on this host.
    with fence_watched(run_dir, token):
        _work(run_dir, token)


def _work(run_dir: RunDir, token: Fence) -> None:
    context, attempt = get_context(), run_dir.attempt(token.attempt)
    whole = retry_storage(run_dir.spec)
    job = retry_storage(lambda: attempt.spec(whole))
    spec, its = job.run, WORK[job.kind]
    timeout = timedelta(seconds=spec.failure.hang_timeout_seconds)
    each, ranks = spec.scaling.resources_per_worker, context.get_local_world_size()
    limit_rank(os.environ, ranks=ranks, on_gpu=bool(each.get("GPU")), reserved=each.get(MEMORY))
    held = _ranks_by_node()
    session: Session = Session(
        rank=context.get_world_rank(),
        world=context.get_world_size(),
        local_rank=context.get_local_rank(),
        attempt=attempt.number,
        epoch=token.epoch,
        run_dir=run_dir,
        open_stream=functools.partial(
            ray_stream, timeout=timeout, report=lambda name, **fields: session.journal.event(name, **fields)
        ),
        timeout=timeout,
        expect_restart=_spares(spec, context.get_world_rank(), held).keep,
        proves_pauses=True,
        preemption=_preemption,
        may_move=_may_move(spec, held, fewest=whole.scaling.bounds[0]),
        mark=mark,
        end_event=its.end_event,
    )
    retry_storage(functools.partial(log_to, attempt.rank_log(session.rank)))
    if retry_storage(functools.partial(last_word, attempt)) is not None:
        # Ray Train restarts the group after any error. The work has already ended: there is nothing to do.
        return
    with report_failure(session):
        job = retry_storage(functools.partial(with_own_code, job, run_dir))
        # The model's folder may be unavailable on this host only.
        read_inputs(job.run, functools.partial(model_shape, job.model))
        evaluation = _prepared(run_dir.eval_data) if spec.data.eval else None
        its.run(job, session, _prepared(run_dir.data), evaluation)


def _spares(spec: JobSpec, rank: int, held: Mapping[str, int]) -> Standby:
    """Return the spare processes of a rank: one replacement for it, and on rank 0 also those of idle nodes."""
    if not spec.failure.spare_workers:
        return Standby(0)
    return Standby(1, elsewhere=(spec.scaling, held) if rank == 0 else None)


def _preemption() -> Preemption | None:
    """Return Ray's notice about nodes that will be drained. A collective call of some milliseconds."""
    found = get_preemption_info()
    if found is None:
        return None
    deadline = found.deadline_ms / 1000 if found.deadline_ms else None
    return Preemption(tuple(found.preempted_ranks), deadline)


def _ranks_by_node() -> Counter[str]:
    """Return the number of the group's ranks by node id. A collective call."""
    nodes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(nodes, this_node())
    return Counter(nodes)


def _may_move(spec: JobSpec, held: Mapping[str, int], *, fewest: int) -> Callable[[], bool]:
    """Return a function that checks whether remaining hosts have room for all ranks, or for `fewest` if elastic."""
    wanted = spec.scaling.model_copy(update={"num_workers": min(fewest, spec.scaling.world)})

    def check() -> bool:
        room = room_that_stays(held, spec.scaling.resources_per_worker)
        return lay_out(wanted, room, group=spec.strategy.peers) is not None

    return check


def _prepared(pointer: Path) -> Dataset:
    read = functools.partial(read_whole, pointer, below=pointer.parent.parent)
    dataset = Dataset.model_validate_json(retry_storage(read))
    retry_storage(functools.partial(expect_prepared, dataset))
    return dataset


def expect_prepared(dataset: Dataset) -> None:
    """Raise StorageUnavailable if this host does not see the prepared samples."""
    for index in filter(None, (part.index for part in dataset.parts)):
        if not Path(index).is_file():
            why = "prepared data not found on this host; TRAINSHED_CACHE must be a folder that all hosts share"
            raise StorageUnavailable(str(Path(index).parent), why)
