"""ROLL at 8eb27cc: random pipelines of SFT with FSDP2, and the rules of its SFT pipeline and FSDP2 strategy."""

import math
from typing import Any

from tests.unit.train_loop.spec.importers.tools.hugging_face import adapted_by_peft
from tests.unit.train_loop.spec.importers.tools.run import ROWS, Draws, Run, rates_of_trainer, sometimes

_ARGUMENTS: dict[str, list[Any]] = {
    "learning_rate": [1e-5, 1e-4],
    "weight_decay": [0.0, 0.1],
    "per_device_train_batch_size": [1, 2, 4],
    "gradient_accumulation_steps": [1, 2, 8],
    "num_train_epochs": [1, 2, 3],
    "warmup_steps": [0, 5, 20],
    "warmup_ratio": [0.0, 0.1],
    "lr_scheduler_type": ["linear", "cosine", "constant_with_warmup"],
    "adam_beta2": [0.95, 0.999],
}
_MODEL: dict[str, list[Any]] = {
    "disable_gradient_checkpointing": [True, False],
    "lora_target": ["q_proj,v_proj", "all-linear"],
    "lora_rank": [8, 16],
    "lora_alpha": [8, 16],
    "lora_dropout": [0.0, 0.1],
}


def draw(draws: Draws) -> dict[str, Any]:
    """Return a random pipeline of SFT, with adapters or without."""
    worker: dict[str, Any] = {"training_args": {}, "model_args": {}, "device_mapping": "list(range(0,4))"}
    for part, fields in (("training_args", _ARGUMENTS), ("model_args", _MODEL)):
        for name, values in fields.items():
            sometimes(draws, worker[part], name, values)
    dtypes = draws.choice([{"param_dtype": "bf16"}, {"param_dtype": "float32", "reduce_dtype": "float32"}])
    worker["strategy_args"] = {"strategy_name": "fsdp2_train", "strategy_config": dtypes}
    sometimes(draws, worker, "use_sequence_packing", [True, False])
    file: dict[str, Any] = {"sft_train": worker, "pretrain": "/m", "sequence_length": draws.choice([512, 2048])}
    sometimes(draws, file, "seed", [42, 7])
    sometimes(draws, file, "max_grad_norm", [1.0, 0.3])
    return file


def expected(file: dict[str, Any], *, processes: int) -> Run:
    """Return the run of ROLL's rules: a batch has the rows of all devices, and shorter ones are left out."""
    worker: dict[str, Any] = file["sft_train"]
    args: dict[str, Any] = worker["training_args"]
    model: dict[str, Any] = worker["model_args"]
    size = args.get("per_device_train_batch_size", 8) * args.get("gradient_accumulation_steps", 1) * processes
    steps = ROWS // size * args.get("num_train_epochs", 1)
    warmup = args.get("warmup_steps") or math.ceil(steps * args.get("warmup_ratio", 0.0))
    schedule, rate = args.get("lr_scheduler_type", "linear"), args.get("learning_rate", 5e-5)
    rates = rates_of_trainer(schedule, rate, steps=steps, warmup=warmup)
    dtype = {"bf16": "bf16", "float32": "fp32"}[worker["strategy_args"]["strategy_config"]["param_dtype"]]
    return Run(
        steps,
        size,
        rates,
        *_adapters(model),
        settings={
            "training.weight_decay": args.get("weight_decay", 0.0),
            "training.adam_beta2": args.get("adam_beta2", 0.999),
            "training.max_grad_norm": file.get("max_grad_norm", 1.0),
            "training.seed": file.get("seed", 42),
            "data.sequence_length": file["sequence_length"],
            "data.packing": False,
            "data.shuffle": False,
            "model.dtype": dtype,
            "model.master_dtype": dtype,
            "model.gradient_checkpointing": "none" if model.get("disable_gradient_checkpointing") else "full",
        },
    )


def _adapters(model: dict[str, Any]) -> tuple[frozenset[str] | None, frozenset[str], float | None]:
    targets = model.get("lora_target")
    if targets is None:
        return None, frozenset(), None
    rank = model.get("lora_rank", 8)
    return adapted_by_peft(
        r=rank,
        lora_alpha=model.get("lora_alpha", 2 * rank),
        lora_dropout=model.get("lora_dropout", 0.0),
        target_modules=targets if targets == "all-linear" else targets.split(","),
    )
