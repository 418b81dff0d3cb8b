"""torchtune 0.6.1: random recipes, and its rules for their runs."""

import math
from typing import Any

from tests.support.builders.specs import TINY
from tests.unit.train_loop.spec.importers.tools.run import ROWS, Draws, Run, rates_of, sometimes

_NAMES = {
    "q_proj": "self_attn.q_proj",
    "k_proj": "self_attn.k_proj",
    "v_proj": "self_attn.v_proj",
    "output_proj": "self_attn.o_proj",
    "w1": "mlp.gate_proj",
    "w2": "mlp.down_proj",
    "w3": "mlp.up_proj",
}
"""transformers' names of torchtune's layers, by `torchtune.models.convert_weights`."""
_DECAY = {
    "torch.optim.AdamW": 0.01,
    "torch.optim.Adam": 0.0,
    "torch.optim.SGD": 0.0,
    "bitsandbytes.optim.PagedAdamW": 0.01,
}
_KINDS = {"AdamW": "adamw", "Adam": "adam", "SGD": "sgd", "PagedAdamW": "adamw"}
_COSINE = "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup"


def draw(draws: Draws) -> dict[str, Any]:
    """Return a random recipe of a full, LoRA or QLoRA fine-tune."""
    kind = draws.choice(["", "lora_", "qlora_"])
    model: dict[str, Any] = {"_component_": f"torchtune.models.qwen2_5.{kind}qwen2_5_3b"}
    if kind:
        model["lora_attn_modules"] = draws.choice(
            [["q_proj", "v_proj"], ["q_proj", "v_proj", "output_proj"], ["k_proj"]]
        )
        arguments: dict[str, list[Any]] = {
            "apply_lora_to_mlp": [True, False],
            "apply_lora_to_output": [False],
            "lora_rank": [8, 64],
            "lora_alpha": [16, 128],
            "lora_dropout": [0.0, 0.05],
        }
        for name, values in arguments.items():
            sometimes(draws, model, name, values)
    optimizer: dict[str, Any] = {"_component_": draws.choice([*_DECAY])}
    sometimes(draws, optimizer, "weight_decay", [0.0, 0.05])
    sometimes(draws, optimizer, "fused", [True])
    optimizer["lr"] = draws.choice([3e-4, "2e-5"])
    file: dict[str, Any] = {
        "output_dir": "/tmp/out",
        "tokenizer": {"_component_": "torchtune.models.qwen2_5.qwen2_5_tokenizer", "path": "/tmp/m/vocab.json",
                      "max_seq_len": draws.choice([None, 1024])},
        "model": model,
        "checkpointer": {"_component_": "torchtune.training.FullModelHFCheckpointer", "checkpoint_dir": "/tmp/m",
                         "checkpoint_files": ["model.safetensors"], "output_dir": "${output_dir}"},
        "dataset": {"_component_": "torchtune.datasets.chat_dataset", "source": "org/rows",
                    "conversation_column": "messages", "conversation_style": "openai"},
        "batch_size": draws.choice([1, 2, 4]),
        "epochs": draws.choice([1, 2, 3]),
        "max_steps_per_epoch": draws.choice([None, 20]),
        "gradient_accumulation_steps": draws.choice([1, 2, 8]),
        "optimizer": optimizer,
        "dtype": draws.choice(["bf16", "fp32"]),
        "seed": draws.choice([None, 7]),
    }  # fmt: skip
    if kind or draws.random() < 0.5:
        file["lr_scheduler"] = {"_component_": _COSINE, "num_warmup_steps": draws.choice([0, 4, 10])}
    options: dict[str, list[Any]] = {
        "clip_grad_norm": [None, 1.0, "inf"],
        "enable_activation_checkpointing": [True, False],
        "shuffle": [True, False],
        "log_every_n_steps": [1, 5],
    }
    for name, values in options.items():
        sometimes(draws, file, name, values)
    sometimes(draws, file["dataset"], "packed", [False])
    return file


def expected(file: dict[str, Any], *, processes: int) -> Run:
    """Return the run of torchtune's own rules."""
    size, accumulation = file["batch_size"] * processes, file["gradient_accumulation_steps"]
    of_epoch = ROWS // size // accumulation
    if file["max_steps_per_epoch"] is not None:
        of_epoch = min(of_epoch, file["max_steps_per_epoch"])
    steps = of_epoch * file["epochs"]
    return Run(steps, size * accumulation, _rates(file, steps), *_adapters(file["model"]), settings=_settings(file))


def _rates(file: dict[str, Any], steps: int) -> tuple[float, ...]:
    rate, scheduler = float(file["optimizer"]["lr"]), file.get("lr_scheduler")
    if scheduler is None:
        return rates_of(lambda step: 1.0, rate, steps)
    warmup = scheduler["num_warmup_steps"]

    def rule(step: int) -> float:
        if step < warmup:
            return float(step / max(1, warmup))
        return max(0.0, 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup))))

    return rates_of(rule, rate, steps)


def _adapters(model: dict[str, Any]) -> tuple[frozenset[str] | None, frozenset[str], float | None]:
    if "lora_attn_modules" not in model:
        return None, frozenset(), None
    layers = [*model["lora_attn_modules"], *(("w1", "w2", "w3") if model.get("apply_lora_to_mlp") else ())]
    names = {f"model.layers.{layer}.{_NAMES[one]}" for one in layers for layer in range(TINY["num_hidden_layers"])}
    return frozenset(names), frozenset(), model.get("lora_alpha", 16) / model.get("lora_rank", 8)


def _settings(file: dict[str, Any]) -> dict[str, Any]:
    component, limit = file["optimizer"]["_component_"], file.get("clip_grad_norm")
    kind = _KINDS[component.rpartition(".")[2]]
    return {
        "training.weight_decay": file["optimizer"].get("weight_decay", _DECAY[component]),
        "training.adam_beta1": 0.9,
        "training.adam_beta2": 0.999,
        "training.adam_epsilon": 1e-8,
        "training.momentum": 0.0 if kind == "sgd" else None,
        "training.max_grad_norm": None if limit in (None, "inf") else limit,
        "training.optimizer": kind,
        "training.seed": file["seed"] or 0,
        "data.sequence_length": file["tokenizer"]["max_seq_len"] or 4096,
        "data.packing": False,
        "data.shuffle": file.get("shuffle", True),
        "model.dtype": file["dtype"],
        "model.master_dtype": file["dtype"],
        "model.gradient_checkpointing": "full" if file.get("enable_activation_checkpointing") else "none",
        "model.quantize_base": "nf4" if ".qlora_" in file["model"]["_component_"] else None,
    }
