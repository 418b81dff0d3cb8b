"""The inference loop: forward passes over all rows, whose results are committed shard by shard."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from train_loop.data.dataset import Dataset, Rows
from train_loop.data.input_rows import check_unchanged, check_whole
from train_loop.data.order import StepOrder
from train_loop.data.stream.by_length import LengthOrder
from train_loop.data.stream.local import StreamPlan
from train_loop.faults.out_of_memory import memory_watched
from train_loop.faults.watchdog import Watchdog, watched
from train_loop.liveness.heartbeat import Phase
from train_loop.loop.batch import StepBatch, check_samples, check_vocabulary, micro_batches, share_rows, trim
from train_loop.loop.build import report_unused
from train_loop.loop.built import record_model
from train_loop.loop.coordination import StopSignal, agree_on_stop, agree_to_go_on, gather_workers, warn_of_hosts
from train_loop.loop.infer.build import build_output
from train_loop.loop.infer.of_job import load_weights_of_job
from train_loop.loop.infer.outputs import Output, RowResult
from train_loop.loop.infer.results import ResultsWriter, gather_results
from train_loop.loop.metrics import replayed_steps
from train_loop.loop.numerics import numerics
from train_loop.loop.session import Session
from train_loop.model.folder import model_shape
from train_loop.parallel.build import ShardedModel, build_sharded
from train_loop.parallel.mesh import Mesh, build_mesh, local_device
from train_loop.plan import plan_job
from train_loop.run_dir import Outcome, Stop, storage_failed
from train_loop.spec import InferJobSpec
from train_loop.system.gc import collect_garbage, keep_what_is_there, no_garbage_collection
from train_loop.system.retry import retry_storage
from train_loop.telemetry.timers import StepTimer

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Inference:
    """Objects of the inference loop on this rank."""

    spec: InferJobSpec
    session: Session
    mesh: Mesh
    sharded: ShardedModel
    dataset: Dataset
    order: StepOrder
    output: Output
    committed: int
    """Number of committed shards at the start."""

    @property
    def start(self) -> int:
        """Return the first row whose results are not committed."""
        return min(self.committed * self.spec.infer.rows_per_shard, self.dataset.samples)


def infer(spec: InferJobSpec, session: Session, dataset: Dataset, evaluation: Dataset | None = None) -> Outcome:
    """Compute this rank's share of the results, from the first row without any to the last or a stop request."""
    assert evaluation is None, "the spec rejects eval data"
    model = spec.model.path or (spec.model.config or {})["model_type"]
    log.info("rank %d of %d: building %s", session.rank, session.world, model)
    session.journal.event("workers_ready", world=session.world)
    with numerics(spec.run), watched(session) as watchdog, memory_watched(spec, session):
        job = build_inference(spec, session, dataset)
        with no_garbage_collection():
            keep_what_is_there()
            record_start(job)
            loop = InferenceLoop(job, watchdog)
            stop = loop.run()
    session.mark(loop.done, Phase.END)
    outcome = Outcome(result=stop.result if stop else "succeeded", step=loop.kept)
    session.journal.event("work_ended", **outcome.model_dump(exclude_none=True))
    # The driver reads the event as soon as the workers are gone.
    retry_storage(session.journal.flush, seconds=session.patience, may_pass=storage_failed)
    log.info("%s at row %d of %d", outcome.result, outcome.step, dataset.samples)
    return outcome


def build_inference(spec: InferJobSpec, session: Session, dataset: Dataset) -> Inference:
    """Build model, mesh and order of an inference job. A collective call; raises UserError."""
    check_whole(dataset)
    plan = plan_job(spec, model_shape(spec.model))
    mesh = build_mesh(plan.mesh, local_device(session.local_rank), timeout=session.timeout)
    sharded = build_sharded(spec.run, mesh, needs_weights=not spec.model.is_of_job)
    report_unused(sharded, spec.run, session)
    if spec.model.is_of_job:
        spec = load_weights_of_job(spec, sharded, session.access)
    sharded.model.eval()
    # Shards are complete in the order of the rows, and each is the window of a permutation.
    order = LengthOrder(
        dataset.samples,
        seed=0,
        shuffle=False,
        dataset=dataset.fingerprint,
        end=dataset.samples,
        rows=dataset,
        window=spec.infer.rows_per_shard,
    )
    # Rank 0 counts: a shard may be committed while others look.
    committed = [session.run_dir.results.complete if session.rank == 0 else 0]
    dist.broadcast_object_list(committed, src=0)
    return Inference(
        spec=spec,
        session=session,
        mesh=mesh,
        sharded=sharded,
        dataset=dataset,
        order=StepOrder(order, mesh.plan.dp, spec.infer.batch_size),
        output=build_output(spec, sharded.anatomy, dataset, session.journal),
        committed=committed[0],
    )


