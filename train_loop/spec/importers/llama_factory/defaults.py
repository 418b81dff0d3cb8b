"""The defaults of LLaMA-Factory, by field of a spec: those of TrainingArguments, and its own.

Source: LLaMA-Factory 0.9.5, `hparams`.
"""

from train_loop.spec.importers.defaults import Answer, Derived, SpecDefault, ToolDefault
from train_loop.spec.importers.hugging_face.defaults import TRAINER

DEFAULTS: dict[str, Answer] = TRAINER | {
    "data.columns": Derived(),
    "data.add_bos": SpecDefault("as the tokenizer or the chat template does"),
    "data.on_long_rows": Derived(),
    "data.sequence_length": ToolDefault(2048, "cutoff_len"),
    "data.packing": Derived(),
    "model.head": ToolDefault("causal_lm"),
    "model.master_dtype": SpecDefault("trained weights are fp32, and frozen ones are rounded before each use"),
    "model.freeze_module_prefix": ToolDefault([]),
    "model.gradient_checkpointing": ToolDefault("full", "disable_gradient_checkpointing"),
    "model.lora": Derived(),
    "model.adapter": ToolDefault(None),
    "model.quantize_base": ToolDefault(None),
}
"""The answer of LLaMA-Factory to each field."""
