"""Several models in one process, each with its own mesh or without Ulysses: none changes the results of another."""

import torch
from torch import Tensor

from tests.support.builders.specs import TINY, spec
from tests.support.ranks.gradients import Gradients, build, divisor, my_share, random_rows, whole
from tests.support.ranks.ranks import on_ranks
from train_loop.loop.batch import micro_batches


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
        (self._batch,) = micro_batches(share, len(share.samples), self.model, mesh)

    def forward(self) -> Tensor:
        return self.loss(self._batch) / self._divisor

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
