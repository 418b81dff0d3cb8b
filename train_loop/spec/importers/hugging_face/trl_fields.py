"""The fields of TRL's SFTConfig, RewardConfig, ModelConfig and ScriptArguments, and their defaults.

Source: trl 1.16, `trainer/*_config.py` and `scripts/utils.py`, and fields of older versions.
"""

from train_loop.spec.importers.defaults import Answer, Derived, SpecDefault, ToolDefault
from train_loop.spec.importers.draft import Drop, Rule, Take, unneeded
from train_loop.spec.importers.hugging_face.defaults import TRAINER
from train_loop.spec.importers.hugging_face.transformers_fields import RULES as ARGUMENTS
from train_loop.spec.importers.values import number

ADAPTERS = {
    "r": "lora_r",
    "alpha": "lora_alpha",
    "dropout": "lora_dropout",
    "target_modules": "lora_target_modules",
    "target_parameters": "lora_target_parameters",
    "modules_to_save": "lora_modules_to_save",
    "use_rslora": "use_rslora",
    "use_dora": "use_dora",
}
"""Fields of ModelConfig by field of `model.lora`."""

_QUANTIZED = Drop("only the frozen weights below adapters are quantised, so use_peft is needed", numbers=True)
_FILES = unneeded("data.train names files; write the rows of the split to them")
_READER = unneeded("Ray Data reads and prepares the rows")

RULES: dict[str, Rule] = ARGUMENTS | {
    "use_peft": unneeded("off"),
    **{name: unneeded("use_peft is off") for name in ADAPTERS.values()},
    "lora_task_type": unneeded("model.head"),
    "load_in_4bit": _QUANTIZED,
    "load_in_8bit": _QUANTIZED,
    "bnb_4bit_quant_type": Drop("4 bits are always nf4", numbers=True, harmless=(None, "nf4")),
    "bnb_4bit_quant_storage": unneeded("quantised weights are sharded"),
    "use_bnb_nested_quant": unneeded("scales are bf16"),
    "model_revision": Drop("download that revision to model.path", numbers=True, harmless=(None, "main")),
    "trust_remote_code": Drop("code that comes with a model is not run", numbers=True),
    "model_init_kwargs.*": Drop("the folder's own config.json is used", numbers=True),
    "model_init_kwargs": Drop("the folder's own config.json is used", numbers=True),
    "router_aux_loss_coef": Take("training.router_aux_loss.coef", number),
    "chat_template_path": Drop("set data.chat_template with data.columns.messages", numbers=True),
    "eos_token": Drop(
        "the tokenizer's own EOS ends each row: write it to the tokenizer's folder",
        numbers=True,
        harmless=(None, "<EOS_TOKEN>"),
    ),
    "pad_token": unneeded("padding is not computed"),
    "pad_to_multiple_of": unneeded("time only"),
    "padding_free": unneeded("time only"),
    "dataset_num_proc": _READER,
    "dataset_batch_size": _READER,
    "dataset_kwargs": Drop("rows that are tokenised already need data.columns.input_ids", numbers=True),
    "dataset_kwargs.*": Drop("rows that are tokenised already need data.columns.input_ids", numbers=True),
    "dataset_config": _FILES,
    "dataset_train_split": _FILES,
    "dataset_test_split": _FILES,
    "dataset_streaming": _READER,
    "streaming": _READER,
    "test_split_size": Drop("rows to evaluate are other files: write data.eval", numbers=True),
    "shuffle_dataset": unneeded("samples are shuffled (data.shuffle)"),
    "eval_packing": Drop("rows to evaluate are read as those to train on"),
    "ignore_bias_buffers": unneeded("DDP is not used"),
    "loss_type": unneeded("the loss of the next token"),
    "activation_offloading": unneeded("off"),
    "disable_dropout": Drop("dropout of the model's config stays; set it to 0 there", harmless=(None, False)),
    "env": unneeded("the operator chooses the environment"),
    "env.*": unneeded("the operator chooses the environment"),
}
"""The rule of each field. Fields that depend on others are handled before."""

SFT: dict[str, Answer] = TRAINER | {
    "data.columns": Derived(),
    "data.add_bos": SpecDefault("as the tokenizer does"),
    "data.on_long_rows": Derived(),
    "data.sequence_length": ToolDefault(1024, "max_length"),
    "data.packing": ToolDefault(False, "packing", why="which pads each row"),
    "model.head": ToolDefault("causal_lm"),
    "model.dtype": ToolDefault("bf16", "bf16", why="unless fp16 is on"),
    "model.master_dtype": ToolDefault("fp32", "dtype"),
    "model.gradient_checkpointing": ToolDefault("full", "gradient_checkpointing"),
    "model.freeze_module_prefix": ToolDefault([]),
    "model.lora": ToolDefault(None),
    "model.adapter": ToolDefault(None),
    "model.quantize_base": ToolDefault(None),
    "training.learning_rate": ToolDefault(2e-5, "learning_rate"),
    "training.logging_steps": ToolDefault(10, "logging_steps"),
}
"""The answer of `trl sft` to each field of a spec."""

REWARD: dict[str, Answer] = SFT | {
    "model.head": Derived(),
    "data.packing": ToolDefault(False, why="which pads each row"),
    "training.learning_rate": ToolDefault(1e-4, "learning_rate"),
}
"""The answer of `trl reward` to each field of a spec."""
