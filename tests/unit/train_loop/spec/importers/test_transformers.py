"""Import of TrainingArguments and DistributedConfig: every field of the installed transformers, and each default."""

import ast
import importlib
import json
from collections.abc import Mapping
from importlib.metadata import files
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.train_loop.spec.importers.cases import fates, imported, job, marked, unreported
from train_loop.spec import SpecError
from train_loop.spec.importers import Imported, Outcome
from train_loop.spec.importers.hugging_face.transformers_fields import DISTRIBUTED, RULES

HANDLED = {
    *("bf16", "fp16", "num_train_epochs", "max_steps", "eval_steps", "save_steps", "fsdp", "fsdp_config"),
    *(
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "gradient_checkpointing",
        "activation_checkpointing",
    ),
}
"""Fields whose meaning depends on others."""
LEAST = {"output_dir": "x", "learning_rate": 1e-5, "do_train": True}


def fields_of(file: str, name: str) -> dict[str, Any]:
    """Return the fields of an installed dataclass, with their defaults where they are literals; nothing is imported."""
    found = next(one for one in files("transformers") or () if str(one) == file)
    tree = ast.parse(Path(str(found.locate())).read_text())
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    return {
        node.target.id: _default(node.value)
        for node in body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }


def _default(value: ast.expr | None) -> Any:
    if isinstance(value, ast.Call):
        value = next((word.value for word in value.keywords if word.arg == "default"), None)
    try:
        return None if value is None else ast.literal_eval(value)
    except ValueError:
        return None


@pytest.fixture(scope="module")
def arguments() -> Mapping[str, Any]:
    return fields_of("transformers/training_args.py", "TrainingArguments")


@pytest.fixture(scope="module")
def written() -> dict[str, Any]:
    """All fields of TrainingArguments with their defaults, as transformers itself writes them."""
    # Imported here, because it imports torch.
    module = importlib.import_module("transformers.training_args")
    found: dict[str, Any] = json.loads(module.TrainingArguments(output_dir="x").to_json_string())
    return found


def test_every_field_of_training_arguments_is_known(arguments: Mapping[str, Any]) -> None:
    assert len(arguments) > 100
    assert arguments.keys() - RULES.keys() - HANDLED == set()


OLD: dict[str, Any] = {
    "per_gpu_train_batch_size": None,
    "per_gpu_eval_batch_size": None,
    "evaluation_strategy": "no",
    "split_batches": None,
    "dispatch_batches": None,
    "overwrite_output_dir": False,
    "logging_dir": "x/runs",
    "no_cuda": False,
    "fp16_opt_level": "O1",
    "half_precision_backend": "auto",
    "save_safetensors": True,
    "warmup_ratio": 0.0,
    "group_by_length": False,
    "past_index": -1,
    "jit_mode_eval": False,
    "torchdynamo": None,
    "ray_scope": "last",
    "mp_parameters": "",
    "include_inputs_for_metrics": False,
    "tpu_metrics_debug": False,
    "fsdp": [],
    "fsdp_config": {"min_num_params": 0, "xla": False, "xla_fsdp_v2": False, "xla_fsdp_grad_ckpt": False},
    "push_to_hub_token": "<PUSH_TO_HUB_TOKEN>",
}
"""Defaults that transformers 4 writes besides, or otherwise."""


def test_file_with_every_default_imports_as_an_empty_one(written: dict[str, Any]) -> None:
    empty = imported({"do_train": False})
    for raw in (written, written | OLD):
        found = imported(json.dumps(raw))
        assert job(found) == job(empty)
        assert losses(found) == losses(empty)
        assert unreported(found, raw) == set()
        assert [row.field for row in found.rows if row.outcome is Outcome.UNKNOWN] == []


def test_field_with_its_default_changes_nothing(written: dict[str, Any]) -> None:
    empty = imported({"do_train": False})
    for name, value in (written | OLD).items():
        found = imported({"do_train": False, name: value})
        assert job(found) == job(empty), name
        assert losses(found) == losses(empty), name


def losses(found: Imported) -> set[tuple[str, str]]:
    """Return the rows about numbers that differ from the tool's own."""
    return {(row.field, row.reason) for row in found.rows if row.changes_numbers and row.outcome is not Outcome.DEFAULT}


