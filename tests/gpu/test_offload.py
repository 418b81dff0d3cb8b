"""Offloaded optimizer states: the bits of a run without offloading, and the memory in which they are."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tests.gpu.processes import in_processes
from tests.gpu.test_gradients import QWEN3
from tests.support.builders.specs import spec
from tests.support.ranks.gradients import build, divisor, my_share, random_rows
from train_loop.checkpoint.state_dict import put_back, tensors_of
from train_loop.loop.batch import micro_batches
from train_loop.loop.build import build_state
from train_loop.loop.reduction import PlainReduction
from train_loop.loop.step import train_step
from train_loop.spec import JobSpec

STEPS = 3
Found = dict[str, Any]


def job(offload: bool | str, optimizer: str, *, pin: bool = True) -> JobSpec:
    return spec(
        model={"config": QWEN3, "dtype": "bf16"},
        data={"sequence_length": 64},
        training={"optimizer": optimizer, "max_steps": STEPS, "weight_decay": 0.1, "per_device_train_batch_size": 2},
        strategy={"offload_policy": offload, "pin_memory": pin},
        scaling={"num_workers": dist.get_world_size()},
    )


def trained(offload: bool | str, optimizer: str, pin: bool, reload: bool) -> Found:
    """Train some steps; return the weights, and where tensors are and how much memory they take between steps."""
    device = torch.device("cuda", torch.cuda.current_device())
    built = job(offload, optimizer, pin=pin)
    model, objective, mesh = build(built, device)
    state, batch = build_state(objective.anatomy, built, mesh, steps=STEPS), None
    for step in range(STEPS):
        batch = my_share(random_rows(4, 64, vocab=QWEN3["vocab_size"], packed=True, seed=step), mesh)
        micro = micro_batches(batch, 2, objective.anatomy, mesh)
        train_step(
            state,
            objective,
            micro,
            divisor=divisor(batch, mesh),
            reduction=PlainReduction(model, mesh),
            max_grad_norm=0.3,
        )
        if reload:
            put_back(state, tensors_of(state))
    moments = [one for held in state.optimizers for of in held.state.values() for one in of.values() if one.ndim]
    local = [one.to_local() if isinstance(one, DTensor) else one for one in moments]
    return {
        "weights": {name: one.full_tensor().cpu() for name, one in model.named_parameters()},
        "moments": {(one.device.type, one.is_pinned()) for one in local},
        "parameters": {one.to_local().device.type for one in model.parameters()},
        "bytes": torch.cuda.memory_allocated(),
    }


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "muon"])
def test_only_optimizer_states_are_on_the_host_and_runs_have_the_same_bits(optimizer: str) -> None:
    plain, moved, unpinned = (
        in_processes(1, trained, *arguments)[0]
        for arguments in (
            (False, optimizer, True, False),
            ("optimizer", optimizer, True, True),
            ("optimizer", optimizer, False, False),
        )
    )
    assert (plain["moments"], plain["parameters"]) == ({("cuda", False)}, {"cuda"})
    assert (moved["moments"], moved["parameters"]) == ({("cpu", True)}, {"cuda"})
    assert (unpinned["moments"], unpinned["parameters"]) == ({("cpu", False)}, {"cuda"})
    assert moved["bytes"] < plain["bytes"]
    for found in (moved, unpinned):
        assert [name for name, one in plain["weights"].items() if not torch.equal(found["weights"][name], one)] == []
