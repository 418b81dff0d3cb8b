"""Import of TRL's files: the fields of `trl sft` and `trl reward`, and their defaults."""

import json
from typing import Any

import pytest

from tests.unit.train_loop.spec.importers.cases import fates, imported, job, marked, unreported
from train_loop.spec import LoraSpec, SpecError
from train_loop.spec.importers import Imported, Outcome

LEAST = {"use_peft": False}
COMMON: dict[str, Any] = {
    "bf16": True,
    "activation_checkpointing": True,
    "gradient_checkpointing": True,
    "logging_steps": 10,
    "model_init_kwargs": None,
    "trust_remote_code": False,
    "chat_template_path": None,
    "dataset_num_proc": None,
    "eos_token": "<EOS_TOKEN>",
    "max_length": 1024,
    "pad_to_multiple_of": None,
    "activation_offloading": False,
    "pad_token": "<PAD_TOKEN>",
}
SFT_CONFIG: dict[str, Any] = COMMON | {
    "learning_rate": 2e-5,
    "router_aux_loss_coef": None,
    "dataset_text_field": "text",
    "dataset_kwargs": None,
    "truncation_mode": "keep_start",
    "shuffle_dataset": False,
    "packing": False,
    "packing_strategy": "bfd",
    "padding_free": False,
    "eval_packing": None,
    "completion_only_loss": None,
    "assistant_only_loss": False,
    "loss_type": "nll",
}
"""Fields that `SFTConfig().to_json_string()` of trl 1.16 adds to TrainingArguments, or with another default."""
REWARD_CONFIG: dict[str, Any] = COMMON | {
    "learning_rate": 1e-4,
    "center_rewards_coefficient": None,
    "disable_dropout": True,
}
SCRIPT: dict[str, Any] = {
    "model_revision": "main",
    "dtype": "float32",
    "attn_implementation": None,
    "use_peft": False,
    "lora_r": 16,
    "lora_alpha": 32,
    "lora_dropout": 0.05,
    "lora_target_modules": None,
    "lora_target_parameters": None,
    "lora_modules_to_save": None,
    "lora_task_type": "CAUSAL_LM",
    "use_rslora": False,
    "use_dora": False,
    "load_in_8bit": False,
    "load_in_4bit": False,
    "bnb_4bit_quant_type": "nf4",
    "use_bnb_nested_quant": False,
    "bnb_4bit_quant_storage": None,
    "dataset_name": None,
    "dataset_config": None,
    "dataset_train_split": "train",
    "dataset_test_split": "test",
    "dataset_streaming": False,
    "ignore_bias_buffers": False,
    "datasets": [],
    "streaming": False,
    "test_split_size": None,
}
"""The defaults of ModelConfig, ScriptArguments and DatasetMixtureConfig."""


def losses(found: Imported) -> set[tuple[str, str]]:
    """Return the rows about numbers that differ from the tool's own."""
    return {(row.field, row.reason) for row in found.rows if row.changes_numbers and row.outcome is not Outcome.DEFAULT}


def value(found: Imported, path: str) -> Any:
    """Return a value of the spec of an import."""
    part: Any = job(found)
    for step in path.split("."):
        part = getattr(part, step)
    return part


@pytest.mark.parametrize(
    ("written", "least"),
    [
        (SFT_CONFIG | SCRIPT, {"dataset_text_field": "text"}),
        (SFT_CONFIG, {"dataset_text_field": "text"}),
        (REWARD_CONFIG | SCRIPT, {"center_rewards_coefficient": None}),
    ],
)
def test_file_with_every_default_imports_as_an_empty_one(written: dict[str, Any], least: dict[str, Any]) -> None:
    empty, found = imported(least), imported(json.dumps(written))
    assert job(found) == job(empty)
    assert losses(found) == losses(empty)
    assert unreported(found, written) == set()
    assert [row.field for row in found.rows if row.outcome is Outcome.UNKNOWN] == []
    for name, one in written.items():
        single = imported(least | {name: one})
        assert job(single) == job(empty), name
        assert losses(single) == losses(empty), name


def test_defaults_are_those_of_sft() -> None:
    spec = job(imported(LEAST))
    training, data, model = spec.training, spec.data, spec.model
    assert (training.learning_rate, training.num_train_epochs, training.per_device_train_batch_size) == (2e-5, 3, 8)
    assert (training.lr_scheduler_type, training.logging_steps, training.seed) == ("linear", 10, 42)
    assert (data.sequence_length, data.packing, data.on_long_rows, data.columns.text) == (
        1024,
        False,
        "truncate",
        "text",
    )
    assert (model.dtype, model.master_dtype, model.gradient_checkpointing, model.lora) == ("bf16", "fp32", "full", None)


def test_file_without_a_field_of_a_trainer_is_read_as_sft_and_marked() -> None:
    assert any("read as that of trl sft" in row.reason and row.changes_numbers for row in imported(LEAST).rows)
    assert not any("read as that of trl sft" in row.reason for row in imported({"dataset_text_field": "text"}).rows)


def test_adapters_become_model_lora() -> None:
    peft = {"use_peft": True, "lora_r": 8, "lora_target_modules": ["q_proj", "v_proj"], "use_rslora": True}
    found = imported(peft | {"load_in_4bit": True, "lora_task_type": "CAUSAL_LM"})
    model = job(found).model
    assert model.lora == LoraSpec(r=8, alpha=32, dropout=0.05, target_modules=("q_proj", "v_proj"), use_rslora=True)
    assert model.quantize_base == "nf4"
    assert "load_in_4bit" in marked(found)
    assert "model.lora.target_modules" in {row.target for row in imported({"use_peft": True}).needed}
    off = imported({"use_peft": False, "lora_r": 8, "load_in_4bit": True})
    assert (job(off).model.lora, job(off).model.quantize_base) == (None, None)
    assert fates(off)["lora_r"] == (Outcome.NOT_NEEDED, None)
    assert "load_in_4bit" in marked(off)


