"""Parent checkpoint of a clone, and of a job that only reads its weights. Pure."""

from service.domain.jobs.job import Job, JobState
from train_loop.run_dir import Manifest, Parent
from train_loop.spec import AnyJobSpec, JobSpec, Problem
from train_loop.spec.schedule import PLATEAU


def parent_of(job: Job, manifest: Manifest, spec: AnyJobSpec) -> Parent:
    """Build the parent record for the run directory of a clone with this spec."""
    before, after = job.spec.run, spec.run
    return Parent(
        job=job.id,
        run_dir=job.run_dir,
        manifest=manifest,
        # Once the data is prepared, its fingerprint shows whether the samples themselves are the same.
        same_order=(before.data.seed, before.data.shuffle) == (after.data.seed, after.data.shuffle),
        same_optimizer=before.training.optimizer == after.training.optimizer,
        same_plateau=same_plateau(before, after),
    )


def source_of(job: Job, manifest: Manifest) -> Parent:
    """Build the parent record for the run directory of a job that reads only the checkpoint's weights."""
    return Parent(job=job.id, run_dir=job.run_dir, manifest=manifest, same_order=False, same_optimizer=False)


def same_plateau(before: JobSpec, after: JobSpec) -> bool:
    """Return whether evaluations lower the learning rates of both specs, which begin equal."""
    return after.training.lr_scheduler_type == PLATEAU and _rates(before) == _rates(after)


def _rates(spec: JobSpec) -> tuple[object, ...]:
    """Return the settings that give the first learning rates of parameter groups, and what lowers them."""
    training = spec.training
    chosen = training.lr_scheduler_type, training.learning_rate, training.optimizer, training.groups
    return *chosen, training.layer_decay, spec.model.freeze_module_prefix, spec.data.eval


def check_adapter_kept(job: Job, manifest: Manifest, spec: AnyJobSpec) -> list[Problem]:
    """Return why a clone would not read the folder with adapters that its spec names; empty if its parent's has it."""
    adapter = spec.model.adapter
    if adapter is None or adapter == job.spec.model.adapter:
        return []
    message = (
        f"adapter={adapter} has no effect, because the clone continues from step {manifest.step} of {job.id}; set "
        "from_checkpoint to 0, or remove adapter"
    )
    return [Problem("/model/adapter", message)]


def check_steps_remaining(job: Job, manifest: Manifest, spec: AnyJobSpec) -> list[Problem]:
    """Return why a clone would end before its first step; empty if it would not, or if this is not known yet."""
    training, begins = spec.run.training, f"step {manifest.step} of {job.id}, where the clone starts"
    if training.max_steps is not None and training.max_steps <= manifest.step:
        message = f"max_steps={training.max_steps} is not after {begins}; it includes the steps of the parent"
        return [Problem("/training/max_steps", f"{message}, so choose more than {manifest.step}")]
    if training.max_tokens is not None and training.max_tokens <= manifest.tokens:
        message = f"max_tokens={training.max_tokens} does not exceed the {manifest.tokens} tokens of {begins}"
        return [Problem("/training/max_tokens", f"{message}; choose more")]
    before, epochs = job.spec.run.training, training.epochs
    if epochs is None or spec.data != job.spec.data:
        return []
    # An end within an epoch is known only if the job reached it, and nothing else has ended the job.
    ended = job.state is JobState.SUCCEEDED and job.attempts[-1].step == manifest.step and before.max_steps is None
    by_epochs = before.epochs if ended else None
    if manifest.position.epoch >= epochs or (by_epochs is not None and epochs <= by_epochs):
        message = f"num_train_epochs={epochs:g} are complete at {begins}"
        return [Problem("/training/num_train_epochs", f"{message}; choose more")]
    return []
