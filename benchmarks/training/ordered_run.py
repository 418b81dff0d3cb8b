"""Steps of the default and of `reproducible: any_size` in the same ranks, one of each in turn, on the same rows.

`torchrun -m benchmarks.training.ordered_run OUT SPEC STEPS`. Rank 0 writes OUT: the seconds of each step, by kind.
"""

import json
import sys
from pathlib import Path
from time import perf_counter

import numpy as np
import torch.distributed as dist

from benchmarks.training.ordered import DEFAULT, ORDERED
from train_loop.data.columns import token_columns
from train_loop.data.dataset import Dataset, Part, Rows
from train_loop.loop.batch import micro_batches, share_rows
from train_loop.loop.build import build_state, build_token_loss
from train_loop.loop.reduction import build_reduction
from train_loop.loop.step import train_step
from train_loop.model.folder import model_shape
from train_loop.parallel.build import build_sharded
from train_loop.parallel.mesh import Mesh, build_mesh, local_device
from train_loop.plan import plan_job
from train_loop.spec import JobSpec, parse_text
from train_loop.system.exit import leave


class Loop:
    """A model and its optimizer, for one kind of sums."""

    def __init__(self, spec: JobSpec, mesh: Mesh) -> None:
        self._spec, self._mesh = spec, mesh
        plan = plan_job(spec, model_shape(spec.model))
        sharded = build_sharded(spec, mesh)
        self._vocabulary = plan.shape.vocab
        self._count = plan.batch.per_data_rank
        self._objective = build_token_loss(sharded, spec, plan)
        self._state = build_state(sharded.anatomy, spec, mesh, steps=1000)
        self._reduction = build_reduction(sharded.model, plan.tree, mesh, seed=spec.training.seed)

    def step(self, seed: int) -> float:
        """Train one step on random rows; return its seconds."""
        length = self._spec.data.sequence_length
        draw = np.random.default_rng([seed, self._mesh.data_rank])
        ids = draw.integers(0, self._vocabulary, (self._count, length)).astype(np.int32)
        positions = np.tile(np.arange(length, dtype=np.int32), (self._count, 1))
        values = (np.arange(self._count), np.full(self._count, length), ids, ids, positions)
        rows = Rows({column.name: value for column, value in zip(token_columns(), values, strict=True)})
        dataset = Dataset(
            fingerprint="random", parts=(Part(fingerprint="random", files=(), tokens=0),), sequence_length=length
        )
        dist.barrier()
        begun = perf_counter()
        batch = share_rows(rows, count=self._count, dataset=dataset, mesh=self._mesh)
        size = self._spec.training.micro_batch
        micro = micro_batches(batch, size, self._objective.anatomy, self._mesh)
        train_step(
            self._state,
            self._objective,
            micro,
            divisor=float(self._count * self._mesh.plan.dp * (length - 1)),
            reduction=self._reduction,
            max_grad_norm=self._spec.training.max_grad_norm,
        )
        return perf_counter() - begun


def main() -> None:
    """Run the steps, then write their seconds."""
    out, spec, steps = Path(sys.argv[1]), parse_text(Path(sys.argv[2]).read_bytes()), int(sys.argv[3])
    dist.init_process_group("gloo")
    mesh = build_mesh(plan_job(spec, model_shape(spec.model)).mesh, local_device(0))
    ordered = spec.model_copy(update={"training": spec.training.model_copy(update={"reproducible": ORDERED})})
    loops = {DEFAULT: Loop(spec, mesh), ORDERED: Loop(ordered, mesh)}
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    for step in range(steps):
        # Which kind is first alternates, too.
        for name in sorted(loops, reverse=bool(step % 2)):
            seconds[name].append(loops[name].step(step))
    if dist.get_rank() == 0:
        out.write_text(json.dumps(seconds))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    leave()
