"""Probes of own code on existing ranks: its initialisation, steps, bytes, runs and export. Ranks call them."""

import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from train_loop.checkpoint.digest import digest_checkpoint
from train_loop.checkpoint.export.huggingface import export
from train_loop.code.package import read_package, unpack
from train_loop.code.use import keep_code, own_code, with_own_code
from train_loop.conformance.measure import (
    Memory,
    Step,
    accumulate_plainly,
    measure_memory,
    rows_of_rank,
    take_gradients,
    without_dropout,
)
from train_loop.conformance.toy import BATCH, STEPS
from train_loop.data.dataset import Dataset
from train_loop.data.prepare.cache import find_dataset
from train_loop.data.prepare.pointer import pin
from train_loop.data.stream.local import local_stream
from train_loop.errors import ModelError
from train_loop.loop.batch import MicroBatch, micro_batches
from train_loop.loop.build import build_objective, build_state
from train_loop.loop.objectives.objective import Objective
from train_loop.loop.objectives.own_loss import call_batch, call_loss, read_columns
from train_loop.loop.session import Session
from train_loop.model.build import check_rules, materialise
from train_loop.model.families.choose import family_of
from train_loop.parallel.build import ShardedModel, build_sharded
from train_loop.parallel.mesh import Mesh, build_mesh
from train_loop.parallel.units import find_units
from train_loop.plan import ModelShape, plan_job
from train_loop.preflight.call_sizes import measure_call
from train_loop.preflight.model import check_model
from train_loop.preflight.own_code import check_calls
from train_loop.run_dir import ExportWish, ReadPolicy, RunDir, read_lines
from train_loop.spec import JobSpec
from train_loop.state import seed_generators
from train_loop.train import train

CPU = torch.device("cpu")
REAL = BATCH - 1
"""Samples of a measured step; the last row is padding, so that micro-batches differ in size."""
MOST_PARAMETERS = 50_000_000
"""Maximum parameters of a model at toy size."""


class Built(NamedTuple):
    """A toy job's objects on this rank."""

    job: JobSpec
    mesh: Mesh
    dataset: Dataset
    sharded: ShardedModel
    objective: Objective

    def batches(self, real: int = REAL) -> Iterable[MicroBatch]:
        """Return this rank's micro-batches of a step with `real` samples."""
        batch = rows_of_rank(self.dataset, self.mesh, real=real, count=BATCH)
        size = self.job.training.micro_batch
        return list(micro_batches(batch, size, self.sharded.anatomy, self.mesh))

    def step(self, *, seed: int = 0) -> Step:
        """Return the loss and the whole gradients of a step, with seeded random generators. A collective call."""
        batches = self.batches()
        seed_generators(seed, step=0, rank=self.mesh.rank)
        loss = accumulate_plainly(self.objective, batches, None, self.mesh)
        return Step(loss.item(), take_gradients(self.sharded.model))


def build(job: JobSpec) -> Built:
    """Build the objects of a toy job. A collective call; raises UserError."""
    dataset, plan = find_dataset(job, Path(os.devnull)), plan_job(job, ModelShape.of_code())
    mesh = build_mesh(plan.mesh, CPU)
    sharded = build_sharded(job, mesh)
    return Built(job, mesh, dataset, sharded, build_objective(sharded, job, plan, dataset))


def examine(job: JobSpec) -> int:
    """Build the model on meta, and call batch and loss without computing. Return its parameters. Raises ModelError."""
    assert job.code is not None
    # Later probes find it there.
    unpack(read_package(job.code.package))
    anatomy = family_of(job).build(job.model)
    find_units(anatomy, job.strategy.wrap_policy)
    count = sum(parameter.numel() for parameter in anatomy.model.parameters())
    if count <= MOST_PARAMETERS and (problems := check_calls(job, lambda pointer: None)):
        raise ModelError(problems[0].message)
    return count


def initialise(job: JobSpec) -> str | None:
    """Return a tensor that two models with the same seed have with other values; None if there is none.

    Raises ModelError for a tensor that no rule sets.
    """
    blueprint = family_of(job).build(job.model)
    check_rules(blueprint)
    one, other = (_drawn(job) for _ in range(2))
    return next((name for name, values in one.items() if not torch.equal(values, other[name])), None)


def _drawn(job: JobSpec) -> dict[str, Tensor]:
    family = family_of(job)
    model = family.build(job.model).model
    materialise(model, family.build(job.model), seed=job.training.seed, device=CPU)
    return dict(model.named_parameters()) | dict(model.named_buffers())


class OneRank(NamedTuple):
    """Results of steps on one rank."""

    other_bits: str | None
    """A value that two training steps with one seed have with other bits; None if there is none."""
    draws: bool
    """True if the loss depends on the seed in evaluation mode, too."""
    whole: Step
    accumulated: Step
    fault: str | None
    """Fault of the sum or the count of the loss; None if nothing was found."""


def compare_steps(job: JobSpec, accumulated: JobSpec) -> OneRank:
    """Compare steps of one rank: repeated, with another seed, and accumulated."""
    built = build(job)
    first, second = built.step(), built.step()
    with without_dropout(built.sharded.model):
        step, other = built.step(), built.step(seed=1)
        parts = built._replace(job=accumulated)
        fault = _fault(built.objective, built.batches(), parts.batches())
        return OneRank(_other_bits(first, second), step.loss != other.loss, step, parts.step(), fault)


def _other_bits(one: Step, other: Step) -> str | None:
    if one.loss != other.loss:
        return f"the loss, by {abs(one.loss - other.loss):.3g}"
    pairs = ((name, values, other.gradients[name]) for name, values in one.gradients.items())
    return next((f"the gradient of {name}" for name, a, b in pairs if a is not None and not _same(a, b)), None)


