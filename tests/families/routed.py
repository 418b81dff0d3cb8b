"""A step of a mixture of experts with the losses of its routers, compared with transformers' own function."""

import math
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.families.parity import LENGTH, VOCAB, copy_weights, fill, shorten, untrained_first
from tests.support.builders.specs import raw_spec
from tests.support.families.families import small
from tests.support.ranks.gradients import build, divisor, forget_meshes, my_share, random_rows
from train_loop.conformance.measure import largest_difference, whole
from train_loop.data.dataset import IGNORE, Rows
from train_loop.loop.batch import micro_batches
from train_loop.loop.build import build_balance, build_state
from train_loop.loop.objectives.objective import Objective
from train_loop.loop.objectives.routed import RoutedLoss
from train_loop.loop.reduction import PlainReduction
from train_loop.loop.step import StepSums, accumulate, train_step
from train_loop.model.families.causal.experts import experts_of
from train_loop.parallel.mesh import Mesh
from train_loop.spec import JobSpec, parse

BIASES = ("e_score_correction_bias", "expert_bias")
ROWS, SIZE = 8, 2
"""Rows of the step, and of a rank's micro-batch."""


class Case(NamedTuple):
    """A mesh, and settings of a spec."""

    family: str = "qwen3_moe"
    world: int = 1
    strategy: Mapping[str, Any] = {}
    training: Mapping[str, Any] = {}
    model: Mapping[str, Any] = {}
    config: Mapping[str, Any] = {}
    packed: bool = False
    idle: bool = False
    """True if all tokens choose the first two experts."""


def job_of(case: Case) -> JobSpec:
    """Return the spec of a case."""
    model = {"config": small(case.family) | dict(case.config), "dtype": "fp32", **case.model}
    return parse(
        raw_spec(
            model=model,
            data={"sequence_length": LENGTH, "packing": case.packed},
            training={"per_device_train_batch_size": SIZE, **case.training},
            strategy=dict(case.strategy),
            scaling={"num_workers": case.world},
        )
    )


class Found(NamedTuple):
    """Differences from a plain loop, relative to it, and facts of the step."""

    error: float
    named_error: float
    loads: list[list[int]]
    expected_tokens: int
    """Tokens x experts of a token, in each layer."""


class Models(NamedTuple):
    """A model on the existing ranks, and transformers' with the same weights."""

    job: JobSpec
    model: PreTrainedModel
    loss: RoutedLoss
    mesh: Mesh
    plain: Any


def models_of(case: Case) -> Models:
    """Build the models of a case."""
    torch.set_num_threads(1)
    forget_meshes()
    job = job_of(case)
    model, loss, mesh = build(job)
    model.eval()
    torch.manual_seed(0)
    plain: Any = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**job.model.config or {}), dtype=torch.float32
    ).eval()
    fill(plain)
    if case.idle:
        _send_all_to_two(plain)
    copy_weights(plain, model)
    _copy_buffers(plain, model)
    assert isinstance(loss, RoutedLoss)
    return Models(job, model, loss, mesh, plain)


def compare(case: Case) -> Found:
    """Compare a step of a case on the existing ranks with a plain loop on rank 0."""
    job, model, loss, mesh, plain = models_of(case)
    rows = untrained_first(shorten(random_rows(ROWS, LENGTH, vocab=VOCAB, packed=case.packed), packed=case.packed))
    sums = _accumulate(loss, rows, job, mesh)
    found = {name: None if p.grad is None else whole(p.grad) for name, p in model.named_parameters()}
    loads = loss.watch.take_loads()
    if dist.get_rank() > 0:
        return Found(0.0, 0.0, [], 0)
    expected, named = _plainly(plain, rows, job, mesh, chosen=_chosen(loss))
    torch.autograd.backward(expected)
    wanted = {name: p.grad for name, p in plain.named_parameters()}
    error = float((sums.loss - expected.detach()).abs() / expected.detach().abs())
    trained = {name: value for name, value in found.items() if model.get_parameter(name).requires_grad}
    tokens = int(rows.values["length"].sum())
    return Found(
        max(error, largest_difference(trained, {name: wanted[name] for name in trained})),
        max((abs(sums.means[name] - value) / abs(value) for name, value in named.items()), default=0.0),
        loads,
        tokens * _chosen(loss),
    )


