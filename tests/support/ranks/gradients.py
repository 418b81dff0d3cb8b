"""One accumulated step of a spec on the existing ranks: its loss and every full gradient."""

from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from train_loop.conformance.measure import accumulate_plainly, whole
from train_loop.data.columns import token_columns
from train_loop.data.dataset import IGNORE, Dataset, Part, Rows
from train_loop.loop.batch import StepBatch, micro_batches, share_rows
from train_loop.loop.build import build_token_loss, route
from train_loop.loop.objectives.objective import Objective
from train_loop.loop.objectives.token_cross_entropy import total_weight
from train_loop.model.folder import model_shape
from train_loop.parallel.build import build_sharded
from train_loop.parallel.mesh import Mesh, build_mesh
from train_loop.plan import plan_job
from train_loop.spec import JobSpec

Gradients = dict[str, Tensor]
CPU = torch.device("cpu")
_MESHES: dict[Any, Mesh] = {}


def random_rows(count: int, length: int, *, vocab: int, packed: bool, seed: int = 0) -> Rows:
    """Return samples with untrained prompts, one fully untrained sample, and several documents each if packed."""
    draw = np.random.default_rng(seed)
    ids = draw.integers(0, vocab, (count, length)).astype(np.int32)
    labels, positions = ids.copy(), np.zeros_like(ids)
    for row in range(count):
        cuts = sorted({0, *draw.integers(1, length, row % 4 if packed else 0).tolist(), length})
        positions[row] = np.concatenate([np.arange(b - a) for a, b in pairwise(cuts)])
        labels[row, : draw.integers(0, length // 2)] = IGNORE
    labels[count // 2] = IGNORE
    return token_rows(ids, labels, positions)


def token_rows(ids: Any, labels: Any, positions: Any) -> Rows:
    """Return rows of tokens without padding: samples 0, 1, ..."""
    count, length = ids.shape
    values = (np.arange(count), np.full(count, length), ids, labels, positions)
    return Rows({column.name: value for column, value in zip(token_columns(), values, strict=True)})


def replaced(rows: Rows, **values: Any) -> Rows:
    """Return the rows with other values of some columns, or with weights."""
    return Rows({**rows.values, **values})


def weigh(rows: Rows) -> Rows:
    """Return the rows with a weight per token, which depends only on the sample."""
    length = rows.input_ids.shape[1]
    drawn = [np.random.default_rng(sample + 1).choice([0, 0.25, 0.7, 1, 3], length) for sample in rows.samples]
    return replaced(rows, weights=np.array(drawn, np.float32))


def build(job: JobSpec, device: torch.device = CPU) -> tuple[PreTrainedModel, Objective, Mesh]:
    """Build the model of a spec on its mesh, with its weights, and its objective."""
    mesh = mesh_of(job, device)
    sharded = build_sharded(job, mesh)
    loss = build_token_loss(sharded, job, plan_job(job, model_shape(job.model)))
    return sharded.model, route(loss, job, mesh), mesh


def one_step(job: JobSpec, rows: Rows, device: torch.device = CPU) -> tuple[float, Gradients]:
    """Return the loss of all rows over all ranks, and the gradients in the parameters."""
    model, loss, mesh = build(job, device)
    batch = my_share(rows, mesh)
    micro = micro_batches(batch, job.training.micro_batch, loss.anatomy, mesh)
    once = job.strategy.gradient_sync == "last"
    mean = accumulate_plainly(loss, micro, divisor(batch, mesh), mesh, once=once)
    return mean.item(), {name: whole(p.grad) for name, p in model.named_parameters()}


def mesh_of(job: JobSpec, device: torch.device = CPU) -> Mesh:
    """Return the mesh of a spec; specs with the same mesh share its groups."""
    plan, wholes = plan_job(job, model_shape(job.model)).mesh, bool(job.strategy.ignored_params)
    key = plan, device, wholes
    if key not in _MESHES:
        _MESHES[key] = build_mesh(plan, device, wholes=wholes)
    return _MESHES[key]


def forget_meshes() -> None:
    """Forget the meshes of a former group of ranks."""
    _MESHES.clear()


def my_share(rows: Rows, mesh: Mesh) -> StepBatch:
    """Return this rank's part of the rows."""
    count = len(rows.samples) // mesh.plan.dp
    mine = rows.slice(mesh.data_rank * count, (mesh.data_rank + 1) * count)
    dataset = dataset_of(rows)
    return share_rows(mine if mesh.leads else None, count=count, dataset=dataset, mesh=mesh)


def dataset_of(rows: Rows) -> Dataset:
    """Return the dataset description of these rows."""
    weights = None if rows.weights is None else "weight"
    part = Part(fingerprint="x", files=(), tokens=0, weights=weights)
    return Dataset(fingerprint="x", parts=(part,), sequence_length=rows.input_ids.shape[1])


def divisor(batch: StepBatch, mesh: Mesh) -> float:
    """Return the divisor of the loss over all ranks."""
    share = total_weight(batch.labels, batch.weights) * mesh.leads
    dist.all_reduce(share)
    return share.item()
