"""Layers that torch.compile has translated compute the same, and what the compiler could not do is said."""

from typing import Any

import pytest
import torch

from tests.support.gradients import Gradients, one_step, random_rows
from tests.support.ranks import on_ranks
from tests.support.specs import TINY, spec
from train_loop.parallel.compile import CompileWatch

Result = tuple[float, Gradients]


def eager_and_compiled() -> tuple[list[Result], dict[str, Any]]:
    """A step of two ranks that share each sequence, both ways, and what the watch tells of it."""
    rows, watch, results = random_rows(4, 32, vocab=TINY["vocab_size"], packed=True), CompileWatch(), []
    for translate in (False, True):
        job = spec(
            model={"config": TINY, "gradient_checkpointing": "full", "compile": translate},
            training={"per_device_train_batch_size": 4},
            strategy={"ulysses_size": 2},
            scaling={"num_workers": 2},
        )
        results.append(one_step(job, rows))
    return results, watch.news()


@pytest.fixture(scope="module")
def found() -> tuple[list[Result], dict[str, Any]]:
    result: tuple[list[Result], dict[str, Any]] = on_ranks(2, eager_and_compiled)[0]
    return result


def test_compiled_layers_compute_the_same(found: Any) -> None:
    (expected_loss, expected), (loss, gradients) = found[0]
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    for name, value in expected.items():
        assert (gradients[name] - value).norm() <= 1e-5 * value.norm(), name


def test_one_graph_serves_all_layers_without_a_break(found: Any) -> None:
    assert found[1] == {"graphs": 1, "graph_breaks": {}}


def test_a_graph_break_is_told_once_with_its_reason() -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        torch._dynamo.graph_break()
        return x * 2

    watch = CompileWatch()
    watch.news()
    torch.compile(broken, backend="eager")(torch.ones(2))
    news: Any = watch.news()
    assert any("graph_break" in reason for reason in news["graph_breaks"])
    assert watch.news() == {}
