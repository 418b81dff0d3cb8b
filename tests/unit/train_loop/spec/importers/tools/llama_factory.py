"""LLaMA-Factory 0.9.5: random configurations, and its rules for their runs, which are mostly those of Trainer."""

import math
from typing import Any

from tests.unit.train_loop.spec.importers.tools.hugging_face import adapted_by_peft
from tests.unit.train_loop.spec.importers.tools.run import ROWS, Draws, Run, rates_of_trainer, sometimes


def draw(draws: Draws) -> dict[str, Any]:
    """Return a random configuration of a full, LoRA or QLoRA fine-tune, or of pre-training."""
    file: dict[str, Any] = {"model_name_or_path": "org/model", "do_train": True, "dataset": "rows", "template": "qwen3"}
    options: dict[str, list[Any]] = {
        "stage": ["sft", "pt"],
        "learning_rate": [1e-4, "1e-5"],
        "per_device_train_batch_size": [1, 2, 4],
        "gradient_accumulation_steps": [1, 2, 8],
        "num_train_epochs": [1, 2.0, 3.0],
        "max_steps": [-1, 40, 100],
        "lr_scheduler_type": ["linear", "cosine", "constant_with_warmup", "polynomial"],
        "weight_decay": [0.0, 0.1],
        "adam_beta2": [0.95, 0.999],
        "max_grad_norm": [1.0, 0.3],
        "seed": [42, 7],
        "cutoff_len": [2048, 512],
        "disable_gradient_checkpointing": [True, False],
        "bf16": [True, False],
        "pure_bf16": [False],
        "overwrite_output_dir": [True],
        "val_size": [0.0],
        "train_on_prompt": [False],
        "mask_history": [False],
    }
    for name, values in options.items():
        sometimes(draws, file, name, values)
    warmup = draws.choice(["warmup_ratio", "warmup_steps", None])
    if warmup is not None:
        file[warmup] = draws.choice([0.0, 0.1, 0.25] if warmup == "warmup_ratio" else [0, 5, 20])
    if draws.random() < 0.5:
        file[draws.choice(["packing", "neat_packing"])] = draws.choice([True, False])
    method = sometimes(draws, file, "finetuning_type", ["lora", "full"], 0.8)
    if method != "full":
        _draw_adapter(draws, file)
    return file


def _draw_adapter(draws: Draws, file: dict[str, Any]) -> None:
    options: dict[str, list[Any]] = {
        "lora_rank": [8, 16],
        "lora_alpha": [8, 16, 64, None],
        "lora_dropout": [0.0, 0.1],
        "lora_target": ["all", "q_proj,v_proj", "q_proj, k_proj, down_proj"],
        "use_rslora": [True, False],
        "additional_target": ["embed_tokens,lm_head", "lm_head"],
        "quantization_bit": [4, 8],
    }
    for name, values in options.items():
        sometimes(draws, file, name, values, 0.4)


def expected(file: dict[str, Any], *, processes: int) -> Run:
    """Return the run of LLaMA-Factory's own rules, and of Trainer's."""
    size = file.get("per_device_train_batch_size", 8) * processes
    accumulation = file.get("gradient_accumulation_steps", 1)
    of_epoch = max(ROWS // size // accumulation, 1)
    steps = math.ceil(file.get("num_train_epochs", 3.0) * of_epoch)
    steps = file["max_steps"] if file.get("max_steps", -1) > 0 else steps
    warmup = file.get("warmup_steps") or math.ceil(steps * file.get("warmup_ratio", 0.0))
    rate = float(file.get("learning_rate", 5e-5))
    rates = rates_of_trainer(file.get("lr_scheduler_type", "linear"), rate, steps=steps, warmup=warmup)
    return Run(steps, size * accumulation, rates, *_adapters(file), settings=_settings(file))


def _adapters(file: dict[str, Any]) -> tuple[frozenset[str] | None, frozenset[str], float | None]:
    if file.get("finetuning_type", "lora") == "full":
        return None, frozenset(), None
    rank, targets = file.get("lora_rank", 8), file.get("lora_target", "all")
    saved = file.get("additional_target")
    return adapted_by_peft(
        r=rank,
        lora_alpha=file.get("lora_alpha") or 2 * rank,
        lora_dropout=file.get("lora_dropout", 0.0),
        target_modules="every linear layer" if targets == "all" else [one.strip() for one in targets.split(",")],
        modules_to_save=None if saved is None else saved.split(","),
        use_rslora=file.get("use_rslora", False),
    )


def _settings(file: dict[str, Any]) -> dict[str, Any]:
    packs = file.get("packing") or file.get("neat_packing")
    if "packing" not in file and not file.get("neat_packing"):
        packs = file.get("stage", "sft") == "pt"
    bits = file.get("quantization_bit") if file.get("finetuning_type", "lora") == "lora" else None
    return {
        "training.weight_decay": file.get("weight_decay", 0.0),
        "training.adam_beta1": 0.9,
        "training.adam_beta2": file.get("adam_beta2", 0.999),
        "training.adam_epsilon": 1e-8,
        "training.max_grad_norm": file.get("max_grad_norm", 1.0),
        "training.optimizer": "adamw",
        "training.seed": file.get("seed", 42),
        "data.seed": file.get("seed", 42),
        "data.sequence_length": file.get("cutoff_len", 2048),
        "data.packing": bool(packs),
        "model.dtype": "bf16" if file.get("bf16") else "fp32",
        "model.gradient_checkpointing": "none" if file.get("disable_gradient_checkpointing") else "full",
        "model.quantize_base": {4: "nf4", 8: "int8", None: None}[bits],
    }
