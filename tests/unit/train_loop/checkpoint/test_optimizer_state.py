"""Optimizer states that are not those of a run's trained parameters are refused by name."""

import re
from pathlib import Path

import pytest

from tests.support.builders.specs import spec
from train_loop.checkpoint.optimizer_state import OptimizerState, TrainingState, check_fits
from train_loop.errors import UserError
from train_loop.model.load import Stored
from train_loop.run_dir import DataPosition, ExportWish, wish_of
from train_loop.spec import SpecError, TrainingSpec, dump

PARAMETERS = {"embed.weight": (8, 4), "norm.weight": (4,)}
ADAMW = {name: {"exp_avg": shape, "exp_avg_sq": shape, "step": ()} for name, shape in PARAMETERS.items()}
ADAFACTOR = {
    "embed.weight": {"row_mean": (8, 1), "column_mean": (1, 4), "step": ()},
    "norm.weight": {"variance": (4,), "step": ()},
}


def state(shapes: dict[str, dict[str, tuple[int, ...]]], optimizer: str = "adamw") -> OptimizerState:
    facts = TrainingState(
        optimizer=optimizer, step=3, tokens=9, schedule=3, position=DataPosition(), dataset="d", seed=0, shuffle=True
    )
    stored = {
        name: {key: Stored(Path("x"), f"{name}.{key}", shape, "F32") for key, shape in of.items()}
        for name, of in shapes.items()
    }
    return OptimizerState(Path("/states"), facts, stored)


def training(optimizer: str = "adamw") -> TrainingSpec:
    return spec(training={"optimizer": optimizer}).training


def test_state_of_all_trained_parameters_fits() -> None:
    check_fits(state(ADAMW), training(), PARAMETERS)
    check_fits(state(ADAFACTOR, "adafactor"), training("adafactor"), PARAMETERS)


@pytest.mark.parametrize(
    ("found", "optimizer", "message"),
    [
        (
            state(ADAMW, "sgd"),
            "adamw",
            "/states has the state of sgd, and training.optimizer is adamw; choose the same",
        ),
        (
            state({"norm.weight": ADAMW["norm.weight"]}),
            "adamw",
            "is not of the trained parameters: missing: embed.weig",
        ),
        (state(ADAMW | {"head.weight": {"step": ()}}), "adamw", "unexpected: head.weight; give that of the same model"),
        (
            state(ADAMW | {"norm.weight": {"exp_avg": (5,)}}),
            "adamw",
            r"wrong shape: norm.weight.exp_avg is \[5\], and norm.weight \[4\]",
        ),
        (state(ADAFACTOR), "adamw", r"wrong shape: embed.weight.row_mean is \[8, 1\], and embed.weight \[8, 4\]"),
    ],
)
def test_state_that_does_not_fit_is_refused_by_name(found: OptimizerState, optimizer: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_fits(found, training(optimizer), PARAMETERS)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (
            {"training": {"optimizer_state": "/s"}},
            "optimizer_state belongs to the weights of the same checkpoint; set mo",
        ),
        (
            {"training": {"optimizer_state": "s"}},
            "s is a relative path, but service and workers have different folders",
        ),
        (
            {"training": {"optimizer": "adamw_8bit", "optimizer_state": "/s"}},
            "the states of adamw_8bit are not read from a folder; clone the job instead",
        ),
        ({"model": {"load": "rank0"}}, "load=rank0 has no effect without model.path, whose files it reads; remove it"),
    ],
)
def test_settings_without_effect_are_refused(parts: dict[str, dict[str, object]], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        spec(**parts)


def test_unset_fields_are_not_in_stored_specs_so_that_their_digests_stay() -> None:
    text = dump(spec())
    assert '"load"' not in text
    assert "optimizer_state" not in text
    given = dump(spec(model={"config": None, "path": "/m", "load": "rank0"}, training={"optimizer_state": "/s"}))
    assert '"load": "rank0"' in given
    assert '"optimizer_state": "/s"' in given


@pytest.mark.parametrize(
    ("parts", "wish", "message"),
    [
        ({}, {}, None),
        ({"training": {"ema_decay": 0.9}}, {"weights": "ema"}, "belongs to the trained weights, and not to their aver"),
        ({"training": {"optimizer": "adamw_8bit"}}, {}, "the states of adamw_8bit are not read from a folder; clone"),
        ({"model": {"master_dtype": "bf16"}}, {}, "dtype=fp32 rounds the weights .*; choose bf16"),
        ({"model": {"lora": {}}}, {"form": "merged"}, "adapters .* is not exported; clone the job instead"),
    ],
)
def test_export_has_no_optimizer_state_that_no_run_could_start_from(
    parts: dict[str, dict[str, object]], wish: dict[str, str], message: str | None
) -> None:
    job, asked = spec(**parts), ExportWish.model_validate({"dtype": "fp32", "include": "optimizer"} | wish)
    fault = asked.fault_of_states(job)
    assert (fault is None) == (message is None)
    assert message is None or re.search(message, fault or ""), fault


def test_export_with_the_optimizer_state_has_the_dtype_of_the_master_weights() -> None:
    model = spec(model={"dtype": "bf16"}).model
    asked = [wish_of(model, dtype=None, weights="model", form=None, include=one) for one in (None, "optimizer")]
    assert [(one.dtype, one.name(3)) for one in asked] == [
        ("bf16", "step-00000003-model-bf16"),
        ("fp32", "step-00000003-model-fp32-optimizer"),
    ]
