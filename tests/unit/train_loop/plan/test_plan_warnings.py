"""Warnings of plans about settings that are rarely meant: long sequences, and large learning rates."""

from typing import Any

import pytest
from transformers import AutoConfig

from tests.support.builders.specs import TINY, may_read, raw_spec
from train_loop.model.families.causal.positions import rotated_positions
from train_loop.model.folder import model_shape
from train_loop.plan import plan_job
from train_loop.preflight.model import check_model
from train_loop.spec import parse

SHORT = TINY | {"max_position_embeddings": 48}


def test_sequence_beyond_the_positions_of_a_config_is_told() -> None:
    job = parse(raw_spec(model={"config": SHORT}, data={"sequence_length": 64, "packing": False}))
    shape, problems = check_model(job, may_read())
    assert shape is not None, problems
    assert plan_job(job, shape).warnings == (
        "sequences of up to 64 tokens are longer than the 48 positions of the model's config "
        "(max_position_embeddings), for which its rotations of queries and keys are made; choose a smaller "
        "data.sequence_length, or scale them in the config (rope_parameters)",
    )
    fitting = parse(raw_spec(model={"config": SHORT}, data={"sequence_length": 48, "packing": False}))
    assert plan_job(fitting, shape).warnings == ()


@pytest.mark.parametrize(
    ("family", "config", "positions"),
    [
        ("qwen3", {}, 48),
        ("qwen3", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, 96),
        ("qwen3", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, 96),
        ("qwen3", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}}, 64),
        ("modernbert-decoder", {}, 48),
        ("falcon", {}, 48),
        ("falcon", {"alibi": True}, None),
        ("jamba", {}, None),
        *((family, {}, None) for family in ("bloom", "mamba", "mpt", "rwkv")),
    ],
)
def test_positions_of_a_config_count_with_their_scale(family: str, config: dict[str, Any], positions: int) -> None:
    stated = {} if family in ("bloom", "mamba", "mpt", "rwkv") else {"max_position_embeddings": 48}
    assert rotated_positions(AutoConfig.for_model(family, **stated, **config)) == positions


@pytest.mark.parametrize(
    ("training", "told"),
    [
        ({"learning_rate": 3.0}, ["training.learning_rate=3 is unusually large for optimizer=adamw, whose rates are"]),
        ({"learning_rate": 3.0, "optimizer": "sgd"}, []),
        ({"learning_rate": 30.0, "optimizer": "sgd"}, ["training.learning_rate=30 is unusually large for optimizer=s"]),
        ({"learning_rate": 0.1}, []),
        ({"groups": [{"params": ["lm_head"], "learning_rate": 3.0}]}, ["training.groups.0.learning_rate=3 is unusual"]),
        ({"learning_rate": 0.02, "optimizer": "muon"}, []),
    ],
)
def test_large_learning_rate_is_told(training: dict[str, Any], told: list[str]) -> None:
    job = parse(raw_spec(training=training))
    found = plan_job(job, model_shape(job.model)).warnings
    assert [one[: len(start)] for one, start in zip(found, told, strict=True)] == told
