"""Import of LLaMA-Factory's configurations: published shapes, each default, and refusals."""

from typing import Any

import pytest

from tests.unit.train_loop.spec.importers.cases import imported, job, marked, unreported
from train_loop.spec import LoraSpec, SpecError
from train_loop.spec.importers import Outcome

LORA: dict[str, Any] = {
    "model_name_or_path": "org/Llama-8B",
    "trust_remote_code": True,
    "stage": "sft",
    "do_train": True,
    "finetuning_type": "lora",
    "lora_target": "all",
    "lora_rank": 8,
    "dataset": "identity,alpaca_en_demo",
    "template": "llama3",
    "cutoff_len": 1024,
    "max_samples": 1000,
    "overwrite_cache": True,
    "preprocessing_num_workers": 16,
    "output_dir": "saves/lora",
    "logging_steps": 10,
    "save_steps": 500,
    "plot_loss": True,
    "overwrite_output_dir": True,
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 8,
    "learning_rate": 1.0e-4,
    "num_train_epochs": 3.0,
    "lr_scheduler_type": "cosine",
    "warmup_ratio": 0.1,
    "bf16": True,
    "ddp_timeout": 180000000,
    "val_size": 0.1,
    "per_device_eval_batch_size": 1,
    "eval_strategy": "steps",
    "eval_steps": 500,
}
"""The shape of LLaMA-Factory's examples."""
_END = "which is not imported; remove it, or write a spec"
LEAST: dict[str, Any] = {"model_name_or_path": "/models/m", "stage": "sft", "do_train": True, "dataset": "rows"}


def test_published_shape_becomes_its_run() -> None:
    found = imported(LORA)
    spec, training = job(found), job(found).training
    assert spec.model.lora == LoraSpec(r=8, alpha=16, dropout=0.0)
    assert (training.per_device_train_batch_size, training.gradient_accumulation_steps) == (1, 8)
    assert (training.learning_rate, training.lr_scheduler_type, training.warmup_steps) == (1e-4, "cosine", 0.1)
    assert (training.num_train_epochs, training.eval_steps) == (3.0, 500)
    assert (spec.data.sequence_length, spec.data.packing, spec.data.on_long_rows) == (1024, False, "truncate")
    assert spec.data.sources[0].paths == ("file:///data/identity.jsonl", "file:///data/alpaca_en_demo.jsonl")
    assert spec.data.eval_sources[0].paths == ("file:///data/val.jsonl",)
    assert (spec.model.dtype, spec.model.master_dtype, spec.model.gradient_checkpointing) == ("bf16", "fp32", "full")
    assert spec.checkpoint.every_steps == 500
    assert {row.target for row in found.needed} == {
        "model.path", "data.train.path", "data.columns", "data.eval.path", "scaling.num_workers",
    }  # fmt: skip
    assert marked(found) >= {"template", "max_samples"}
    assert unreported(found, LORA) == set()
    assert [row.field for row in found.rows if row.outcome is Outcome.UNKNOWN] == []


