"""Training with ranks that share layers: optimizers, averages and settings give the weights of one rank."""

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from tests.families.parity import (
    LENGTH,
    ROWS,
    VOCAB,
    Case,
    alone,
    copy_weights,
    its_model,
    raw_job,
    shorten,
    uneven,
)
from tests.support.ranks.gradients import build, divisor, forget_meshes, mesh_of, my_share, random_rows
from tests.support.ranks.ranks import on_ranks
from tests.support.ranks.waits import Waits
from train_loop.conformance.measure import accumulate_plainly, whole
from train_loop.data.dataset import Rows
from train_loop.loop.batch import StepBatch, micro_batches
from train_loop.loop.build import build_state, build_token_loss
from train_loop.loop.objectives.objective import Objective
from train_loop.loop.reduction import PlainReduction
from train_loop.loop.step import StepResult, train_step
from train_loop.model.families.causal.family import CAUSAL
from train_loop.model.folder import model_shape
from train_loop.model.freeze import freeze
from train_loop.model.parts import own_parts
from train_loop.optim.muon import Muon
from train_loop.parallel.build import build_sharded
from train_loop.parallel.mesh import Mesh
from train_loop.plan import plan_job
from train_loop.spec import JobSpec, parse
from train_loop.state import TrainState
from train_loop.telemetry.timers import ComputeTimer

STEPS, CLIP = 2, 0.3
TOLERANCE = 1e-5
MESH = Case("fsdp 2 x tp 2", 4, tp_size=2)
GROUPS = [{"params": ["*.q_proj.weight", "model.embed_tokens"], "lr_scale": 2.0, "betas": [0.8, 0.9]}]
OPTIMIZERS: dict[str, dict[str, Any]] = {
    # A large epsilon: Adam divides a gradient by its own size, even if it is only rounding.
    "adamw": {"adam_epsilon": 1e-4},
    "sgd": {"learning_rate": 0.1},
    "adafactor": {},
    # Muon iterates in bf16, which amplifies the last bit of a gradient.
    "muon": {"learning_rate": 2e-4},
    # The sign of a gradient near zero depends on its last bit.
    "lion": {"learning_rate": 1e-4, "groups": GROUPS, "layer_decay": 0.9},
    "schedule_free_adamw": {"groups": GROUPS, "lr_scheduler_type": "constant", "ema_decay": None},
}
OTHERS = (
    ("strategy", "offload_policy", True),
    ("strategy", "norm_dtype", "fp32"),
    ("strategy", "wrap_policy", {"min_num_params": 4000}),
    ("model", "freeze_module_prefix", ["model.layers.0.self_attn"]),
)
Weights = dict[str, Tensor]


class Trained(NamedTuple):
    """The results of some steps."""

    losses: list[float]
    norms: list[float]
    weights: Weights
    averages: Weights


def job_of(optimizer: str) -> JobSpec:
    training = {"optimizer": optimizer, "ema_decay": 0.5, "learning_rate": 1e-3} | OPTIMIZERS[optimizer]
    fields = (("training", name, value) for name, value in training.items())
    return parse(raw_job("qwen3", replace(MESH, others=(*OTHERS, *fields)), uneven("qwen3")))


def trained() -> dict[str, dict[str, float]]:
    """Train a model with several optimizers; return the largest differences from the same training on one rank."""
    model, objective, mesh = build(job_of("adamw"))
    rows = shorten(random_rows(ROWS, LENGTH, vocab=VOCAB, packed=False), packed=False)
    batch, found = my_share(rows, mesh), {}
    total = divisor(batch, mesh)
    for optimizer in OPTIMIZERS:
        job = job_of(optimizer)
        plain = its_model(job.model)
        copy_weights(plain, model)
        state = build_state(objective.anatomy, job, mesh, steps=STEPS)
        results = [step_of(state, objective, batch, mesh, total) for _ in range(STEPS)]
        mine = Trained([one.loss for one in results], [one.grad_norm for one in results], *weights_of(state))
        if dist.get_rank() == 0:
            found[optimizer] = differences(mine, trained_alone(plain, job, rows, mesh))
    return found


