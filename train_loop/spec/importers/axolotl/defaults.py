"""The defaults of axolotl, by field of a spec. Source: axolotl 0.19, `utils/schemas` and `core/builders`."""

from train_loop.spec.importers.defaults import Answer, Derived, SpecDefault, ToolDefault
from train_loop.spec.importers.hugging_face.defaults import TRAINER

DEFAULTS: dict[str, Answer] = TRAINER | {
    "data.columns": Derived(),
    "data.add_bos": SpecDefault("as the tokenizer or the chat template does"),
    "data.on_long_rows": Derived(),
    "data.sequence_length": ToolDefault(512, "sequence_len"),
    "data.packing": ToolDefault(False, "sample_packing"),
    "model.head": ToolDefault("causal_lm"),
    "model.dtype": Derived(),
    "model.master_dtype": Derived(),
    "model.freeze_module_prefix": ToolDefault([]),
    "model.lora": ToolDefault(None),
    "model.adapter": ToolDefault(None),
    "model.quantize_base": ToolDefault(None),
    "training.learning_rate": Derived(),
    "training.optimizer": ToolDefault("adamw", "optimizer"),
    "training.lr_scheduler_type": ToolDefault("cosine", "lr_scheduler"),
    "training.warmup_steps": Derived(),
    "training.per_device_train_batch_size": ToolDefault(1, "micro_batch_size"),
    "training.gradient_accumulation_steps": ToolDefault(1, "gradient_accumulation_steps"),
    "training.logging_steps": ToolDefault(1, "logging_steps", why="or up to 10 for long runs"),
}
"""The answer of axolotl to each field."""
