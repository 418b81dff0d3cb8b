"""Import of axolotl's configurations: published shapes, each default, and refusals."""

from typing import Any

import pytest

from tests.unit.train_loop.spec.importers.cases import fates, imported, job, marked, unreported
from train_loop.spec import LoraSpec, SpecError
from train_loop.spec.importers import Outcome

LORA: dict[str, Any] = {
    "base_model": "org/Llama-1B",
    "datasets": [{"path": "org/chats", "type": "chat_template", "field_messages": "conversation"}],
    "val_set_size": 0.1,
    "output_dir": "./outputs/lora",
    "adapter": "lora",
    "lora_r": 16,
    "lora_alpha": 32,
    "lora_dropout": 0.05,
    "lora_target_modules": ["gate_proj", "down_proj", "q_proj"],
    "sequence_len": 2048,
    "sample_packing": True,
    "eval_sample_packing": True,
    "gradient_accumulation_steps": 2,
    "micro_batch_size": 2,
    "num_epochs": 1,
    "optimizer": "adamw_8bit",
    "lr_scheduler": "cosine",
    "learning_rate": 0.0002,
    "bf16": "auto",
    "tf32": False,
    "gradient_checkpointing": True,
    "attn_implementation": "flash_attention_2",
    "warmup_ratio": 0.1,
    "evals_per_epoch": 4,
    "saves_per_epoch": 1,
    "weight_decay": 0.0,
    "special_tokens": {"pad_token": "<|end_of_text|>"},
    "wandb_project": None,
}
"""The shape of axolotl's examples of adapters."""
FULL: dict[str, Any] = {
    "base_model": "/models/llama",
    "datasets": [{"path": "/data/a.jsonl", "type": "completion", "field": "body"}],
    "num_epochs": 3,
    "micro_batch_size": 1,
    "learning_rate": 2e-5,
    "sequence_len": 4096,
}
"""The shape of a full fine-tune."""


def problem(file: dict[str, Any]) -> tuple[str, str]:
    """Return pointer and message of the only problem of a file."""
    with pytest.raises(SpecError) as caught:
        imported(file)
    (found,) = caught.value.problems
    return found.pointer, found.message


def test_published_shape_of_adapters_becomes_its_run() -> None:
    found = imported(LORA)
    spec, training = job(found), job(found).training
    assert spec.model.lora == LoraSpec(
        r=16, alpha=32, dropout=0.05, target_modules=("gate_proj", "down_proj", "q_proj")
    )
    assert (training.per_device_train_batch_size, training.gradient_accumulation_steps) == (2, 2)
    assert (training.num_train_epochs, training.max_steps) == (1, None)
    assert (training.optimizer, training.lr_scheduler_type, training.warmup_steps) == ("adamw_8bit", "cosine", 0.1)
    assert (spec.data.sequence_length, spec.data.packing, spec.data.on_long_rows) == (2048, True, "drop")
    assert spec.data.columns.messages == "conversation"
    assert (spec.model.dtype, spec.model.gradient_checkpointing) == ("bf16", "full")
    assert (spec.checkpoint.every_steps, spec.checkpoint.keep_last) == (None, 4)
    assert {row.target for row in found.needed} == {
        "model.path", "data.train", "data.columns", "data.eval.path", "training.eval_steps", "scaling.num_workers",
    }  # fmt: skip
    assert unreported(found, LORA) == set()
    assert [row.field for row in found.rows if row.outcome is Outcome.UNKNOWN] == []


def test_full_fine_tune_keeps_the_weights_of_axolotl() -> None:
    found = imported(FULL)
    spec = job(found)
    assert (spec.model.lora, spec.model.dtype, spec.model.master_dtype) == (None, "bf16", "bf16")
    assert spec.model.path == "/models/llama"
    assert (spec.data.columns.text, spec.data.on_long_rows, spec.data.packing) == ("body", "split", False)
    assert job(imported(FULL | {"fsdp_config": {"offload_params": False}})).model.master_dtype == "fp32"
    assert job(imported(FULL | {"deepspeed": "zero3.json"})).model.master_dtype == "fp32"