def step_of(state: TrainState, objective: Objective, batch: StepBatch, mesh: Mesh, total: float) -> StepResult:
    micro, reduction = micro_batches(batch, 2, objective.anatomy, mesh), PlainReduction(state.model, mesh)
    return train_step(state, objective, micro, divisor=total, reduction=reduction, max_grad_norm=CLIP)


def weights_of(state: TrainState) -> tuple[Weights, Weights]:
    named = {name: parameter.detach() for name, parameter in state.model.named_parameters()}
    weights = {name: whole(one).clone() for name, one in named.items()}
    with state.averaged():
        return weights, {name: whole(one).clone() for name, one in named.items()}


def trained_alone(plain: Any, job: JobSpec, rows: Rows, mesh: Mesh) -> Trained:
    """Train transformers' model by a plain loop with the same optimizer on whole weights."""
    freeze(plain, job.model.freeze_module_prefix)
    state, losses, norms = build_state(CAUSAL.anatomy(plain), job, mesh, steps=STEPS), [], []
    for _ in range(STEPS):
        loss = alone(plain, rows)
        torch.autograd.backward(loss)
        norms.append(float(nn.utils.clip_grad_norm_(plain.parameters(), CLIP)))
        losses.append(float(loss.detach()))
        state.apply_gradients()
        state.drop_gradients()
    return Trained(losses, norms, *weights_of(state))


def differences(found: Trained, expected: Trained) -> dict[str, float]:
    """Return the largest relative differences, and how much training has changed the loss."""
    numbers = [*zip(found.losses, expected.losses, strict=True), *zip(found.norms, expected.norms, strict=True)]
    assert found.weights.keys() == expected.weights.keys()
    assert found.averages.keys() == expected.averages.keys()
    return {
        "numbers": max(abs(a - b) / b for a, b in numbers),
        "weights": max(off(found.weights[name], one) for name, one in expected.weights.items()),
        "averages": max(off(found.averages[name], one) for name, one in expected.averages.items()),
        "trained": 1 - expected.losses[-1] / expected.losses[0],
    }


