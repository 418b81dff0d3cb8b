"""Peaks of steps with each kind of recomputation, compared with the plan."""

from typing import Any

import pytest
import torch

from tests.support.builders.specs import TINY, raw_spec
from tests.support.ranks.gradients import divisor, forget_meshes, mesh_of, my_share, random_rows
from tests.support.ranks.ranks import on_ranks
from train_loop.conformance.measure import measure_memory
from train_loop.loop.batch import micro_batches
from train_loop.loop.build import build_state, build_token_loss
from train_loop.model.folder import model_shape
from train_loop.parallel.build import build_sharded
from train_loop.plan import plan_job
from train_loop.spec import parse

LAYERS, TOKENS = 6, 256
KINDS: dict[str, Any] = {"none": "none", "full": "full", "selective": "selective", "every 2": {"every": 2}}
PACKED = {f"{name}, packed": how for name, how in KINDS.items() if name in ("none", "every 2")}
OF_FORWARD = ("gathered_parameters", "activations", "attention_mask", "logits")


def bytes_of(how: Any, *, packed: bool) -> tuple[int, int]:
    """Return the planned and the measured bytes of a step, beyond weights, gradients and optimizer."""
    config = TINY | {"num_hidden_layers": LAYERS, "max_position_embeddings": TOKENS}
    raw = raw_spec(
        model={"config": config, "gradient_checkpointing": how},
        data={"sequence_length": TOKENS, "packing": packed},
        training={"per_device_train_batch_size": 4},
    )
    job = parse(raw)
    mesh, plan = mesh_of(job), plan_job(job, model_shape(job.model))
    sharded = build_sharded(job, mesh)
    state, objective = build_state(sharded.anatomy, job, mesh, steps=2), build_token_loss(sharded, job, plan)
    batch = my_share(random_rows(4, TOKENS, vocab=TINY["vocab_size"], packed=packed), mesh)
    found = measure_memory(
        state, objective, lambda: micro_batches(batch, 4, sharded.anatomy, mesh), divisor(batch, mesh), mesh
    )
    planned = sum(term.bytes for term in plan.memory if term.name in OF_FORWARD)
    return planned, found.peak - found.parameters - found.gradients - found.optimizer


def all_bytes() -> dict[str, tuple[int, int]]:
    torch.set_num_threads(1)
    forget_meshes()
    return {name: bytes_of(how, packed=name in PACKED) for name, how in (KINDS | PACKED).items()}


@pytest.fixture(scope="module")
def found() -> dict[str, tuple[int, int]]:
    result: dict[str, tuple[int, int]] = on_ranks(1, all_bytes)[0]
    return result


@pytest.mark.parametrize("kind", KINDS | PACKED)
def test_peak_is_that_of_the_plan(found: dict[str, tuple[int, int]], kind: str) -> None:
    planned, peak = found[kind]
    assert planned == pytest.approx(peak, rel=0.1)


def test_each_kind_saves_memory(found: dict[str, tuple[int, int]]) -> None:
    peaks = [found[name][1] for name in ("none", "every 2", "selective", "full")]
    assert peaks == sorted(peaks, reverse=True)
