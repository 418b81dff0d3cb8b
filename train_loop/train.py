"""The training loop."""

import logging
from collections.abc import Iterator

import torch.distributed as dist

from train_loop.checkpoint.restore import restore
from train_loop.checkpoint.save import Saver
from train_loop.checkpoint.schedule import SaveSchedule
from train_loop.checkpoint.select import agree_on_newest, prove_newest
from train_loop.checkpoint.state_dict import draft_manifest, tensors_to_save
from train_loop.data.dataset import Dataset, Rows
from train_loop.data.masking import mask_rows
from train_loop.data.stream.local import StreamPlan
from train_loop.errors import CheckpointError, UserError
from train_loop.faults.micro_batch import with_micro_batch
from train_loop.faults.nonfinite import count_skips
from train_loop.faults.out_of_memory import memory_watched
from train_loop.faults.preemption import PreemptionWatch
from train_loop.faults.watchdog import Watchdog, watched
from train_loop.liveness.heartbeat import Phase
from train_loop.loop.batch import StepBatch, check_samples, check_vocabulary, micro_batches, share_rows
from train_loop.loop.build import Run, build_run
from train_loop.loop.built import record_built
from train_loop.loop.coordination import MOVE, Agreement, RankRequests, StopSignal, agree, agree_on_stop, gather_workers
from train_loop.loop.evaluate import Evaluation, evaluate
from train_loop.loop.forecast import ForecastScore
from train_loop.loop.metrics import measure, record_start, record_step, write_line
from train_loop.loop.numerics import numerics
from train_loop.loop.profiling import profiled
from train_loop.loop.session import Session
from train_loop.loop.step import StepResult, train_step
from train_loop.run_dir import Outcome, Stop, storage_failed
from train_loop.spec import AUTO, JobSpec
from train_loop.system.gc import collect_garbage, keep_what_is_there, no_garbage_collection
from train_loop.system.retry import retry_storage
from train_loop.telemetry.timers import StepTimer

log = logging.getLogger(__name__)


def train(spec: JobSpec, session: Session, dataset: Dataset, evaluation: Dataset | None = None) -> Outcome:
    """Train this rank's share of a run, from its newest checkpoint to its end or a stop request."""
    model = spec.code.model if spec.code else spec.model.path or (spec.model.config or {})["model_type"]
    log.info("rank %d of %d: building %s", session.rank, session.world, model)
    session.journal.event("workers_ready", world=session.world)
    chooses = spec.training.per_device_train_batch_size == AUTO
    spec = with_micro_batch(spec, session)
    shrinks = chooses and spec.training.micro_batch > 1
    with numerics(spec), watched(session) as watchdog, memory_watched(spec, session, shrinks=shrinks):
        newest = agree_on_newest(session.access)
        run = build_run(spec, session, dataset, evaluation, newest)
        saver = Saver(session.access, spec.checkpoint, spec.strategy.save_mode, timeout=session.timeout)
        with no_garbage_collection():
            resume(run)
            keep_what_is_there()
            workers = gather_workers()
            record_built(run, workers)
            record_start(run, workers)
            try:
                loop = TrainingLoop(run, saver, watchdog, proves=chooses)
                stop = loop.train()
            except UserError:
                # Keep the checkpoint in flight: it precedes the user's error.
                saver.wait()
                raise
    session.mark(run.state.step, Phase.END)
    if stop is not None and stop.checkpoint:
        session.journal.event("stopping", mode=stop.mode, waits_for=f"the checkpoint of step {run.state.step}")
    save_failure = finish_saving(saver, stop)
    if session.proves_pauses and stop is not None and stop.mode != "cancel" and stop.checkpoint:
        prove_newest(session.access)
    if (score := loop.score.result()) is not None:
        session.journal.event("forecast_scored", **score)
    outcome = Outcome(result=stop.result if stop else "succeeded", step=run.state.step, reason=save_failure)
    session.journal.event("training_ended", **outcome.model_dump(exclude_none=True))
    # The driver reads the event as soon as the workers are gone.
    retry_storage(session.journal.flush, seconds=session.patience, may_pass=storage_failed)
    log.info("%s at step %d", outcome.result, outcome.step)
    return outcome