def record_start(job: Inference) -> None:
    """Write `model_built` and `work_started`, and warn about slow groups of ranks. A collective call."""
    workers, run = gather_workers(), job.spec.run
    record_model(job.session, run, job.mesh, job.sharded.anatomy, workers)
    output = job.spec.infer.output
    log.info("%s of rows %d to %d on %s", output, job.start, job.dataset.samples, job.mesh.plan.axes)
    job.session.journal.event(
        "work_started",
        kind=job.spec.kind,
        workers=workers,
        resumed_from=job.start,
        replayed=replayed_steps(job.session.run_dir, job.start) if job.session.rank == 0 else 0,
        # Steps are rows.
        steps=job.dataset.samples,
        global_batch=job.order.global_batch,
        world=job.session.world,
        mesh=job.mesh.plan.axes,
    )
    warn_of_hosts(job.mesh.plan, workers, job.session.journal)


class InferenceLoop:
    """The batches of an inference job on this rank, and what may stop it between two of them."""

    def __init__(self, job: Inference, watchdog: Watchdog) -> None:
        self.job, self.watchdog = job, watchdog
        self.session, self.done = job.session, job.start
        self.stop_signal, self.clock = StopSignal(job.session), StepTimer()
        remaining = StreamPlan(job.dataset, job.order, job.start, job.order.steps_left(job.start))
        self.rows = job.session.open_stream(remaining, job.mesh.plan, job.mesh.rank)
        self.found = list[RowResult]()
        """Results of this rank that are not gathered yet."""
        self.stop: Stop | None = None
        """The stop request on which all ranks have agreed."""
        self.writer: ResultsWriter | None = None
        if job.session.rank == 0:
            check_unchanged(job.spec.run, job.dataset)
            self.writer = ResultsWriter(job.spec, job.session.access, rows=job.dataset.samples, committed=job.committed)

    @property
    def kept(self) -> int:
        """Return the number of rows whose results are committed once the loop has ended."""
        rows, size = self.job.dataset.samples, self.job.spec.infer.rows_per_shard
        return self.done if self.done == rows else self.done // size * size

    @torch.no_grad()
    def run(self) -> Stop | None:
        """Compute results until all rows have one or the job must stop. Return the stop request."""
        batches = 0
        while self.done < self.job.dataset.samples and self.find_stop() is None:
            batch, before = self.next_batch(), self.done
            self.compute(batch)
            self.commit_if_due(before)
            batches += 1
            collect_garbage(batches)
        return self.stop

    def find_stop(self) -> Stop | None:
        """Return the stop request on which all ranks agree. A collective call."""
        if self.stop is None:
            self.session.mark(self.done, Phase.AGREE)
            self.stop = agree_on_stop(self.stop_signal.seen)
        return self.stop

    def any_busy(self, busy: bool) -> bool:
        """Return whether any rank is busy and none has to stop; a batch of many calls asks between them."""
        self.watchdog.feed()
        self.session.mark(self.done, Phase.TRAIN)
        is_any_busy, stop = agree_to_go_on(busy=busy, stop=self.stop_signal.seen)
        if is_any_busy:
            self.stop = stop
        return is_any_busy and stop is None

    def next_batch(self) -> StepBatch:
        """Return this data rank's next rows, identical on all of its peers, without padding that all of them have."""
        self.watchdog.feed()
        self.clock.begin()
        self.session.mark(self.done, Phase.DATA)
        batch = next_rows(self.job, self.rows, self.done)
        self.clock.data_arrived()
        return batch

    def compute(self, batch: StepBatch) -> None:
        """Compute the results of a batch: the hot path. Every rank calls the model, also for padding."""
        job, mesh = self.job, self.job.mesh
        self.session.mark(self.done, Phase.TRAIN)
        (rows_of_rank,) = micro_batches(batch, job.order.per_rank, job.sharded.anatomy, mesh)
        results = job.output(job.sharded.anatomy, rows_of_rank, mesh, self.any_busy)
        if self.stop is not None:
            return
        if mesh.leads:
            self.found += results
        rows = min(job.order.global_batch, job.dataset.samples - self.done)
        self.done += rows
        self.session.mark(self.done, Phase.AFTER)
        self.record(rows)

    def record(self, rows: int) -> None:
        """Write a metrics line, in which a step is a row."""
        seconds = self.clock.seconds
        self.session.journal.metrics(
            step=self.done,
            rows_per_second=rows / seconds,
            step_seconds=seconds / rows,
            data_wait_seconds=self.clock.data_wait_seconds / rows,
        )

    def commit_if_due(self, before: int) -> None:
        """Gather results and commit shards if the batch has completed one. A collective call if it has."""
        size = self.job.spec.infer.rows_per_shard
        if before // size == self.done // size and self.done < self.job.dataset.samples:
            return
        self.session.mark(self.done, Phase.SAVE)
        results = gather_results(self.found)
        self.found = []
        if self.writer is not None:
            self.writer.add(results)
        self.session.expect_restart()


def next_rows(job: Inference, rows: Iterator[Rows | None], done: int) -> StepBatch:
    """Return the rows of a batch as the order has them."""
    read = next(rows)
    check_vocabulary(read, job.sharded.anatomy.vocabulary)
    batch = share_rows(read, count=job.order.per_rank, dataset=job.dataset, mesh=job.mesh)
    check_samples(batch, job.order.step(done)[job.mesh.data_rank])
    return trim(batch, multiple=job.mesh.plan.sp)