@pytest.mark.parametrize(
    ("given", "path", "expected"),
    [
        ({}, "model.lora", LoraSpec(r=8, alpha=16)),
        ({"lora_rank": 32}, "model.lora.alpha", 64),
        ({"lora_rank": 32, "lora_alpha": None}, "model.lora.alpha", 64),
        ({"lora_target": "q_proj, v_proj"}, "model.lora.target_modules", ("q_proj", "v_proj")),
        ({"additional_target": "embed_tokens,lm_head"}, "model.lora.modules_to_save", ("embed_tokens", "lm_head")),
        ({"use_rslora": True}, "model.lora.use_rslora", True),
        ({"finetuning_type": "full", "lora_rank": 8}, "model.lora", None),
        ({"quantization_bit": 4, "quantization_method": "bitsandbytes"}, "model.quantize_base", "nf4"),
        ({"quantization_bit": 8}, "model.quantize_base", "int8"),
        ({"bf16": False}, "model.dtype", "fp32"),
        ({"fp16": True}, "model.dtype", "fp16"),
        ({"pure_bf16": True}, "model.dtype", "bf16"),
        ({"pure_bf16": True}, "model.master_dtype", "bf16"),
        ({"disable_gradient_checkpointing": True}, "model.gradient_checkpointing", "none"),
        ({"disable_gradient_checkpointing": False}, "model.gradient_checkpointing", "full"),
        ({"use_unsloth_gc": True}, "model.gradient_checkpointing", "offload"),
        ({"flash_attn": "fa2", "bf16": True}, "model.attn_implementation", "flash_attention_2"),
        ({"flash_attn": "disabled"}, "model.attn_implementation", "sdpa"),
        ({"upcast_layernorm": True}, "strategy.norm_dtype", "fp32"),
        ({"moe_aux_loss_coef": 0.01}, "training.router_aux_loss.coef", 0.01),
        ({"disable_shuffling": True}, "data.shuffle", False),
        ({"use_muon": True}, "training.optimizer", "muon"),
        ({"packing": True}, "data.packing", True),
        ({"neat_packing": True}, "data.packing", True),
        ({"neat_packing": False, "packing": False}, "data.packing", False),
        ({"stage": "pt"}, "data.packing", True),
        ({"stage": "pt"}, "data.on_long_rows", "split"),
        ({"stage": "pt", "packing": False}, "data.on_long_rows", "truncate"),
        ({"stage": "pt"}, "data.columns.text", "text"),
        ({"train_on_prompt": True}, "data.columns.text", "text"),
        ({"mask_history": True}, "data.columns.response", "response"),
        ({"ray_num_workers": 4}, "scaling.num_workers", 4),
        (
            {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": {"num_decay_steps": 10}},
            "training.lr_scheduler_type",
            "wsd",
        ),
        ({"optim": "sgd"}, "training.momentum", 0.0),
    ],
)
def test_field_becomes_its_value(given: dict[str, Any], path: str, expected: Any) -> None:
    value: Any = job(imported(LEAST | given))
    for name in path.split("."):
        value = getattr(value, name)
    assert value == expected


def test_rates_of_lora_plus_become_a_group() -> None:
    (group,) = job(imported(LEAST | {"loraplus_lr_ratio": 16.0})).training.groups
    assert (group.params, group.lr_scale) == (("*lora_B*",), 16.0)


def test_folder_of_adapters_replaces_their_settings() -> None:
    spec: Any = imported(LEAST | {"adapter_name_or_path": "saves/lora", "lora_rank": 8}).spec
    assert spec["model"]["adapter"] == "file:///models/lora"
    assert "lora" not in spec["model"]


@pytest.mark.parametrize(
    ("given", "pointer", "message"),
    [
        ({"stage": "dpo"}, "/stage", "the stage dpo is not imported; sft and pt are"),
        (
            {"stage": "rm"},
            "/stage",
            "the stage rm is not imported; sft and pt are; model.head: reward trains on chosen and rejected",
        ),
        (
            {"finetuning_type": "freeze"},
            "/finetuning_type",
            "finetuning_type: freeze is not imported; full and lora are; for a part of the weights, set "
            "model.freeze_module_prefix",
        ),
        ({"finetuning_type": "oft"}, "/finetuning_type", "finetuning_type: oft is not imported; full and lora are"),
        ({"use_galore": True}, "/use_galore", f"use_galore asks for GaLore, {_END}"),
        ({"pissa_init": True}, "/pissa_init", f"pissa_init asks for adapters that begin as PiSSA, {_END}"),
        ({"image_max_pixels": 262144}, "/image_max_pixels", f"image_max_pixels asks for images, {_END}"),
        (
            {"do_train": False},
            "/do_train",
            "the file trains nothing: do_train is off; set do_train: true, or see jobs of kind: infer",
        ),
        ({"quantization_bit": 3}, "/quantization_bit", "3 bits are not supported; choose 4 or 8"),
        (
            {"finetuning_type": "full", "quantization_bit": 4},
            "/quantization_bit",
            "quantization_bit needs finetuning_type: lora; change one of the two",
        ),
        (
            {"adapter_name_or_path": "a,b"},
            "/adapter_name_or_path",
            "several adapters are merged before the run; export them with --merged, and name that folder",
        ),
        (
            {"lr_scheduler_type": "warmup_stable_decay"},
            "/lr_scheduler_type",
            "LLaMA-Factory decays in the last two thirds after the warm-up; add lr_scheduler_kwargs.num_decay_steps",
        ),
        ({"model_name_or_path": None}, "", "LLaMA-Factory needs model_name_or_path, and the file has none; add it"),
    ],
)
def test_run_that_no_job_is_equal_to_is_refused_by_name(given: dict[str, Any], pointer: str, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        imported(LEAST | given)
    (found,) = caught.value.problems
    assert (found.pointer, found.message) == (pointer, message)


@pytest.mark.parametrize(
    "given",
    [
        {"rope_scaling": "yarn"},
        {"add_tokens": "<a>,<b>"},
        {"interleave_probs": "0.5,0.5", "mix_strategy": "interleave_under"},
        {"early_stopping_steps": 3},
        {"packing": True},
        {"quantization_bit": 4},
        {"use_muon": True},
        {"val_size": 0.1},
        {"neftune_noise_alpha": 5},
    ],
)
def test_field_that_changes_numbers_is_marked(given: dict[str, Any]) -> None:
    assert marked(imported(LEAST | given)) >= {*given}