class Balanced(NamedTuple):
    """Biases of routers by name after some steps, and tokens of each expert [L, E]; ours, and those by transformers."""

    biases: dict[str, Tensor]
    expected: dict[str, Tensor]
    loads: list[list[int]]
    expected_loads: list[list[int]]
    are_equal: bool
    """True if all ranks have the same biases."""


def balance(case: Case) -> Balanced:
    """Balance the experts of a case in three steps on the existing ranks, of which the second is not finite."""
    job, model, loss, mesh, plain = models_of(case)
    state, reduction = build_state(loss.anatomy, job, mesh, steps=3), PlainReduction(model, mesh)
    state.balance = build_balance(loss, job)
    steps = [
        shorten(random_rows(ROWS, LENGTH, vocab=VOCAB, packed=case.packed, seed=step), packed=case.packed)
        for step in range(3)
    ]
    for step, rows in enumerate(steps):
        batch = my_share(rows, mesh)
        count = math.nan if step == 1 else divisor(batch, mesh)
        micro = micro_batches(batch, SIZE, loss.anatomy, mesh)
        train_step(state, loss, micro, divisor=count, reduction=reduction, max_grad_norm=None)
    found, loads = _biases(model), loss.watch.take_loads()
    lowest = torch.cat([one.flatten() for one in found.values()])
    highest = lowest.clone()
    dist.all_reduce(lowest, op=dist.ReduceOp.MIN)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    expected, expected_loads = _balanced_plainly(plain, steps if dist.get_rank() == 0 else [], job)
    return Balanced(found, expected, loads, expected_loads, torch.equal(lowest, highest))


@torch.no_grad()
def _balanced_plainly(model: Any, steps: Sequence[Rows], job: JobSpec) -> tuple[dict[str, Tensor], list[list[int]]]:
    """Return biases and loads after steps of which the second changes nothing, from single documents."""
    biases, experts, rate = _biases(model), experts_of(model), job.model.router_bias_update
    chosen = [list[Tensor]() for _ in experts]
    for one, its in zip(experts, chosen, strict=True):
        one.register_forward_pre_hook(lambda _, inputs, its=its: its.append(inputs[1].flatten()))
    number = len(next(iter(biases.values())).flatten())
    total = torch.zeros(len(experts), number, dtype=torch.int64)
    for step, rows in enumerate(steps):
        for row, document in ((number, one) for number in range(ROWS) for one in _documents(rows, number)):
            model(input_ids=torch.from_numpy(rows.input_ids[row, document])[None].long(), use_cache=False)
        loads = torch.stack([torch.cat(its).bincount(minlength=number) for its in chosen])
        total += loads
        for its in chosen:
            its.clear()
        for (name, bias), layer in zip(biases.items(), loads.double(), strict=True):
            if step != 1 and not name.startswith(job.model.freeze_module_prefix):
                bias += rate * (layer.mean() - layer).sign().float().view_as(bias)
    return biases, total.tolist()


