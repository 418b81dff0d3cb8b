"""The defaults of ROLL's workers that train, by field of a spec.

Source: github.com/alibaba/ROLL at 8eb27cc, `roll/configs`, whose training_args extend TrainingArguments.
"""

from dataclasses import replace

from train_loop.spec.importers.defaults import Answer, Derived, SpecDefault, ToolDefault
from train_loop.spec.importers.hugging_face.defaults import TRAINER

_PIPELINE: dict[str, Answer] = {
    "data.columns": Derived(),
    "data.on_long_rows": SpecDefault("ROLL's SFT cuts tokens off at sequence_length, also those of the answer"),
    "data.sequence_length": SpecDefault("ROLL's files set it"),
    "data.shuffle": Derived(),
    "data.seed": SpecDefault("the order is another one in any case"),
    "model.dtype": Derived(),
    "model.master_dtype": SpecDefault("with param_dtype it is written"),
    "model.head": ToolDefault("causal_lm"),
    "model.gradient_checkpointing": ToolDefault("full"),
    "model.freeze_module_prefix": ToolDefault([]),
    "model.lora": ToolDefault(None),
    "model.adapter": ToolDefault(None),
    "model.quantize_base": ToolDefault(None),
    "training.momentum": ToolDefault(None),
    "training.seed": ToolDefault(42, "seed"),
    "training.max_grad_norm": ToolDefault(1.0, "max_grad_norm"),
    "training.logging_steps": ToolDefault(1, "logging_steps"),
}
_ARGUMENTS: dict[str, Answer] = {
    "training.gradient_accumulation_steps": ToolDefault(1, "gradient_accumulation_steps"),
    "training.num_train_epochs": ToolDefault(1.0, "num_train_epochs"),
}


def defaults_of(worker: str) -> dict[str, Answer]:
    """Return the answer of a worker to each field."""
    arguments = {
        target: replace(answer, field=f"{worker}.training_args.{answer.field}")
        if isinstance(answer, ToolDefault) and answer.field
        else answer
        for target, answer in (TRAINER | _ARGUMENTS).items()
    }
    packing = ToolDefault(False, f"{worker}.use_sequence_packing", why="which pads each row")
    return arguments | _PIPELINE | {"data.packing": packing}
