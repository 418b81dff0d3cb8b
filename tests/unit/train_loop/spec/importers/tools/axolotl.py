"""axolotl 0.19: random configurations, and its rules for their runs."""

import math
from typing import Any

from tests.unit.train_loop.spec.importers.tools.hugging_face import adapted_by_peft
from tests.unit.train_loop.spec.importers.tools.run import ROWS, Draws, Run, rates_of, rates_of_trainer, sometimes

_TARGETS = [["q_proj", "v_proj"], ["q_proj", "k_proj", "v_proj", "o_proj"], ["down_proj"]]


def draw(draws: Draws) -> dict[str, Any]:
    """Return a random configuration of a full, LoRA or QLoRA fine-tune."""
    file: dict[str, Any] = {"base_model": "org/model", "datasets": [{"path": "org/rows", "type": "completion"}]}
    file["learning_rate"] = draws.choice([2e-4, "2e-5", 1e-5])
    file["val_set_size"] = draws.choice([0, 0.0])
    options: dict[str, list[Any]] = {
        "micro_batch_size": [1, 2, 4],
        "gradient_accumulation_steps": [1, 2, 4, 8],
        "num_epochs": [1, 2, 3, 0.5],
        "max_steps": [20, 40, None],
        "lr_scheduler": ["linear", "cosine", "constant_with_warmup", "constant", "inverse_sqrt", None],
        "weight_decay": [0.0, 0.01, 0.1],
        "adam_beta2": [0.95, 0.999],
        "adam_epsilon": [1e-8, 1e-6],
        "max_grad_norm": [1.0, 0.3],
        "seed": [42, 7],
        "sequence_len": [512, 2048],
        "sample_packing": [False, None],
        "gradient_checkpointing": [True, False, None],
        "bf16": ["auto", True, False],
        "fp16": [False, None],
        "wandb_project": [None],
        "tf32": [True, False],
    }
    for name, values in options.items():
        sometimes(draws, file, name, values)
    # Fractions that are whole steps: axolotl rounds down, and the report says so.
    warmup = draws.choice(["warmup_ratio", "warmup_steps", None])
    if warmup is None and not file.get("max_steps"):
        warmup = "warmup_steps"
    if warmup is not None:
        file[warmup] = draws.choice([0.05, 0.1, 0.25] if warmup == "warmup_ratio" else [0, 1, 3, 10])
    if file.get("lr_scheduler", "cosine") in ("cosine", None):
        sometimes(draws, file, "cosine_min_lr_ratio", [0.1, 0.25, 0], 0.3)
    _draw_adapter(draws, file)
    return file


def _draw_adapter(draws: Draws, file: dict[str, Any]) -> None:
    kind = draws.choice(["lora", "qlora", None, ""])
    if kind is None:
        return
    file["adapter"] = kind
    if kind == "":
        sometimes(draws, file, "lora_r", [8])
        return
    file |= {"lora_r": draws.choice([8, 16, 64]), "lora_alpha": draws.choice([8, 16, 32])}
    sometimes(draws, file, "lora_dropout", [0.0, 0.05, None])
    sometimes(draws, file, "peft_use_rslora", [True, False, None], 0.4)
    sometimes(draws, file, "lora_modules_to_save", [["embed_tokens", "lm_head"], None], 0.3)
    if kind == "qlora":
        file["load_in_4bit"] = True
    if draws.random() < 0.5:
        file["lora_target_linear"] = True
    else:
        file["lora_target_modules"] = draws.choice(_TARGETS)


def expected(file: dict[str, Any], *, processes: int) -> Run:
    """Return the run of axolotl's own rules."""
    batch = (file.get("micro_batch_size") or 1) * (file.get("gradient_accumulation_steps") or 1) * processes
    total = math.ceil(ROWS * file.get("num_epochs", 1) / batch)
    steps = file.get("max_steps") or total
    rate = float(file["learning_rate"])
    shortest = min(total, steps)
    warmup = file.get("warmup_steps")
    if warmup is None and file.get("warmup_ratio") is not None:
        warmup = int(file["warmup_ratio"] * shortest)
    elif warmup is None:
        warmup = min(int(0.03 * shortest), 100)
    warmup = 2 if warmup == 1 else warmup
    return Run(steps, batch, _rates(file, rate, steps, warmup), *_adapters(file), settings=_settings(file))


def _rates(file: dict[str, Any], rate: float, steps: int, warmup: int) -> tuple[float, ...]:
    name, least = file.get("lr_scheduler") or "cosine", file.get("cosine_min_lr_ratio")
    if name != "cosine" or not least:
        return rates_of_trainer(name, rate, steps=steps, warmup=warmup)

    def rule(step: int) -> float:
        if step < warmup:
            return step / max(1, warmup)
        share = (step - warmup) / max(1, steps - warmup)
        return float((1 - least) * 0.5 * (1 + math.cos(math.pi * share)) + least)

    return rates_of(rule, rate, steps)


def _adapters(file: dict[str, Any]) -> tuple[frozenset[str] | None, frozenset[str], float | None]:
    if not file.get("adapter"):
        return None, frozenset(), None
    targets = "every linear layer" if file.get("lora_target_linear") else file["lora_target_modules"]
    return adapted_by_peft(
        r=file["lora_r"],
        lora_alpha=file["lora_alpha"],
        lora_dropout=file.get("lora_dropout") or 0.0,
        target_modules=targets,
        modules_to_save=file.get("lora_modules_to_save"),
        use_rslora=bool(file.get("peft_use_rslora")),
    )


def _settings(file: dict[str, Any]) -> dict[str, Any]:
    bf16 = file.get("bf16", "auto")
    saved = file.get("gradient_checkpointing")
    return {
        "training.weight_decay": file.get("weight_decay", 0.0),
        "training.adam_beta1": 0.9,
        "training.adam_beta2": file.get("adam_beta2", 0.999),
        "training.adam_epsilon": file.get("adam_epsilon", 1e-8),
        "training.max_grad_norm": file.get("max_grad_norm", 1.0),
        "training.optimizer": "adamw",
        "training.seed": file.get("seed", 42),
        "data.seed": file.get("seed", 42),
        "data.sequence_length": file.get("sequence_len", 512),
        "data.packing": bool(file.get("sample_packing")),
        "model.dtype": "bf16" if bf16 else "fp32",
        "model.gradient_checkpointing": "full" if saved else "none",
        "model.quantize_base": "nf4" if file.get("adapter") == "qlora" else None,
    }