def off(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def split_muon() -> bool:
    """Return whether Muon has the bits of torch's own for matrices of which ranks of two axes have parts."""
    mesh, draw = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp")), torch.Generator().manual_seed(0)
    kinds: list[Placement] = [Shard(0), Shard(1), Replicate()]
    # Of one shape with different parts, unequal parts, and fewer rows than ranks.
    shapes = [(16, 16)] * 6 + [(7, 9)] * 3 + [(3, 8)] * 3
    alone, shared = [nn.Parameter(torch.ones(shape)) for shape in shapes], list[nn.Parameter]()
    shared = [nn.Parameter(spread(one.detach(), mesh, kinds[place % 3])) for place, one in enumerate(alone)]
    optimizers: list[Any] = [
        kind(parameters, lr=0.1, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
        for kind, parameters in ((torch.optim.Muon, alone), (Muon, shared))
    ]
    for _ in range(3):
        for place, (whole_one, part) in enumerate(zip(alone, shared, strict=True)):
            whole_one.grad = torch.randn(whole_one.shape, generator=draw)
            part.grad = spread(whole_one.grad, mesh, kinds[place % 3])
        for optimizer in optimizers:
            optimizer.step()
    same = [
        all(torch.equal(own, one[box]) for own, box in own_parts(part)) for one, part in zip(alone, shared, strict=True)
    ]
    return all(same)


def spread(tensor: Tensor, mesh: DeviceMesh, kind: Placement) -> DTensor:
    """Return a matrix of which ranks have parts by a placement, and of these some rows each, as FSDP2 cuts them."""
    own, ranks = tensor, mesh.get_coordinate() or ()
    for dim, rank in (((kind.dim, ranks[1]),) if isinstance(kind, Shard) else ()) + ((0, ranks[0]),):
        width = -(-own.shape[dim] // 2)
        own = own.narrow(dim, min(rank * width, own.shape[dim]), max(min(width, own.shape[dim] - rank * width), 0))
    rows = _StridedShard(0, split_factor=2) if kind == Shard(0) else Shard(0)
    return DTensor.from_local(
        own.clone().contiguous(), mesh, [rows, kind], run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def waits() -> tuple[list[bool], list[bool]]:
    """Return whether the timer of a step has stopped at each exchange of shared layers, and if it cannot pause."""
    recomputed = replace(MESH, others=(("model", "gradient_checkpointing", "full"),))
    job = parse(raw_job("phi3", recomputed, uneven("phi3")))
    mesh = mesh_of(job)
    sharded = build_sharded(job, mesh)
    objective = build_token_loss(sharded, job, plan_job(job, model_shape(job.model)))
    batch = my_share(random_rows(ROWS, LENGTH, vocab=VOCAB, packed=False), mesh)

    def step() -> list[bool]:
        assert mesh.tp is not None
        found = Waits(mesh.tp.get_group().group_name, sharded.timer)
        with found:
            accumulate_plainly(objective, micro_batches(batch, 2, sharded.anatomy, mesh), 1, mesh)
        assert sharded.timer.take() > 0
        assert all(found.computed), "the timer stops too long"
        return found.stopped

    stopped = step()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ComputeTimer, "pause", lambda _: None)
        return stopped, step()


def overflowed() -> tuple[list[tuple[StepResult, float]], float]:
    """Return the results of steps in fp16 and the scaler's factor after each, and the loss of one rank in fp32."""
    job = parse(raw_job("qwen3", replace(MESH, others=(("model", "dtype", "fp16"),)), uneven("qwen3")))
    model, objective, mesh = build(job)
    plain, rows = its_model(job.model), random_rows(ROWS, LENGTH, vocab=VOCAB, packed=False)
    copy_weights(plain, model)
    batch, state = my_share(rows, mesh), build_state(objective.anatomy, job, mesh, steps=2)
    total, results = divisor(batch, mesh), []
    for factor in (2.0**40, 2.0**10):
        state.scaler = GradScaler("cpu", init_scale=factor)
        result = step_of(state, objective, batch, mesh, total)
        results.append((result, state.scaler.get_scale()))
    return results, float(alone(plain, rows).detach())


def everything() -> dict[str, Any]:
    torch.set_num_threads(1)
    forget_meshes()
    return {
        "trained": trained(),
        "muon": split_muon(),
        "waits": waits(),
        "overflowed": overflowed(),
    }


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return on_ranks(4, everything)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_steps_give_losses_weights_and_averages_of_one_rank(found: list[dict[str, Any]], optimizer: str) -> None:
    one = found[0]["trained"][optimizer]
    assert one["trained"] > 100 * TOLERANCE
    assert {name: value for name, value in one.items() if name != "trained" and not value < TOLERANCE} == {}


def test_muon_has_the_bits_of_torchs_on_whole_matrices(found: list[dict[str, Any]]) -> None:
    assert [rank["muon"] for rank in found] == [True] * 4


def test_timer_of_a_rank_stops_in_exchanges_of_shared_layers(found: list[dict[str, Any]]) -> None:
    for rank in found:
        stopped, running = rank["waits"]
        assert len(stopped) > 20
        assert all(stopped)
        assert not all(running)


def test_ranks_skip_the_same_overflowing_steps(found: list[dict[str, Any]]) -> None:
    for rank in found:
        results, exact = rank["overflowed"]
        skipped, applied = [(one.applied, one.overflow, factor) for one, factor in results]
        assert (skipped, applied) == ((False, True, 2.0**39), (True, False, 2.0**10))
        assert [one.loss for one, _ in results] == pytest.approx([exact] * 2, rel=0.01)