@pytest.mark.parametrize(
    ("given", "path", "expected"),
    [
        ({"max_length": 2048}, "data.sequence_length", 2048),
        ({"max_seq_length": 512}, "data.sequence_length", 512),
        ({"max_length": 2048, "max_seq_length": 512}, "data.sequence_length", 2048),
        ({"packing": True}, "data.packing", True),
        ({"packing": True}, "data.on_long_rows", "truncate"),
        ({"packing": True, "packing_strategy": "bfd_split"}, "data.on_long_rows", "split"),
        ({"packing": False, "packing_strategy": "bfd_split"}, "data.on_long_rows", "truncate"),
        ({"truncation_mode": "keep_end"}, "data.on_long_rows", "truncate_left"),
        ({"dataset_text_field": "body"}, "data.columns.text", "body"),
        ({"assistant_only_loss": True}, "data.columns.messages", "messages"),
        ({"completion_only_loss": True}, "data.columns.response", "completion"),
        ({"bf16": False}, "model.dtype", "fp32"),
        ({"fp16": True}, "model.dtype", "fp16"),
        ({"fp16": True, "bf16": False}, "model.dtype", "fp16"),
        ({"bf16": None}, "model.dtype", "bf16"),
        ({"dtype": "bfloat16"}, "model.master_dtype", "bf16"),
        ({"torch_dtype": "bfloat16", "model_init_kwargs": {"dtype": "float32"}}, "model.master_dtype", "fp32"),
        ({"dtype": "auto"}, "model.master_dtype", "fp32"),
        ({"attn_implementation": "kernels-community/flash-attn2"}, "model.attn_implementation", "flash_attention_2"),
        ({"gradient_checkpointing": False}, "model.gradient_checkpointing", "none"),
        ({"activation_offloading": True}, "model.gradient_checkpointing", "offload"),
        ({"router_aux_loss_coef": 0.01}, "training.router_aux_loss.coef", 0.01),
        ({"model_name_or_path": "Qwen/Qwen3-0.6B"}, "model.path", "file:///models/Qwen3-0.6B"),
        ({"model_name_or_path": "/m/base"}, "model.path", "/m/base"),
        ({"dataset_name": "trl-lib/Capybara"}, "data.train.path", "file:///data/Capybara"),
        ({"datasets": [{"path": "/d/a.jsonl"}, {"path": "json", "data_files": "/d/b.jsonl"}]}, "data.train.path",
         ("/d/a.jsonl", "/d/b.jsonl")),
        ({"learning_rate": "1.0e-4"}, "training.learning_rate", 1e-4),
        ({"gradient_accumulation_steps": 8}, "training.gradient_accumulation_steps", 8),
    ],
)  # fmt: skip
def test_field_becomes_that_of_a_spec(given: dict[str, Any], path: str, expected: Any) -> None:
    found = imported({**LEAST, **given})
    assert value(found, path) == expected
    assert unreported(found, {**LEAST, **given}) == set()


@pytest.mark.parametrize(
    "given",
    [
        {"packing": True, "packing_strategy": "wrapped"},
        {"datasets": [{"path": "/d/a.jsonl", "fraction": 0.5}, {"path": "/d/b.jsonl", "fraction": 0.5}]},
        {"eos_token": "<|im_end|>"},
        {"model_revision": "v2"},
        {"dataset_kwargs": {"skip_prepare_dataset": True}},
        {"model_init_kwargs": {"use_kernels": True}},
        {"dtype": "float16"},
        {"neftune_noise_alpha": 5},
        {"not_a_field": 1},
    ],
)
def test_what_a_job_lacks_is_marked(given: dict[str, Any]) -> None:
    assert any(field.partition(".")[0] in given for field in marked(imported({**LEAST, **given})))


def test_length_without_a_limit_is_left_to_the_user() -> None:
    assert "data.sequence_length" in {row.target for row in imported({**LEAST, "max_length": None}).needed}


def test_reward_trains_pairs() -> None:
    spec = job(imported({"center_rewards_coefficient": 0.01, "max_length": 512}))
    assert spec.model.label_head is not None
    assert spec.model.label_head.reward is not None
    assert spec.model.label_head.reward.center_rewards_coefficient == 0.01
    assert (spec.data.columns.chosen, spec.data.columns.rejected) == ("chosen", "rejected")
    assert (spec.data.sequence_length, spec.data.on_long_rows, spec.training.learning_rate) == (512, "drop", 1e-4)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"loss_type": "dft"}, "the loss dft is not imported; expected nll"),
        ({"loss_type": ["sigmoid"]}, "is not imported; expected nll"),
        ({"lora_task_type": "SEQ_CLS"}, "for trl reward, add center_rewards_coefficient: null"),
        ({"bf16": "auto"}, "invalid bf16 auto; expected true or false"),
        ({"use_peft": "maybe"}, "invalid use_peft maybe; expected true or false"),
        ({"truncation_mode": "middle"}, "invalid truncation_mode middle; expected keep_start, keep_end"),
        ({"beta": 0.1}, "a configuration of TRL's DPO, KTO, GRPO, RLOO or distillation"),
        ({"reward_funcs": ["think_format_reward"]}, "a configuration of TRL's DPO, KTO, GRPO, RLOO or distillation"),
    ],
)
def test_file_that_is_not_imported_is_an_error(given: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        imported({**LEAST, **given})
