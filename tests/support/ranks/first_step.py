"""The first step of a job and an evaluation, on the existing ranks, as the loop computes them."""

from pathlib import Path

import numpy as np
import torch.distributed as dist
from torch import Tensor
from torch.amp import GradScaler

from tests.support.ranks.gradients import forget_meshes, mesh_of
from train_loop.conformance.measure import whole
from train_loop.data.masking import mask_rows
from train_loop.data.prepare.cache import evaluation_spec, find_dataset
from train_loop.data.stream.local import read_rows
from train_loop.loop.batch import StepBatch, micro_batches, share_rows
from train_loop.loop.build import build_objective
from train_loop.loop.evaluate import Evaluation, evaluate
from train_loop.loop.objectives.objective import Objective
from train_loop.loop.reduction import PlainReduction
from train_loop.loop.step import accumulate
from train_loop.model.folder import model_shape
from train_loop.parallel.build import build_sharded
from train_loop.parallel.mesh import Mesh
from train_loop.plan import plan_job
from train_loop.spec import JobSpec


def divisor_of(objective: Objective, batch: StepBatch, mesh: Mesh) -> float | None:
    """Return a step's divisor over all ranks; None if the objective counts in its terms. A collective call."""
    share = objective.divisor(batch)
    if share is None:
        return None
    total = share * mesh.leads
    dist.all_reduce(total)
    return float(total.item())


def step_and_evaluation(job: JobSpec, folder: Path) -> tuple[float, dict[str, Tensor], Evaluation]:
    """Return the loss and gradients of a step over the first rows of the data, and an evaluation."""
    forget_meshes()
    mesh, dataset = mesh_of(job), find_dataset(job, folder)
    sharded, plan = build_sharded(job, mesh), plan_job(job, model_shape(job.model))
    objective, reduction = build_objective(sharded, job, plan, dataset), PlainReduction(sharded.model, mesh)
    assert job.training.global_batch_size is not None
    count = job.training.global_batch_size // mesh.plan.dp
    rows = mask_rows(read_rows(dataset, np.arange(mesh.data_rank * count, (mesh.data_rank + 1) * count)), dataset, 0)
    batch = share_rows(rows if mesh.leads else None, count=count, dataset=dataset, mesh=mesh)
    divisor = divisor_of(objective, batch, mesh)
    assert divisor is not None
    sums = accumulate(
        objective,
        micro_batches(batch, job.training.micro_batch, sharded.anatomy, mesh),
        divisor,
        reduction=reduction,
        scaler=GradScaler(enabled=False),
    )
    gradients = {name: whole(p.grad) for name, p in sharded.model.named_parameters() if p.grad is not None}
    of_eval = evaluation_spec(job, dataset)
    assert of_eval is not None
    found = evaluate(objective, find_dataset(of_eval, folder), reduction, per_device=2)
    assert isinstance(found, Evaluation)
    return sums.loss.item(), gradients, found