class TrainingLoop:
    """The steps of a run on this rank, and what may stop or save it between two of them."""

    def __init__(self, run: Run, saver: Saver, watchdog: Watchdog, *, proves: bool = False) -> None:
        self.run, self.saver, self.watchdog = run, saver, watchdog
        self.proves = proves
        """True until a step has shown that a chosen micro-batch fits."""
        session, consumed = run.session, run.state.consumed
        self.save_schedule = SaveSchedule(run.spec.checkpoint, step=run.state.step)
        self.preemption = PreemptionWatch(session)
        self.stop_signal = StopSignal(session)
        remaining = StreamPlan(run.dataset, run.order, consumed, run.order.steps_left(consumed))
        self.rows = session.open_stream(remaining, run.mesh.plan, run.mesh.rank)
        self.clock = StepTimer()
        self.score = ForecastScore.of(run.spec, run.flops.device)
        self.measured = dict[str, float]()
        """Values of the newest step by which checkpoints are compared."""

    def train(self) -> Stop | None:
        """Train until the run is done or must stop. Return the stop request; the last save may still be in flight."""
        stop = self.finish_evaluation()
        while stop is None and not self.run.done:
            batch = self.next_batch()
            agreed = self.agree(batch)
            if (stop := agreed.stop) is not None:
                break
            result = self.train_step(batch, agreed)
            self.prove_micro_batch()
            evaluation, stop = self.evaluate_if_due()
            self.record(result, agreed, evaluation, stop)
            if stop is None:
                collect_garbage(self.run.state.step)
                self.save_if_due(agreed)
        self.save_last(stop)
        return stop

    def next_batch(self) -> StepBatch:
        """Return this rank's samples of the next step."""
        self.watchdog.feed()
        self.clock.begin()
        self.run.session.mark(self.run.state.step + 1, Phase.DATA)
        batch = next_batch(self.run, self.rows, self.clock)
        self.clock.data_arrived()
        return batch

    def agree(self, batch: StepBatch) -> Agreement:
        """Agree with all ranks on the next step: its divisor, and whether to stop, save or look for preemptions."""
        run, requests = self.run, self.requests()
        run.session.mark(run.state.step + 1, Phase.AGREE)
        agreed = agree(batch, requests, objective=run.objective, reduction=run.reduction, clock=self.clock)
        if agreed.fatal:
            self.saver.raise_fatal()
        return agreed

    def requests(self) -> RankRequests:
        """Return this rank's requests to all ranks before a step."""
        leads, preemption = dist.get_rank() == 0, self.preemption
        stop = self.stop_signal.seen or (MOVE if leads and preemption.wants_to_move() else None)
        save = leads and (self.save_schedule.overdue or preemption.wants_last_save())
        return RankRequests(stop, save, check_preemption=leads and preemption.overdue, fatal=self.saver.failed_fatally)

    def train_step(self, batch: StepBatch, agreed: Agreement) -> StepResult:
        """Train one optimizer step: the hot path."""
        run, training, state, number = self.run, self.run.spec.training, self.run.state, self.run.state.step + 1
        run.session.mark(number, Phase.TRAIN)
        profile = profiled(number, run.session, steps=training.profile_steps, device=run.mesh.device)
        with profile, self.clock.training(run.compute_timer):
            result = train_step(
                state,
                run.objective,
                micro_batches(batch, training.micro_batch, run.objective.anatomy, run.mesh),
                divisor=agreed.divisor,
                reduction=run.reduction,
                max_grad_norm=training.max_grad_norm,
            )
        state.advance(tokens=agreed.tokens, samples=run.order.global_batch)
        run.session.mark(state.step, Phase.AFTER)
        check_step(run, result)
        return result

    def prove_micro_batch(self) -> None:
        """Report that the first step with a chosen micro-batch had enough memory."""
        if self.proves:
            size, step = self.run.spec.training.micro_batch, self.run.state.step
            self.run.session.journal.event("micro_batch_proven", size=size, step=step)
        self.proves = False

    def evaluate_if_due(self) -> tuple[Evaluation | None, Stop | None]:
        """Evaluate every eval_steps steps and at the run's end. A collective call.

        Return the evaluation, or the stop request that has interrupted it; neither if it is not due.
        """
        every, step = self.run.spec.training.eval_steps, self.run.state.step
        with self.clock.waiting():
            if every is None or (step % every and not self.run.done):
                return None, None
            return self.evaluate()

    def evaluate(self) -> tuple[Evaluation | None, Stop | None]:
        """Return the evaluation, or the stop request that has interrupted it. A collective call."""
        found = evaluate_now(self.run, self.stop_signal)
        if isinstance(found, Stop):
            return None, found
        self.run.state.evaluated(float(found.metrics["loss"]))
        return found, None

    def finish_evaluation(self) -> Stop | None:
        """Evaluate the newest step if a stop request has interrupted that. Return the request if one does so again."""
        state = self.run.state
        if not state.unlogged_line:
            return None
        evaluation, stop = self.evaluate()
        if stop is None:
            write_line(self.run, state.unlogged_line, evaluation)
            state.unlogged_line = {}
        return stop

    def record(self, result: StepResult, agreed: Agreement, evaluation: Evaluation | None, stop: Stop | None) -> None:
        """Write the metrics line of the step, if one is due. A collective call."""
        losses = self.run.state.losses
        losses.add(result.loss)
        self.measured = measure(losses.mean, result, evaluation)
        # A cancelled run is not resumed.
        resumes = stop is not None and stop.mode != "cancel"
        self.score.add(record_step(self.run, result, self.clock, agreed, evaluation, resumes=resumes))

    def save_if_due(self, agreed: Agreement) -> None:
        """Save a checkpoint if one is due. A save is collective: either all ranks save or none does."""
        step, schedule = self.run.state.step, self.save_schedule
        if schedule.due(step) or agreed.save or (agreed.check_preemption and self.preemption.sees_news()):
            schedule.begin(step)
            self.save()
            self.run.session.expect_restart()

    def save_last(self, stop: Stop | None) -> None:
        """Save the newest step at the end, unless it is saved, or spec or stop request do not want it."""
        wanted = stop.checkpoint if stop else self.run.spec.checkpoint.save_final
        if wanted and self.save_schedule.saved < self.run.state.step:
            self.save()

    def save(self) -> None:
        """Start saving a checkpoint of the newest step."""
        self.run.session.mark(self.run.state.step, Phase.SAVE)
        save(self.run, self.saver, self.measured, self.clock)