def test_defaults_are_written_and_marked_where_they_differ() -> None:
    found = imported(LEAST)
    spec, training = job(found), job(found).training
    assert (training.lr_scheduler_type, training.per_device_train_batch_size, training.num_train_epochs) == (
        "linear",
        8,
        3,
    )
    assert (training.weight_decay, training.max_grad_norm, training.warmup_steps) == (0.0, 1.0, 0)
    assert (training.adam_beta1, training.adam_beta2, training.adam_epsilon) == (0.9, 0.999, 1e-8)
    assert (training.seed, spec.data.seed, training.logging_steps, spec.checkpoint.every_steps) == (42, 42, 500, 500)
    assert (spec.model.dtype, spec.model.gradient_checkpointing) == ("fp32", "none")
    assert marked(found) >= {"lr_scheduler_type", "per_device_train_batch_size", "num_train_epochs", "seed", "bf16"}
    assert "weight_decay" not in marked(found)
    assert fates(found)["weight_decay"] == (Outcome.DEFAULT, "training.weight_decay")


@pytest.mark.parametrize(
    ("given", "path", "expected"),
    [
        ({"max_grad_norm": 0}, "training.max_grad_norm", None),
        ({"bf16": True, "fp16": False}, "model.dtype", "bf16"),
        ({"fp16": True}, "model.dtype", "fp16"),
        ({"gradient_checkpointing": True}, "model.gradient_checkpointing", "full"),
        ({"activation_checkpointing": True}, "model.gradient_checkpointing", "full"),
        ({"torch_compile": True}, "model.compile", True),
        ({"optim": "adamw_torch_fused"}, "training.optimizer", "adamw"),
        ({"optim": "lion_32bit"}, "training.optimizer", "lion"),
        ({"optim": "lion_32bit"}, "training.adam_beta2", 0.999),
        ({"optim": "lion_32bit", "adam_epsilon": 1e-6}, "training.adam_epsilon", 1e-8),
        ({"optim": "schedule_free_adamw"}, "training.lr_scheduler_type", "constant"),
        (
            {"optim": "schedule_free_adamw", "lr_scheduler_type": "constant", "warmup_steps": 10},
            "training.lr_scheduler_type",
            "constant_with_warmup",
        ),
        ({"optim": "schedule_free_adamw", "warmup_steps": 10}, "training.warmup_steps", 10),
        ({"optim": "adafactor", "adam_beta2": 0.95}, "training.optimizer", "adafactor"),
        ({"lr_scheduler_type": "warmup_stable_decay"}, "training.lr_scheduler_type", "wsd"),
        ({"lr_scheduler_type": "constant", "warmup_steps": 10}, "training.warmup_steps", 0),
        ({"lr_scheduler_type": "cosine_with_restarts"}, "training.lr_scheduler_type", "cosine_with_restarts"),
        (
            {
                "lr_scheduler_type": "reduce_lr_on_plateau",
                "warmup_steps": 5,
                "eval_strategy": "steps",
                "eval_steps": 10,
            },
            "training.warmup_steps",
            0,
        ),
        ({"tf32": True}, "strategy.matmul_precision", "high"),
        ({"logging_steps": 0.1, "max_steps": 200}, "training.logging_steps", 20),
        ({"logging_steps": 0.1}, "training.logging_steps", 1),
        ({"optim": "OptimizerNames.LION_32BIT"}, "training.optimizer", "lion"),
        ({"lr_scheduler_type": "SchedulerType.POLYNOMIAL"}, "training.lr_scheduler_type", "polynomial"),
        ({"save_total_limit": 0}, "checkpoint.keep_last", 2),
        ({"full_determinism": True}, "training.deterministic", True),
        ({"max_steps": 200, "num_train_epochs": 3.0}, "training.num_train_epochs", None),
        ({"save_strategy": "no"}, "checkpoint.every_steps", None),
        ({"save_strategy": "steps", "save_steps": 20}, "checkpoint.every_steps", 20),
        ({"save_total_limit": 5}, "checkpoint.keep_last", 5),
        ({"data_seed": 7}, "data.seed", 7),
        ({"run_name": "My Run/1"}, "name", "my-run-1"),
        ({"fsdp": True, "bf16": True}, "strategy.reduce_dtype", "bf16"),
        ({"fsdp": "shard_grad_op offload"}, "strategy.reshard_after_forward", False),
        ({"fsdp": ["full_shard", "offload"]}, "strategy.offload_policy", True),
        ({"fsdp": True, "fsdp_config": {"reshard_after_forward": False}}, "strategy.reshard_after_forward", False),
        (
            {"fsdp": True, "fsdp_config": {"fsdp_activation_checkpointing": True}},
            "model.gradient_checkpointing",
            "full",
        ),
        (
            {"fsdp": True, "fsdp_config": {"transformer_layer_cls_to_wrap": ["A"]}},
            "strategy.wrap_policy.transformer_layer_cls_to_wrap",
            ("A",),
        ),
        ({"eval_strategy": "steps", "eval_steps": 50}, "training.eval_steps", 50),
        ({"evaluation_strategy": "steps", "logging_steps": 20}, "training.eval_steps", 20),
    ],
)
def test_field_becomes_that_of_a_spec(given: dict[str, Any], path: str, expected: Any) -> None:
    found = imported({**LEAST, **given})
    value: Any = job(found)
    for step in path.split("."):
        value = getattr(value, step)
    assert value == expected
    assert unreported(found, {**LEAST, **given}) == set()