def _biases(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the biases with which routers choose, which are parameters or buffers, by name in the order of layers."""
    return {name: one for name, one in model.state_dict().items() if name.endswith(BIASES)}


def precision(case: Case) -> tuple[torch.dtype, bool]:
    """Return the dtype of a step's router logits in bf16, and whether all gradients are finite."""
    torch.set_num_threads(1)
    forget_meshes()
    job = job_of(case)
    model, loss, mesh = build(job)
    assert loss.anatomy.experts is not None
    dtypes = list[torch.dtype]()
    loss.anatomy.experts.routers[0].register_forward_hook(lambda _, __, output: dtypes.append(output[0].dtype))
    sums = _accumulate(loss, random_rows(ROWS, LENGTH, vocab=VOCAB, packed=False), job, mesh)
    finite = all(bool(whole(p.grad).isfinite().all()) for p in model.parameters() if p.grad is not None)
    return dtypes[0], finite and bool(sums.loss.isfinite())


def gathered_ahead(case: Case) -> dict[str, tuple[list[str], list[str]]]:
    """Return the units that each unit gathers ahead, in forward and in backward, by name."""
    forget_meshes()
    units = {name: one for name, one in build(job_of(case))[0].named_modules() if isinstance(one, FSDPModule)}
    names = {id(one._get_fsdp_state()): name for name, one in units.items()}
    found = {}
    for name, unit in units.items():
        state = unit._get_fsdp_state()
        ahead = (state._states_to_forward_prefetch, state._states_to_backward_prefetch)
        if any(ahead):
            forward, backward = ([names[id(one)] for one in states] for states in ahead)
            found[name] = (forward, backward)
    return found


def _accumulate(loss: Objective, rows: Rows, job: JobSpec, mesh: Mesh) -> StepSums:
    batch = my_share(rows, mesh)
    micro = micro_batches(batch, job.training.micro_batch, loss.anatomy, mesh)
    reduction = PlainReduction(loss.anatomy.model, mesh)
    scaler = torch.amp.GradScaler(mesh.device.type, enabled=False)
    return accumulate(loss, micro, divisor(batch, mesh), reduction=reduction, scaler=scaler)


def _chosen(loss: Objective) -> int:
    assert loss.anatomy.experts is not None
    return loss.anatomy.experts.chosen


def _send_all_to_two(model: PreTrainedModel) -> None:
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith(("router.bias", "e_score_correction_bias")):
                tensor[:2] += 50.0


def _copy_buffers(source: PreTrainedModel, target: Any) -> None:
    values = dict(source.named_buffers())
    for name, buffer in target.named_buffers():
        if name.endswith("correction_bias") and name in values:
            buffer.copy_(values[name])


def _documents(rows: Rows, row: int) -> Iterator[slice]:
    positions, length = rows.position_ids[row], int(rows.values["length"][row])
    starts = [*(positions[:length] == 0).nonzero()[0].tolist(), length]
    yield from (slice(*pair) for pair in pairwise(starts))


def _plainly(model: Any, rows: Rows, job: JobSpec, mesh: Mesh, *, chosen: int) -> tuple[Tensor, dict[str, float]]:
    """Return loss and named sums of documents that transformers computes one by one, by scope."""
    training, auxiliary = job.training, job.training.router_aux_loss
    per_rank = ROWS // mesh.plan.dp
    scopes: dict[Any, list[tuple[int, slice]]] = defaultdict(list)
    for row in range(ROWS):
        for number, document in enumerate(_documents(rows, row)):
            micro = row % per_rank // SIZE
            scopes[micro if auxiliary.scope == "micro" else (row, number)].append((row, document))
    total, labels = torch.zeros(()), 0
    named: dict[str, Any] = defaultdict(float)
    for documents in scopes.values():
        cross, count, logits = torch.zeros(()), 0, []
        for row, document in documents:
            ids = torch.from_numpy(rows.input_ids[row, document])[None].long()
            out = model(input_ids=ids, use_cache=False, output_router_logits=True)
            targets = torch.from_numpy(rows.labels[row, document])[1:].long()
            cross = cross + F.cross_entropy(out.logits[0, :-1], targets, ignore_index=IGNORE, reduction="sum")
            count += int((targets != IGNORE).sum())
            logits.append(out.router_logits)
        routed = tuple(torch.cat([one.flatten(0, -2) for one in layer]) for layer in zip(*logits, strict=True))
        total, labels = total + cross, labels + count
        if auxiliary.coef:
            aux = _library_loss(model)(routed, routed[0].shape[-1], chosen)
            total = total + auxiliary.coef * count * aux
            named["router_aux_loss"] += count * aux
        if training.router_z_loss:
            z = torch.cat(routed).logsumexp(-1).square().mean()
            total = total + training.router_z_loss * count * z
            named["router_z_loss"] += count * z
        if auxiliary.coef or training.router_z_loss:
            logs = torch.cat(routed).log_softmax(-1)
            named["router_entropy"] += count * -(logs.exp() * logs).sum(-1).mean()
    return total / labels, {name: float(value) / labels for name, value in named.items()}


def _library_loss(model: Any) -> Any:
    return vars(sys.modules[type(model).__module__])["load_balancing_loss_func"]