def resume(run: Run) -> None:
    """Load the newest checkpoint that verifies, or that of the run's parent, or start afresh. A collective call."""
    restore(run.state, run.session.access, run.order.order, seed=run.spec.training.seed, origins=run.origins)


def next_batch(run: Run, rows: Iterator[Rows | None], clock: StepTimer) -> StepBatch:
    """Return this data rank's samples of the next step, identical on all of its peers."""
    read, consumed = next(rows), run.state.consumed
    check_vocabulary(read, run.objective.anatomy.vocabulary)
    if run.dataset.masking is not None:
        read = mask_rows(read, run.dataset, run.order.epochs(consumed)[run.mesh.data_rank])
    with clock.waiting():
        batch = share_rows(read, count=run.order.per_rank, dataset=run.dataset, mesh=run.mesh)
    check_samples(batch, run.order.step(consumed)[run.mesh.data_rank])
    return batch


def check_step(run: Run, result: StepResult) -> None:
    """Check the finished step: count non-finite steps and report recompilations."""
    count_skips(run.state, result, run.spec.training, run.session.journal)
    # Graph breaks and repeated compilations slow training silently.
    if run.compile_watch is not None and (news := run.compile_watch.news()):
        run.session.journal.event("compiled", step=run.state.step, **news)


def evaluate_now(run: Run, stop_signal: StopSignal) -> Evaluation | Stop:
    """Return the evaluation, or the stop request that has interrupted it. A collective call.

    It uses the averaged weights if the run has some.
    """
    assert run.evaluation_data is not None, "a spec with eval_steps has eval data"
    with run.state.averaged():
        found = evaluate(
            run.objective,
            run.evaluation_data,
            run.reduction,
            per_device=run.spec.training.micro_batch,
            find_stop=lambda: agree_on_stop(stop_signal.seen),
        )
    if isinstance(found, Evaluation):
        values = ", ".join(f"{name} {value:.6g}" for name, value in found.metrics.items())
        log.info("evaluated: %s, %.2f s", values, found.seconds)
    return found


def save(run: Run, saver: Saver, measured: dict[str, float], clock: StepTimer) -> None:
    """Start saving a checkpoint of this step."""
    with clock.saving():
        draft = draft_manifest(
            run.state, run.order.order, measured, spec=run.spec, mesh=run.mesh.plan, token=run.session.token
        )
        saver.save(tensors_to_save(run.state), draft, clock)
    log.info("saving a checkpoint of step %d", run.state.step)


def finish_saving(saver: Saver, stop: Stop | None) -> str | None:
    """Wait for the last save. Raise its error, unless the run is being cancelled: then return the error's text."""
    try:
        saver.close()
    except CheckpointError as error:
        if stop is None or stop.mode != "cancel":
            raise
        return str(error)
    return None
