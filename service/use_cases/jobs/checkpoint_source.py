"""Specs whose weights a job's checkpoint has: the checkpoint is found, and its job's model is added to the spec."""

from collections.abc import Mapping
from typing import NamedTuple

from service.domain.access.roles import Principal, Role
from service.domain.jobs.job import Job
from service.domain.jobs.lineage import source_of
from service.errors import InvalidSpec, JobNotFound
from service.use_cases.jobs.jobs import Jobs
from train_loop.run_dir import Manifest, Parent
from train_loop.spec import AnyJobSpec, CheckpointSource, Problem, SpecError, dump, load

_OF_SOURCE = ("path", "config", "tokenizer", "lora")
"""Fields of a model that come from the job of its checkpoint."""


class SourcedSpec(NamedTuple):
    """A spec that names its model completely, and the checkpoint with its weights, if a job has them."""

    spec: AnyJobSpec
    parent: Parent | None = None


def find_source(jobs: Jobs, caller: Principal, spec: AnyJobSpec) -> SourcedSpec:
    """Return a spec with the model of the job whose checkpoint it names, if it names one.

    The caller needs the role editor in the job's project, as for an export. Raises InvalidSpec, Forbidden.
    """
    source = spec.checkpoint_source
    if source is None:
        return SourcedSpec(spec)
    job = _find_job(jobs, caller, source.job)
    manifest = _find_checkpoint(jobs, job, source)
    tokenizer = jobs.run_dirs.trained_tokenizer(job.run_dir) if job.spec.run.trains_tokenizer else None
    try:
        sourced = spec.with_model_of(job.id, manifest.step, job.spec.run, tokenizer)
        return SourcedSpec(load(dump(sourced)), source_of(job, manifest))
    except SpecError as error:
        raise InvalidSpec(error.problems) from error


def _find_job(jobs: Jobs, caller: Principal, job_id: str) -> Job:
    """Return a job with checkpoints of weights that this version can read. Raises InvalidSpec, Forbidden."""
    try:
        job = jobs.find(caller, job_id, Role.EDITOR)
    except JobNotFound as error:
        raise InvalidSpec([Problem("/model/job", str(error))]) from error
    refused = None
    if not job.spec.trains:
        refused = f"is a job of kind: {job.spec.kind}, which has no checkpoints; name the job that trained its model"
    elif job.spec.code is not None:
        refused = "trains own code (code), which this kind does not support; name the job of a Hugging Face model"
    if refused is not None:
        raise InvalidSpec([Problem("/model/job", f"{job.id} {refused}")])
    return job


def _find_checkpoint(jobs: Jobs, job: Job, source: CheckpointSource) -> Manifest:
    """Return the manifest of a committed checkpoint. Raises InvalidSpec, CheckpointUnknown."""
    manifests = {found.manifest.step: found.manifest for found in jobs.run_dirs.checkpoints(job.run_dir)}
    step = max(manifests, default=None) if source.step == "latest" else source.step
    if step is None:
        raise InvalidSpec([Problem("/model/job", f"{job.id} has no checkpoint yet; wait for its first one")])
    if step not in manifests:
        steps = ", ".join(map(str, manifests)) or "none"
        raise InvalidSpec(
            [Problem("/model/step", f"checkpoint of step {step} of {job.id} not found; available steps: {steps}")]
        )
    if source.weights == "ema" and job.spec.run.training.ema_decay is None:
        message = f"{job.id} has no average of its weights (training.ema_decay is not set); choose weights: model"
        raise InvalidSpec([Problem("/model/weights", message)])
    return manifests[step]


def without_old_source(jobs: Jobs, spec: AnyJobSpec, overrides: Mapping[str, object]) -> Mapping[str, object]:
    """Return overrides that, if they name another job, also remove the parts that the spec has from its job."""
    model, data = overrides.get("model"), overrides.get("data", {})
    source = spec.checkpoint_source
    if source is None or not isinstance(model, Mapping) or model.get("job", source.job) == source.job:
        return overrides
    fresh: dict[str, object] = {**overrides, "model": {**dict.fromkeys(_OF_SOURCE), **model}}
    old, template = jobs.store.get(source.job), spec.run.data.chat_template
    if template is not None and old is not None and old.spec.run.data.chat_template == template:
        fresh["data"] = {"chat_template": None, **data} if isinstance(data, Mapping) else data
    return fresh