@pytest.mark.parametrize(
    ("given", "path", "expected"),
    [
        ({}, "training.warmup_steps", 0.03),
        ({"max_steps": 200}, "training.warmup_steps", 6),
        ({"max_steps": 5000}, "training.warmup_steps", 100),
        ({"max_steps": 40}, "training.warmup_steps", 2),
        ({"warmup_steps": 1}, "training.warmup_steps", 2),
        ({"max_steps": 40, "warmup_ratio": 0.04}, "training.warmup_steps", 2),
        ({"max_steps": 100}, "training.num_train_epochs", None),
        ({"cosine_min_lr_ratio": 0.1}, "training.lr_scheduler_type", "cosine_with_min_lr"),
        ({"lr_scheduler": "linear", "cosine_min_lr_ratio": 0.1}, "training.lr_scheduler_type", "linear"),
        ({"lr_scheduler": "rex"}, "training.lr_scheduler_type", "cosine"),
        ({"optimizer": "sgd"}, "training.momentum", 0.0),
        ({"optimizer": "muon"}, "training.optimizer", "muon"),
        ({"max_grad_norm": 0}, "training.max_grad_norm", None),
        ({"bf16": "full"}, "model.dtype", "bf16"),
        ({"bf16": False, "fp16": True}, "model.dtype", "fp16"),
        ({"bf16": False}, "model.dtype", "fp32"),
        ({"fp16": True}, "model.dtype", "fp16"),
        ({"bf16": False, "bfloat16": True}, "model.dtype", "bf16"),
        ({"tf32": True}, "strategy.matmul_precision", "high"),
        ({"excess_length_strategy": "truncate"}, "data.on_long_rows", "truncate"),
        ({"excess_length_strategy": "raise"}, "data.on_long_rows", "fail"),
        ({"gradient_checkpointing": "offload"}, "model.gradient_checkpointing", "offload"),
        ({"activation_offloading": True}, "model.gradient_checkpointing", "offload"),
        ({"selective_checkpointing": True}, "model.gradient_checkpointing", "selective"),
        ({"flash_attention": True}, "model.attn_implementation", "flash_attention_2"),
        ({"sdp_attention": True}, "model.attn_implementation", "sdpa"),
        ({"attn_implementation": "eager"}, "model.attn_implementation", "sdpa"),
        (
            {"attn_implementation": "kernels-community/flash-attn3@main"},
            "model.attn_implementation",
            "flash_attention_3",
        ),
        ({"context_parallel_size": 2}, "strategy.ulysses_size", 2),
        ({"dp_shard_size": 2, "dp_replicate_size": 2}, "scaling.num_workers", 4),
        ({"dp_shard_size": 2, "dp_replicate_size": 2}, "strategy.fsdp_size", 2),
        ({"fsdp": ["full_shard", "auto_wrap"]}, "strategy.reshard_after_forward", True),
        ({"fsdp_config": {"offload_params": True}}, "strategy.offload_policy", True),
        ({"save_steps": 50}, "checkpoint.every_steps", 50),
        ({"save_strategy": "no"}, "checkpoint.every_steps", None),
        ({"max_steps": 100, "saves_per_epoch": 2, "num_epochs": 2}, "checkpoint.every_steps", 25),
        ({"save_total_limit": 2}, "checkpoint.keep_last", 2),
        ({"curriculum_sampling": True}, "data.shuffle", False),
        ({"train_on_inputs": False}, "data.columns.text", "body"),
        ({"ray_num_workers": 4, "use_ray": True}, "scaling.num_workers", 4),
        ({"lora_r": 8, "adapter": None}, "model.lora", None),
    ],
)
def test_field_becomes_its_value(given: dict[str, Any], path: str, expected: Any) -> None:
    value: Any = job(imported(FULL | given))
    for name in path.split("."):
        value = getattr(value, name)
    assert value == expected


@pytest.mark.parametrize(
    ("entry", "more", "columns"),
    [
        ({"type": "alpaca"}, {}, {"prompt": "prompt", "response": "response"}),
        ({"type": "alpaca"}, {"train_on_inputs": True}, {"text": "text"}),
        ({"type": {"field_instruction": "q", "field_output": "a"}}, {}, {"prompt": "prompt", "response": "response"}),
        ({"type": "chat_template"}, {}, {"messages": "messages"}),
        ({"type": "chat_template"}, {"train_on_inputs": True}, {"text": "text"}),
        (
            {
                "type": "chat_template",
                "field_messages": "c",
                "message_property_mappings": {"role": "from", "content": "value"},
            },
            {},
            {"messages": "messages"},
        ),
        ({}, {}, {"input_ids": "input_ids", "labels": "labels"}),
    ],
)
def test_type_of_rows_becomes_columns_that_train_the_same_tokens(
    entry: dict[str, Any], more: dict[str, Any], columns: dict[str, str]
) -> None:
    found = imported(FULL | {"datasets": [{"path": "org/rows"} | entry]} | more)
    data: Any = found.spec["data"]
    assert data["columns"] == columns
    assert "data.columns" in {row.target for row in found.needed}


