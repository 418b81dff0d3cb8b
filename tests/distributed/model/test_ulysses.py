"""Sequence parallel attention: the exchange inverts itself, and models that bypass it are detected.

Several models in one process, each with its own mesh or without Ulysses, do not change each other's results.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.builders.specs import TINY, spec
from tests.support.ranks.gradients import Gradients, build, divisor, my_share, random_rows
from tests.support.ranks.ranks import on_ranks
from train_loop.conformance.measure import accumulate_plainly, whole
from train_loop.errors import ModelError
from train_loop.loop.batch import micro_batches
from train_loop.model.families.causal.family import CAUSAL
from train_loop.model.families.causal.probe import probe
from train_loop.parallel.ulysses import apply_ulysses, heads_to_seq, seq_to_heads
from train_loop.telemetry.timers import ComputeTimer


def exchange() -> dict[str, bool]:
    """Return facts about the exchange of [B, H, T/P, D] = [2, 4, 3, 5] slices over two ranks."""
    group, rank, ranks = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    assert group is not None
    whole = torch.randn(2, 4, 3 * ranks, 5, generator=torch.Generator().manual_seed(0))
    mine = whole.chunk(ranks, dim=2)[rank].clone().requires_grad_()
    heads = seq_to_heads(mine, group)
    back = heads_to_seq(heads, group)
    weight = torch.randn(back.shape, generator=torch.Generator().manual_seed(rank))
    torch.autograd.backward((back * weight).sum())
    assert mine.grad is not None
    return {
        "whole sequence, some heads": torch.equal(heads, whole.chunk(ranks, dim=1)[rank]),
        "there and back": torch.equal(back, mine),
        "gradients come back too": torch.equal(mine.grad, weight),
    }


@pytest.fixture(scope="module")
def facts() -> list[dict[str, bool]]:
    return on_ranks(2, exchange)


@pytest.mark.parametrize("fact", ["whole sequence, some heads", "there and back", "gradients come back too"])
def test_exchange_swaps_sequence_and_heads_and_inverts_itself(facts: list[dict[str, bool]], fact: str) -> None:
    assert [rank[fact] for rank in facts] == [True, True]


def partly_frozen(checkpointing: str) -> float:
    """Return the loss of a step whose lower layer has no backward pass, and thus fewer exchanges."""
    parts = {
        "config": TINY | {"num_hidden_layers": 3},
        "freeze_module_prefix": ["model.embed_tokens", "model.layers.0"],
        "gradient_checkpointing": checkpointing,
    }
    job = spec(model=parts, data={"sequence_length": 32}, strategy={"ulysses_size": 2}, scaling={"num_workers": 2})
    _, loss, mesh = build(job)
    batch = my_share(random_rows(4, 32, vocab=TINY["vocab_size"], packed=True), mesh)
    micro = micro_batches(batch, job.training.micro_batch, loss.anatomy, mesh)
    return accumulate_plainly(loss, micro, divisor(batch, mesh), mesh).item()


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_layers_without_a_backward_pass_do_not_count_as_bypass(checkpointing: str) -> None:
    assert all(loss > 0 for loss in on_ranks(2, partly_frozen, checkpointing))


def bypassed() -> str:
    """Return the error of the check for a model whose attention bypassed the exchange."""
    group = dist.group.WORLD
    assert group is not None
    anatomy = CAUSAL.build(spec(model={"config": TINY}).model)
    ulysses = apply_ulysses(anatomy, group, ComputeTimer(torch.device("cpu")), probe(anatomy).attention)
    assert ulysses is not None
    try:
        ulysses.check_active(sequence_length=32)
    except ModelError as error:
        return str(error)
    return ""


def test_model_that_bypasses_the_registry_is_rejected() -> None:
    messages: list[Any] = on_ranks(2, bypassed)
    assert all(
        "Ulysses is not active in all layers" in message and "choose ulysses_size: 1" in message for message in messages
    )


class Model:
    """A model of its own seed and mesh, with one micro-batch."""

    def __init__(self, ulysses_size: int) -> None:
        job = spec(
            # Backward passes call the attention function again.
            model={"config": TINY, "dtype": "fp32", "gradient_checkpointing": "full"},
            data={"sequence_length": 32},
            training={"seed": ulysses_size, "global_batch_size": 4},
            strategy={"ulysses_size": ulysses_size},
            scaling={"num_workers": 4},
        )
        self.model, self.loss, mesh = build(job)
        share = my_share(random_rows(4, 32, vocab=TINY["vocab_size"], packed=True), mesh)
        self._divisor = divisor(share, mesh)
        (self._batch,) = micro_batches(share, len(share.samples), self.loss.anatomy, mesh)

    def forward(self) -> Tensor:
        return self.loss(self._batch).total / self._divisor

    def backward(self, loss: Tensor) -> Gradients:
        """Return the gradients, and free them."""
        torch.autograd.backward(loss)
        gradients = {name: whole(p.grad) for name, p in self.model.named_parameters()}
        self.model.zero_grad()
        return gradients | {"loss": loss.detach()}


def alone(ulysses_size: int) -> Gradients:
    model = Model(ulysses_size)
    return model.backward(model.forward())


def interleaved() -> list[tuple[int, Gradients]]:
    """Return the losses and gradients of four models, each with its ulysses_size, as the passes alternate."""
    found: list[tuple[int, Gradients]] = []
    models: dict[Model, int] = {}

    def build_one(ulysses_size: int) -> Model:
        model = Model(ulysses_size)
        models[model] = ulysses_size
        return model

    def backward(model: Model, loss: Tensor) -> None:
        found.append((models[model], model.backward(loss)))

    first, plain = build_one(2), build_one(1)
    losses = [first.forward(), plain.forward()]
    backward(first, losses[0])
    backward(plain, losses[1])
    loss = first.forward()
    third = build_one(4)
    # The first model recomputes its forward pass after another has been built.
    backward(first, loss)
    # The last model has the mesh of the first.
    for order in ((third, plain, first), (build_one(2), first, third)):
        waiting = [(model, model.forward()) for model in order]
        for model, loss in waiting:
            backward(model, loss)
    return found


def test_models_with_other_meshes_compute_what_each_computes_alone() -> None:
    expected = {size: on_ranks(4, alone, size) for size in (1, 2, 4)}
    for rank, found in enumerate(on_ranks(4, interleaved)):
        assert [size for size, _ in found] == [2, 1, 2, 4, 1, 2, 2, 2, 4]
        for number, (size, gradients) in enumerate(found):
            reference = expected[size][rank]
            assert gradients.keys() == reference.keys()
            for name, gradient in gradients.items():
                assert torch.equal(gradient, reference[name]), f"pass {number}, ulysses_size={size}: {name}"