def test_best_model_needs_evaluated_checkpoints() -> None:
    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "save_steps": 250}
    spec = job(imported({**LEAST, "eval_strategy": "steps", "eval_steps": 100, **best}))
    assert spec.checkpoint.keep_best is not None
    assert (spec.checkpoint.keep_best.metric, spec.checkpoint.keep_best.mode) == ("eval_loss", "min")
    assert spec.checkpoint.every_steps == 200
    other = imported({**LEAST, "eval_strategy": "steps", "eval_steps": 100, **best, "metric_for_best_model": "bleu"})
    assert fates(other)["load_best_model_at_end"][0] is Outcome.NOT_SUPPORTED


@pytest.mark.parametrize("field", ["warmup_steps", "warmup_ratio"])
def test_fraction_of_the_run_is_a_warmup(field: str) -> None:
    assert job(imported({**LEAST, field: 0.03})).training.warmup_steps == 0.03


@pytest.mark.parametrize(
    "given",
    [
        {"optim": "galore_adamw"},
        {"lr_scheduler_type": "greedy"},
        {"neftune_noise_alpha": 5.0},
        {"train_sampling_strategy": "group_by_length"},
        {"average_tokens_across_devices": False},
        {"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"num_cycles": 0.5, "x": 1}},
        {"not_a_field": 1},
    ],
)
def test_what_a_job_lacks_is_marked(given: dict[str, Any]) -> None:
    found = imported({**LEAST, **given})
    rows = [row for row in found.rows if row.field.startswith(tuple(given)) and row.changes_numbers]
    assert [row.outcome for row in rows if row.outcome in (Outcome.NOT_SUPPORTED, Outcome.UNKNOWN)]
    assert job(found).training.lr_scheduler_type in ("linear", "cosine")


def test_every_field_of_distributed_config_is_known() -> None:
    known = fields_of("transformers/distributed/configuration_utils.py", "DistributedConfig")
    assert known.keys() == {name.removesuffix(".*") for name in DISTRIBUTED}


@pytest.mark.parametrize(
    ("given", "workers", "expected"),
    [
        ({"tp_size": 2, "fsdp_size": 4}, 8, {"tp_size": 2, "fsdp_size": 0}),
        ({"tp_size": 2, "fsdp_size": 2, "dp_replicate_size": 2}, 8, {"tp_size": 2, "fsdp_size": 2}),
        ({"dp_replicate_size": 4}, 4, {"sharding_strategy": "NO_SHARD", "fsdp_size": 0}),
        ({"fsdp_size": 8, "ep_size": 4}, 8, {"ep_size": 4}),
        ({"tp_size": 4, "enable_expert_parallel": True}, 4, {"tp_size": 4, "ep_size": 4}),
        ({"tp_size": 4, "enable_sequence_parallel": True}, 4, {"sequence_parallel": True}),
        ({"fsdp_size": 2, "fsdp_cpu_offload": True}, 2, {"offload_policy": True}),
    ],
)
def test_distributed_config_becomes_the_mesh(given: dict[str, Any], workers: int, expected: dict[str, Any]) -> None:
    found = imported(json.dumps(given))
    assert found.formats == ("DistributedConfig",)
    assert job(found).scaling.world == workers
    assert {name: getattr(job(found).strategy, name) for name in expected} == expected
    assert unreported(found, given) == set()


def test_distributed_config_names_what_a_job_lacks() -> None:
    found = imported(
        json.dumps({"fsdp_size": 2, "pp_size": 2, "fsdp_plan": {"layers": "x"}, "fsdp_mixed_precision": True})
    )
    assert fates(found)["pp_size"][0] is fates(found)["fsdp_plan.layers"][0] is Outcome.NOT_SUPPORTED
    assert job(found).model.dtype == "bf16"


VALUES = (
    st.none() | st.booleans() | st.integers(-2, 1000) | st.floats(0, 2) | st.sampled_from(["no", "steps", "x", "1e-4"])
)


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(sorted([*RULES, *HANDLED])), VALUES | st.dictionaries(st.text("ab.", max_size=3), VALUES)
    )
)
def test_any_values_import_with_every_field_reported_or_are_an_error(values: dict[str, Any]) -> None:
    raw = {**LEAST, **values}
    try:
        found = imported(json.dumps(raw))
    except SpecError:
        return
    assert unreported(found, raw) == set()
    job(found)