def _same(one: Tensor, other: Tensor | None) -> bool:
    return other is not None and torch.equal(one, other)


@torch.no_grad()
def _fault(objective: Objective, whole: Iterable[MicroBatch], parts: Iterable[MicroBatch]) -> str | None:
    """Return the fault if a micro-batch's sum or count is not that of its parts."""
    (one,), two = ([_sum_and_count(objective, batch) for batch in batches] for batches in (whole, parts))
    totals, counts = zip(*two, strict=True)
    if abs(sum(counts) - one[1]) > 1e-6 * abs(one[1]):
        shown = " and ".join(f"{count:g}" for count in counts)
        return f"the count of {REAL} rows is {one[1]:g}, and those of its parts are {shown}: count rows or tokens"
    mean = sum(total * count for total, count in two) / (one[1] or 1)
    if abs(sum(totals) - one[0]) <= 1e-5 * max(abs(one[0]), 1e-12):
        return None
    if abs(mean - one[0]) <= 1e-5 * abs(one[0]):
        return 'the loss is a mean and not a sum: return, for example, cross_entropy(…, reduction="sum") and its count'
    return "a row's loss depends on the other rows of its micro-batch, as with a mean or a norm over rows: remove that"


def _sum_and_count(objective: Objective, batch: MicroBatch) -> tuple[float, float]:
    terms = objective(batch)
    assert terms.count is not None
    return terms.total.item(), float(terms.count)


def parallel_step(job: JobSpec) -> Step:
    """Return a step of a toy job without dropout."""
    built = build(job)
    with without_dropout(built.sharded.model):
        return built.step()


def planned_and_measured(job: JobSpec) -> tuple[dict[str, int], Memory]:
    """Return the bytes by term of the plan, and those of a step on the existing ranks."""
    shape, problems = check_model(job, ReadPolicy(project=job.project, roots=()))
    if shape is None or problems:
        raise ModelError(problems[0].message)
    shape, built = replace(shape, call=measure_call(job)), build(job)
    state = build_state(built.sharded.anatomy, job, built.mesh, steps=STEPS)
    found = measure_memory(state, built.objective, lambda: built.batches(BATCH), None, built.mesh)
    return {term.name: term.bytes for term in plan_job(job, shape).memory}, found


def train_run(job: JobSpec, folder: Path, stop_after: int | None = None) -> None:
    """Train a run from its newest checkpoint to its end, or to a pause after some steps."""
    run_dir = RunDir(folder)
    if dist.get_rank() == 0:
        run_dir.write_spec(job)
        keep_code(job, run_dir, lambda warning: None)
    dist.barrier()
    spec = with_own_code(job, run_dir)
    dataset = find_dataset(spec, folder)
    if dist.get_rank() == 0:
        pin(dataset, run_dir.data)
    stop = ask_after(stop_after)
    train(
        spec, Session(dist.get_rank(), dist.get_world_size(), 0, 1, run_dir, local_stream, stop_requested=stop), dataset
    )


def ask_after(steps: int | None) -> Callable[[], bool]:
    """Return a function that asks for a pause after some steps; the loop calls it before each step."""
    calls = 0

    def stop_requested() -> bool:
        nonlocal calls
        calls += 1
        return steps is not None and calls > steps

    return stop_requested


def difference_of_runs(folder: Path, other: Path) -> str | None:
    """Return the first value in which two runs differ: of a step, or of the last checkpoint; None without one."""
    lines = [list(read_lines(RunDir(run).attempt(1).metrics)) for run in (folder, other)]
    for one, two in zip(*lines, strict=True):
        for name in ("samples", "loss", "grad_norm"):
            if one.get(name) != two.get(name):
                return f"{name} of step {one['step']}"
    one_digests, two_digests = (digest_checkpoint(RunDir(run).checkpoint(STEPS)).tensors for run in (folder, other))
    names = (name for name in one_digests.keys() | two_digests.keys() if one_digests.get(name) != two_digests.get(name))
    return min(names, default=None)


def load_export(folder: Path) -> tuple[float, float]:
    """Return the loss of the plain module with a run's exported weights, and that of the loop with its checkpoint.

    Raises ModelError if the module does not take the exported names.
    """
    run_dir = RunDir(folder)
    job = with_own_code(run_dir.spec().run, run_dir)
    assert job.code is not None
    code, stored = own_code(job.code), load_file(export(run_dir, STEPS, ExportWish(dtype="fp32")) / "model.safetensors")
    with code.faults_of(job.code.model):
        torch.manual_seed(0)
        plain = code.model(dict(job.code.config))
    missing, unexpected = plain.load_state_dict(stored, strict=False)
    known = {name for name, _ in plain.named_parameters()}
    if wrong := [*known.intersection(missing), *unexpected]:
        raise ModelError(f"the module that {job.code.model} returns does not take {wrong[0]} of the export")
    family = family_of(job)
    model = family.build(job.model).model
    materialise(model, family.build(job.model), seed=job.training.seed, device=CPU)
    model.load_state_dict(stored, strict=False)
    columns = read_columns(find_dataset(job, folder), np.arange(REAL), CPU)
    return tuple(_mean(code, one.eval(), columns) for one in (plain, model))  # type: ignore[return-value]


@torch.no_grad()
def _mean(code: "object", model: torch.nn.Module, columns: dict[str, object]) -> float:
    terms = call_loss(code, model, call_batch(code, columns, CPU))  # type: ignore[arg-type]
    assert terms.count is not None
    return terms.total.item() / (float(terms.count) or 1)