def test_datasets_of_several_kinds_become_sources_with_their_columns() -> None:
    entries = [{"path": "a/b", "type": "completion"}, {"path": "c/d", "type": "chat_template", "split": "train[:1%]"}]
    found = imported(FULL | {"datasets": entries})
    assert [one.columns for one in job(found).data.sources] != [None, None]
    assert fates(found)["datasets.1.split"] == (Outcome.NOT_SUPPORTED, None)
    assert "datasets.1.split" in marked(found)


def test_rows_that_are_held_out_without_an_evaluation_are_marked() -> None:
    found = imported(FULL | {"val_set_size": 0.05})
    assert "val_set_size" in marked(found)
    assert job(found).data.eval is None


def test_rates_of_lora_plus_become_a_group() -> None:
    (group,) = job(imported(LORA | {"loraplus_lr_ratio": 16})).training.groups
    assert (group.params, group.lr_scale) == (("*lora_B*",), 16)


def test_folder_of_adapters_replaces_their_settings() -> None:
    spec: Any = imported(LORA | {"lora_model_dir": "/models/adapter"}).spec
    assert spec["model"]["adapter"] == "/models/adapter"
    assert "lora" not in spec["model"]


@pytest.mark.parametrize(
    ("given", "pointer", "message"),
    [
        ({"rl": "dpo"}, "/rl", "training on preferences: it is not imported"),
        ({"reward_model": True}, "/reward_model", "a reward model"),
        ({"processor_type": "AutoProcessor"}, "/processor_type", "images or audio"),
        ({"qat": {"weight_dtype": "int4"}}, "/qat", "quantisation-aware training"),
        ({"unfrozen_parameters": ["lm_head"]}, "/unfrozen_parameters", "model.freeze_module_prefix"),
        ({"batch_size": 8}, "/batch_size", "set gradient_accumulation_steps to batch_size / "),
        ({"adapter": "llama-adapter"}, "/adapter", "adapter llama-adapter is not supported; choose lora or qlora"),
        (
            {"adapter": "qlora", "lora_r": 8, "lora_alpha": 8},
            "/adapter",
            "adapter: qlora needs load_in_4bit: true; add it",
        ),
        ({"adapter": "lora", "lora_r": 8}, "/adapter", "adapters need lora_alpha; add a value"),
        (
            {"adapter": "lora", "lora_r": 8, "lora_alpha": 8},
            "/adapter",
            "adapters need lora_target_modules or lora_target_linear; add one",
        ),
        (
            {"load_in_8bit": True},
            "/load_in_8bit",
            "load_in_8bit needs adapters, because all weights would be trained; ",
        ),
        ({"warmup_steps": 0.1}, "/warmup_steps", "axolotl takes a number of steps; write warmup_ratio: 0.1"),
        ({"model_type": "AutoModelForSequenceClassification"}, "/model_type", "heads of labels are not imported; "),
        ({"plugins": ["axolotl.integrations.kd.KDPlugin"]}, "/plugins", "may train in another way"),
        ({"attn_implementation": "sage"}, "/attn_implementation", "attention in eight bits is not supported; "),
        ({"learning_rate": None}, "", "axolotl needs learning_rate, and the file has none; add it"),
        ({"pretraining_dataset": [{"path": "a/b"}]}, "/pretraining_dataset", "axolotl needs max_steps with it; add it"),
        ({"datasets": None}, "/datasets", "expected a list of datasets in datasets, each with a path"),
        (
            {"cosine_min_lr_ratio": 0.1, "cosine_constant_lr_ratio": 0.8},
            "/cosine_constant_lr_ratio",
            "schedules do not stay",
        ),
    ],
)
def test_run_that_no_job_is_equal_to_is_refused_by_name(given: dict[str, Any], pointer: str, message: str) -> None:
    found = problem(FULL | given)
    assert found[0] == pointer
    assert message in found[1]


@pytest.mark.parametrize(
    "given",
    [
        {"neftune_noise_alpha": 5},
        {"lr_scheduler": "one_cycle"},
        {"optimizer": "adamw_torch_4bit"},
        {"special_tokens": {"eos_token": "<|im_end|>"}},
        {"chat_template": "chatml"},
        {"group_by_length": True},
        {"early_stopping_patience": 3},
        {"embedding_lr": 1e-5},
        {"accelerator_config": {"split_batches": True}},
        {"lora_rank_pattern": {"q_proj": 4}},
        {"dataset_exact_deduplication": True},
        {"an_unknown_field": 1},
    ],
)
def test_field_that_changes_numbers_is_marked(given: dict[str, Any]) -> None:
    (field,) = given
    assert any(one == field or one.startswith(f"{field}.") for one in marked(imported(FULL | given)))
