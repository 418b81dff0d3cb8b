"""The defaults of torchtune's recipes, by field of a spec. Source: torchtune 0.6.1, `recipes`."""

from train_loop.spec.importers.defaults import Answer, Derived, SpecDefault, ToolDefault
from train_loop.spec.importers.hugging_face.defaults import TRAINER

DEFAULTS: dict[str, Answer] = TRAINER | {
    "data.columns": Derived(),
    "data.add_bos": SpecDefault("as the tokenizer or the chat template does"),
    "data.on_long_rows": Derived(),
    "data.sequence_length": Derived(),
    "data.packing": ToolDefault(False, "dataset.packed"),
    "data.shuffle": ToolDefault(True, "shuffle"),
    "data.seed": ToolDefault(0),
    "model.head": ToolDefault("causal_lm"),
    "model.dtype": Derived(),
    "model.master_dtype": Derived(),
    "model.freeze_module_prefix": ToolDefault([]),
    "model.gradient_checkpointing": ToolDefault("none", "enable_activation_checkpointing"),
    "model.lora": ToolDefault(None),
    "model.adapter": ToolDefault(None),
    "model.quantize_base": ToolDefault(None),
    "training.learning_rate": Derived(),
    "training.weight_decay": Derived(),
    "training.optimizer": Derived(),
    "training.adam_beta1": ToolDefault(0.9),
    "training.adam_beta2": ToolDefault(0.999),
    "training.adam_epsilon": ToolDefault(1e-8),
    "training.lr_scheduler_type": ToolDefault("constant", "lr_scheduler"),
    "training.warmup_steps": ToolDefault(0),
    "training.per_device_train_batch_size": Derived(),
    "training.gradient_accumulation_steps": ToolDefault(1, "gradient_accumulation_steps"),
    "training.max_grad_norm": ToolDefault(None, "clip_grad_norm"),
    "training.seed": ToolDefault(0, "seed", why="which draws one"),
    "training.logging_steps": ToolDefault(1, "log_every_n_steps"),
}
"""The answer of torchtune to each field."""
