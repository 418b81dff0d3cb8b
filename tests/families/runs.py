"""Whole runs of a family's small model on the existing ranks: undisturbed, or lost, resized and resumed."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.tensor import DTensor

from tests.families.parity import CASES, VOCAB, Case, Settings, raw_job
from tests.support.ranks.gradients import divisor, forget_meshes, mesh_of, my_share, random_rows
from train_loop.data.dataset import Rows
from train_loop.data.prepare.cache import find_dataset
from train_loop.data.prepare.pointer import pin
from train_loop.data.stream.local import StreamPlan, local_stream
from train_loop.loop.batch import MicroBatch, micro_batches
from train_loop.loop.build import build_state, build_token_loss
from train_loop.loop.reduction import PlainReduction
from train_loop.loop.session import Session
from train_loop.loop.step import train_step
from train_loop.parallel.build import build_sharded
from train_loop.plan import MeshPlan, ModelShape, plan_job
from train_loop.run_dir import RunDir, Stop
from train_loop.spec import JobSpec, parse
from train_loop.train import train

STEPS, BATCH = 5, 4


class Leg(NamedTuple):
    """An attempt of a run: its mesh, and the step after which it stops."""

    case: Case
    stops_at: int = STEPS
    checkpoint: bool = True
    """False if its last steps are lost, as after a kill."""


UNDISTURBED = (Leg(CASES["one rank, plain"]),)
DISTURBED = (Leg(Case("FSDP 2", 2), stops_at=3, checkpoint=False), Leg(CASES["HSDP 2 x 2, plain"]))
"""The first attempt leaves the checkpoint of step 2 and a third step that no checkpoint contains."""


def job_of(family: str, settings: Settings, leg: Leg, data: Path) -> JobSpec:
    """Return the spec of an attempt."""
    raw = raw_job(family, leg.case, settings)
    config = raw["model"]["config"]
    # Dropout depends on the number of ranks.
    raw["model"]["config"] = config | {name: 0.0 for name, value in config.items() if "drop" in name and value}
    raw["data"] |= {"train": {"path": str(data)}, "columns": {"input_ids": "ids"}, "shuffle": True}
    raw["training"] = {"max_steps": STEPS, "global_batch_size": BATCH, "max_grad_norm": 0.3, "weight_decay": 0.1}
    raw["training"] |= {"learning_rate": 1e-3, "audit_samples": True}
    raw["checkpoint"] = {"every_steps": 2}
    return parse(raw)


def train_leg(family: str, settings: Settings, leg: Leg, data: Path, folder: Path, attempt: int) -> str:
    """Train an attempt from the newest checkpoint of a run; return its result."""
    torch.set_num_threads(1)
    job, run_dir = job_of(family, settings, leg, data), RunDir(folder)

    def stopped_stream(plan: StreamPlan, mesh: MeshPlan, rank: int) -> Iterator[Rows | None]:
        for step, rows in enumerate(local_stream(plan, mesh, rank), start=plan.start // BATCH):
            if step == leg.stops_at and rank == 0:
                run_dir.write_stop(Stop(mode="resize", checkpoint=leg.checkpoint))
            yield rows

    dataset = find_dataset(job, folder)
    if dist.get_rank() == 0:
        run_dir.write_spec(job)
        pin(dataset, run_dir.data)
    session = Session(dist.get_rank(), dist.get_world_size(), 0, attempt, run_dir, stopped_stream)
    return train(job, session, dataset).result


class Memory(NamedTuple):
    """Bytes of this rank in a step, by kind, and at the step's peak."""

    parameters: int
    gradients: int
    optimizer: int
    peak: int
    used: float
    """Share of the parameters that get gradients; BART's decoder has some for an encoder that is not there."""


def measure_memory(family: str, settings: Settings, shape: ModelShape) -> tuple[dict[str, int], Memory]:
    """Return the bytes by term of the plan, and those of a second step with two micro-batches on the existing ranks."""
    torch.set_num_threads(1)
    forget_meshes()
    job = default_job(family, settings, world=dist.get_world_size())
    plan, mesh = plan_job(job, shape), mesh_of(job)
    sharded = build_sharded(job, mesh)
    state, loss = build_state(sharded.anatomy, job, mesh, steps=2), build_token_loss(sharded, job, plan)
    reduction = PlainReduction(sharded.model, mesh)
    batch = my_share(random_rows(4 * mesh.plan.dp, 32, vocab=VOCAB, packed=False), mesh)
    seen, reached, tracker = list[int](), set[int](), MemTracker()

    def batches() -> Iterator[MicroBatch]:
        for one in micro_batches(batch, 2, sharded.anatomy, mesh):
            tracker.reset_mod_stats()
            yield one
        seen.append(_bytes(one.grad for one in state.model.parameters()))
        reached.update(id(one) for one in state.model.parameters() if one.grad is not None)

    def step() -> None:
        count = divisor(batch, mesh)
        train_step(state, loss, batches(), divisor=count, reduction=reduction, max_grad_norm=None)

    step()
    tracker.track_external(state.model, *state.optimizers)
    with tracker:
        step()
    moments = (one for optimizer in state.optimizers for moment in optimizer.state.values() for one in moment.values())
    peak = max(kinds["Total"] for kinds in tracker.get_tracker_snapshot("peak").values())
    parameters = list(state.model.parameters())
    used = sum(one.numel() for one in parameters if id(one) in reached) / sum(one.numel() for one in parameters)
    found = Memory(_bytes(parameters), seen[-1], _bytes(moments), peak, used)
    return {term.name: term.bytes for term in plan.memory}, found


def default_job(family: str, settings: Settings, *, world: int) -> JobSpec:
    """Return a spec that keeps the default for activations."""
    raw = raw_job(family, CASES["one rank, plain"], settings)
    raw["model"].pop("gradient_checkpointing")
    raw["scaling"] = {"num_workers": world}
    return parse(raw)


def _bytes(tensors: Any) -> int:
    local = (one.to_local() if isinstance(one, DTensor) else one for one in tensors if isinstance(one, Tensor))
    return sum(one.nbytes for one in local if one.ndim)
