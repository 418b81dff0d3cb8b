"""Layers compiled with torch.compile: equal results, and reports of what the compiler could not translate."""

from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from tests.support.builders.searches import drawn
from tests.support.builders.specs import TINY, spec
from tests.support.ranks.gradients import Gradients, one_step, random_rows
from tests.support.ranks.ranks import on_ranks
from train_loop.telemetry.compile import CompileWatch

Result = tuple[float, Gradients]
Parts = dict[str, dict[str, Any]]
FINER = {"transformer_layer_cls_to_wrap": ["Qwen3DecoderLayer", "Qwen3MLP"]}
_ALL: dict[str, Parts] = {
    "full": {},
    "Ulysses, finer units": {"strategy": {"ulysses_size": 2, "wrap_policy": FINER}},
    "selective": {"model": {"gradient_checkpointing": "selective"}},
    "budget": {"model": {"gradient_checkpointing": {"budget": 0.3}}},
    "Ulysses": {"strategy": {"ulysses_size": 2}},
    "finer units": {"strategy": {"wrap_policy": FINER}},
    "offload": {"strategy": {"offload_policy": True}},
    "selective, Ulysses": {
        "model": {"gradient_checkpointing": "selective"},
        "strategy": {"ulysses_size": 2, "apply_tiled_mlp": True},
    },
    "every second": {"model": {"gradient_checkpointing": {"every": 2}}},
}
CASES = {name: _ALL[name] for name in drawn([*_ALL], 3)}


def eager_and_compiled() -> dict[str, tuple[list[Result], dict[str, Any]]]:
    """Return an eager and a compiled step of two ranks with the compile reports, for each case."""
    rows, found = random_rows(4, 32, vocab=TINY["vocab_size"], packed=True), {}
    for name, parts in CASES.items():
        strategy = parts.get("strategy", {})
        watch, results = CompileWatch(), []
        for translate in (False, True):
            torch._dynamo.reset()
            counters.clear()
            job = spec(
                model={"config": TINY, "gradient_checkpointing": "full", "compile": translate}
                | (parts.get("model", {}) if translate else {}),
                training={"per_device_train_batch_size": 4 if "ulysses_size" in strategy else 2},
                strategy=strategy,
                scaling={"num_workers": 2},
            )
            results.append(one_step(job, rows))
        found[name] = results, watch.news()
    return found


@pytest.fixture(scope="module")
def found() -> dict[str, tuple[list[Result], dict[str, Any]]]:
    result: dict[str, tuple[list[Result], dict[str, Any]]] = on_ranks(2, eager_and_compiled)[0]
    return result


@pytest.mark.parametrize("case", CASES)
def test_compiled_layers_compute_the_same(found: Any, case: str) -> None:
    (expected_loss, expected), (loss, gradients) = found[case][0]
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    for name, value in expected.items():
        assert (gradients[name] - value).norm() <= 1e-5 * value.norm(), name


@pytest.mark.parametrize("case", CASES)
def test_layers_of_a_kind_have_one_graph_without_breaks(found: Any, case: str) -> None:
    # With tiles, the compiler makes a graph for each layer. A layer that backward recomputes has another graph than one
    # that keeps its activations.
    tiled = _ALL[case].get("strategy", {}).get("apply_tiled_mlp", False)
    graphs = TINY["num_hidden_layers"] if tiled else 2 if case == "every second" else 1
    assert found[case][1] == {"graphs": graphs, "graph_breaks": {}}


def test_function_over_the_recompile_limit_is_reported() -> None:
    watch = CompileWatch()
    watch.news()

    def scaled(x: torch.Tensor, by: int) -> torch.Tensor:
        return x * by + 1

    compiled = torch.compile(scaled, backend="eager", dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=2):
        for by in range(3, 7):
            compiled(torch.ones(2), by)
    news: Any = watch.news()
    assert any("recompile limit" in reason for reason in news["graph_breaks"])


def test_graph_break_is_reported_once_with_its_reason() -> None:
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
