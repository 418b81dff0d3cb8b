"""The score of a run's forecast."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.builders.specs import raw_spec
from train_loop.loop.forecast import ForecastScore
from train_loop.spec import parse

MODELS = json.loads(Path("tests/fixtures/published_steps.json").read_text())["models"]
GIB = 1 << 30


def score(device: str = "NVIDIA H200", **model: Any) -> ForecastScore:
    """Return the score of Qwen3-0.6B with 8 rows of 4,096 tokens, as measured on one H200."""
    spec = parse(
        raw_spec(
            model={"config": MODELS["qwen3-0.6b"], "dtype": "bf16", "gradient_checkpointing": "none"} | model,
            data={"sequence_length": 4096},
            training={"per_device_train_batch_size": 8},
            scaling={"resources_per_worker": {"CPU": 1.0, "GPU": 1.0}},
        )
    )
    return ForecastScore.of(spec, device)


def line(seconds: float, peak: int | None = 50 * GIB) -> dict[str, Any]:
    return {"step_seconds": seconds, "peak_device_bytes": peak}


@pytest.mark.parametrize(("seconds", "inside"), [(0.742, True), (8.0, False), (0.05, False)])
def test_score_compares_the_median_step_with_the_forecast(seconds: float, inside: bool) -> None:
    found = score()
    for one in (line(50.0), *[line(seconds)] * 8, line(20 * seconds, 62 * GIB), line(seconds, None)):
        found.add(one)
    result = found.result()
    assert result is not None
    assert (result["device"], result["inside"], result["steps"]) == ("h200", inside, 10)
    assert result["tokens_per_second"]["measured"] == pytest.approx(8 * 4096 / seconds)
    assert result["device_bytes"]["measured"] == 62 * GIB
    assert 30 * GIB < result["device_bytes"]["planned"] < 80 * GIB


def test_steps_without_a_line_do_not_count() -> None:
    found = score()
    for _ in range(20):
        found.add(None)
    assert found.result() is None


def test_few_steps_have_no_score() -> None:
    found = score()
    for _ in range(5):
        found.add(line(0.7))
    assert found.result() is None
    found.add(line(0.7))
    assert found.result() is not None


@pytest.mark.parametrize("device", ["cpu", "NVIDIA X999"])
def test_unknown_device_has_no_score(device: str) -> None:
    found = score(device)
    for _ in range(20):
        found.add(line(0.7))
    assert found.result() is None
