"""transformers' Trainer: random TrainingArguments, and its own arithmetic for their runs."""

import json
from typing import Any
from unittest.mock import Mock

from transformers import Trainer, TrainingArguments

from tests.unit.train_loop.spec.importers.tools.run import ROWS, Draws, Run, rates_of_trainer, sometimes

_OLD = "per_gpu_train_batch_size"
OPTIMIZERS = {"adamw_torch": "adamw", "adamw_torch_fused": "adamw", "sgd": "sgd", "adafactor": "adafactor"}
_WITH_BETAS = ("adamw_torch", "adamw_torch_fused")
_OPTIONS = {
    "cosine_with_min_lr": {"min_lr_rate": 0.1},
    "cosine_with_restarts": {"num_cycles": 2},
    "polynomial": {"power": 2.0},
    "warmup_stable_decay": {"num_decay_steps": 10, "min_lr_ratio": 0.1},
}
_SCHEDULES = ["linear", "cosine", "constant", "constant_with_warmup", "inverse_sqrt", *_OPTIONS]

_FIELDS: dict[str, list[Any]] = {
    "learning_rate": [1e-4, 3e-5],
    "per_device_train_batch_size": [4, 8, 16],
    "gradient_accumulation_steps": [1, 2, 8],
    "max_steps": [-1, 40, 100],
    "lr_scheduler_type": _SCHEDULES,
    "warmup_steps": [0, 5, 20, 0.1, 0.25],
    "weight_decay": [0.0, 0.1],
    "adam_beta1": [0.9, 0.8],
    "adam_beta2": [0.95, 0.999],
    "adam_epsilon": [1e-8, 1e-6],
    "max_grad_norm": [1.0, 0.3],
    "optim": list(OPTIMIZERS),
    "seed": [42, 7],
    "data_seed": [None, 3],
    "label_smoothing_factor": [0.0, 0.1],
    "bf16": [True, False],
    "fp16": [False],
    "gradient_checkpointing": [True, False],
    "activation_checkpointing": [None, True, False],
    "logging_steps": [1, 50],
}


def draw(draws: Draws) -> dict[str, Any]:
    """Return random TrainingArguments; some of them with every default, as `to_json_string()` writes them."""
    file = drawn_arguments(draws)
    file["num_train_epochs"] = draws.choice([1, 2.0, 3.0, 0.5])
    if draws.random() < 0.4:
        file = json.loads(arguments_of(file).to_json_string())
    if draws.random() < 0.2:
        file[_OLD] = draws.choice([None, 4])
    return file


def drawn_arguments(draws: Draws) -> dict[str, Any]:
    """Return random fields of TrainingArguments, which TRL's files may have, too."""
    file: dict[str, Any] = {}
    for name, values in _FIELDS.items():
        sometimes(draws, file, name, values)
    if (options := _OPTIONS.get(file.get("lr_scheduler_type", ""))) is not None:
        file["lr_scheduler_kwargs"] = options
    if draws.random() < 0.3:
        file["accelerator_config"] = _drawn_batches(draws, counts="gradient_accumulation_steps" not in file)
    return file


def _drawn_batches(draws: Draws, *, counts: bool) -> dict[str, Any]:
    config: dict[str, Any] = {"split_batches": draws.choice([True, False])}
    sometimes(draws, config, "dispatch_batches", [None, True])
    if counts:
        sometimes(draws, config, "gradient_accumulation_kwargs", [{"num_steps": 4}])
    return config


def arguments_of(file: dict[str, Any], **defaults: Any) -> TrainingArguments:
    """Return transformers' own arguments of a file; `defaults` are those of a tool that extends them."""
    given: dict[str, Any] = {**defaults, **{name: one for name, one in file.items() if name != _OLD}}
    # Trainer runs with bf16 on CPUs as on GPUs.
    return TrainingArguments(**{"output_dir": "x", **given, "use_cpu": True})


def expected(file: dict[str, Any], *, processes: int) -> Run:
    """Return the run of transformers' own code."""
    args = arguments_of(file)
    run = run_of(args, size=file.get(_OLD) or args.per_device_train_batch_size, processes=processes)
    return Run(*run, adapted=None, settings=settings_of(args) | {"data.packing": False})


def run_of(args: TrainingArguments, *, size: int, processes: int) -> tuple[int, int, tuple[float, ...]]:
    """Return steps, batch and rates, computed by Trainer's methods."""
    config: Any = args.accelerator_config
    accumulation = (config.gradient_accumulation_kwargs or {}).get("num_steps", args.gradient_accumulation_steps)
    args.gradient_accumulation_steps = accumulation
    # Accelerate shares a batch among the processes, or each has one.
    together = size if config.split_batches else size * processes
    sizes = {"get_sp_size": 1, "num_examples": ROWS, "get_total_train_batch_size": together * accumulation}
    trainer = Mock(spec=Trainer, **{f"{name}.return_value": size for name, size in sizes.items()})
    *_, steps = Trainer.set_initial_training_values(trainer, args, range(ROWS // together))
    rates = rates_of_trainer(args.lr_scheduler_type.value, args.learning_rate, steps=steps,
                             warmup=args.get_warmup_steps(steps), options=args.lr_scheduler_kwargs)  # fmt: skip
    return steps, together * accumulation, rates


def settings_of(args: TrainingArguments) -> dict[str, Any]:
    """Return the values that Trainer reads from its arguments."""
    betas = {f"training.{name}": getattr(args, name) for name in ("adam_beta1", "adam_beta2", "adam_epsilon")}
    return {
        **(betas if args.optim.value in _WITH_BETAS else {}),
        **({"training.momentum": 0.0} if args.optim.value == "sgd" else {}),
        "training.optimizer": OPTIMIZERS[args.optim.value],
        "training.weight_decay": args.weight_decay,
        "training.max_grad_norm": args.max_grad_norm,
        "training.label_smoothing_factor": args.label_smoothing_factor,
        "training.seed": args.seed,
        "training.logging_steps": args.logging_steps,
        "data.seed": args.seed if args.data_seed is None else args.data_seed,
        "model.dtype": "bf16" if args.bf16 else "fp32",
        "model.gradient_checkpointing": "full" if args.activation_checkpointing else "none",
    }
