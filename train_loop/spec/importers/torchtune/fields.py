"""The fields of torchtune's recipes, with what becomes of each.

Source: torchtune 0.6.1, `recipes` and `torchtune/models`; fields of later versions of its repository are known, too.
"""

from train_loop.spec.importers.draft import Drop, Rule, Take, unneeded
from train_loop.spec.importers.values import dtype, flag, number

_RUN = unneeded("the service chooses the run directory")
_FOLDER = unneeded("the folder of the model has its config.json and its files")
_TOKENIZER = unneeded("the tokenizer of the model's folder")
_OPERATOR = unneeded("the operator chooses trackers (TRAINSHED_SINKS)")
_READER = unneeded("Ray Data reads and prepares the rows")
_FUSED = unneeded("torch chooses the implementation")
_OTHER_RULE = Drop("the optimizer has no such option here", numbers=True, harmless=(None, False, 0, 0.0))
_LOADER = Drop("rows are read from files: write the chosen ones to another file", numbers=True)

RULES: dict[str, Rule] = {
    "output_dir": _RUN,
    "tokenizer._component_": _TOKENIZER,
    "tokenizer.path": _TOKENIZER,
    "tokenizer.merges_file": _TOKENIZER,
    "tokenizer.merges_path": _TOKENIZER,
    "tokenizer.vocab_path": _TOKENIZER,
    "tokenizer.special_tokens_path": _TOKENIZER,
    "tokenizer.tokenizer_json_path": _TOKENIZER,
    "tokenizer.tokenizer_config_json_path": _TOKENIZER,
    "tokenizer.truncation_type": unneeded("rows lose their end"),
    "tokenizer.prompt_template": Drop(
        "rows are rendered by the tokenizer's own chat template; set data.chat_template", numbers=True
    ),
    "tokenizer.prompt_template.*": Drop(
        "rows are rendered by the tokenizer's own chat template; set data.chat_template", numbers=True
    ),
    "model.*": unneeded("the model's folder has its config.json"),
    "checkpointer._component_": _FOLDER,
    "checkpointer.checkpoint_files": _FOLDER,
    "checkpointer.checkpoint_files.*": _FOLDER,
    "checkpointer.model_type": _FOLDER,
    "checkpointer.output_dir": _RUN,
    "checkpointer.adapter_checkpoint": Drop("set model.adapter to a folder of adapters", numbers=True),
    "checkpointer.recipe_checkpoint": Drop("a run starts at step 0 with the weights of the folder", numbers=True),
    "checkpointer.safe_serialization": unneeded("exports are safetensors"),
    "checkpointer.keep_last_n_checkpoints": Take("checkpoint.keep_last", number),
    "checkpointer.enable_dcp": unneeded("checkpoints are always distributed"),
    "resume_from_checkpoint": Drop("a run starts at step 0 with the weights of the folder", numbers=True),
    "should_load_recipe_state": Drop("a run starts at step 0 with the weights of the folder", numbers=True),
    "save_adapter_weights_only": unneeded("checkpoints have the adapters alone; trainshed export writes either"),
    "enable_async_checkpointing": unneeded("a thread writes checkpoints (strategy.async_save_ckpt)"),
    "batch_size": Take("training.per_device_train_batch_size", number),
    "batch_size_val": Drop("evaluation uses per_device_train_batch_size; its loss is the same"),
    "gradient_accumulation_steps": Take("training.gradient_accumulation_steps", number),
    "shuffle": Take("data.shuffle", flag),
    "seed": Take("training.seed", number),
    "optimizer.fused": _FUSED,
    "optimizer.foreach": _FUSED,
    "optimizer.capturable": _FUSED,
    "optimizer.is_paged": _FUSED,
    "optimizer.lr": Take("training.learning_rate", number),
    "optimizer.weight_decay": Take("training.weight_decay", number),
    "optimizer.eps": Take("training.adam_epsilon", number),
    "optimizer.momentum": Take("training.momentum", number),
    "optimizer.*": _OTHER_RULE,
    "optimizer_in_bwd": unneeded("memory only: gradients are freed after the step"),
    "lr_scheduler.*": Drop("the schedule has no such option here", numbers=True),
    "loss.num_output_chunks": unneeded("the loss is computed in chunks if that saves memory (training.chunked_loss)"),
    "loss._component_": unneeded("the mean over the tokens of all workers, in chunks if that saves memory"),
    "loss.ignore_index": unneeded("labels of -100 are not trained"),
    "loss.*": Drop("the loss has no such option here", numbers=True),
    "dtype": Take("model.dtype", dtype),
    "device": Take(
        "scaling.resources_per_worker", lambda value: {"CPU": 1} if value == "cpu" else {"CPU": 1, "GPU": 1}
    ),
    "compile": Take("model.compile", flag, "each layer is compiled separately"),
    "compile.*": unneeded("each layer is compiled separately (model.compile)"),
    "enable_activation_checkpointing": Take(
        "model.gradient_checkpointing", lambda value: "full" if flag(value) else "none", "memory only"
    ),
    "enable_activation_offloading": unneeded("off"),
    "activation_offloading_use_streams": unneeded("copies overlap with computation"),
    "ac_mode": unneeded("memory only"),
    "ac_option": unneeded("memory only"),
    "fsdp_cpu_offload": Take("strategy.offload_policy", flag),
    "fsdp.cpu_offload": Take("strategy.offload_policy", flag),
    "fsdp_reshard_after_forward": Take("strategy.reshard_after_forward", flag),
    "fsdp_sharding_strategy": unneeded("every job trains with FSDP2"),
    "custom_sharded_layers": unneeded("embeddings and head are units with strategy.wrap_policy; numbers stay"),
    "memory_efficient_fsdp_wrap": unneeded("embeddings and head are units with strategy.wrap_policy; numbers stay"),
    "low_cpu_ram": unneeded("each rank reads its part of the weights"),
    "tensor_parallel_dim": Take("strategy.tp_size", number),
    "tensor_parallel_plan": unneeded("models have their own plans"),
    "tensor_parallel_plan.*": unneeded("models have their own plans"),
    "context_parallel_dim": Take("strategy.ulysses_size", number),
    "context_parallel_rotate_method": unneeded("sequences are shared by Ulysses"),
    "data_parallel_replicate_dim": Drop("set strategy.fsdp_size for copies of shard groups", harmless=(None, 1)),
    "data_parallel_shard_dim": Drop("set strategy.fsdp_size", harmless=(None, -1)),
    "enable_fp8_training": Take("strategy.float8", lambda value: "tensorwise" if flag(value) else None),
    "fp8_recipe_name": Take("strategy.float8"),
    "quantizer": unneeded("off"),
    "cudnn_deterministic_mode": Drop("see training.deterministic"),
    "clip_grad_norm": unneeded("none"),
    "max_steps_per_epoch": unneeded("none"),
    "run_val_every_n_steps": Drop("rows to evaluate are missing: add data.eval and training.eval_steps"),
    "save_last_epoch_only": unneeded("checkpoint.keep_last"),
    "dataset.split": Drop("all rows of the files are read", numbers=True, harmless=(None, "train")),
    "dataset.split_across_pack": unneeded("a row that is split continues in the next sample"),
    "dataset.max_packs": _LOADER,
    "dataset.filter_fn": _LOADER,
    "dataset.name": _LOADER,
    "dataset.subset": _LOADER,
    "dataset.revision": unneeded("you download the files"),
    "dataset.*": Drop("not an option of data", numbers=True),
    "dataset_val.*": Drop("data.eval has files alone; they are read as those to train on"),
    "dataloader.*": _READER,
    "collate_fn": Drop("samples have one length (data.sequence_length)", numbers=True),
    "metric_logger.*": _OPERATOR,
    "log_every_n_steps": Take("training.logging_steps", number),
    "log_peak_memory_stats": unneeded("metrics always have the peak memory"),
    "log_level": unneeded("each rank has a log; trainshed logs --level filters it"),
    "profiler.enabled": Drop("set training.profile_steps"),
    "profiler.*": unneeded("training.profile_steps"),
    "epochs": unneeded("training.num_train_epochs"),
}
"""The rule of each field. Fields that depend on others are handled before."""

OPTIMIZERS: dict[str, tuple[str, float]] = {
    "AdamW": ("adamw", 0.01),
    "PagedAdamW": ("adamw", 0.01),
    "PagedAdamW32bit": ("adamw", 0.01),
    "AdamW8bit": ("adamw_8bit", 0.01),
    "PagedAdamW8bit": ("adamw_8bit", 0.01),
    "Adam": ("adam", 0.0),
    "SGD": ("sgd", 0.0),
    "Lion": ("lion", 0.0),
}
"""The spec's name and the default weight decay of optimizers, by the name of their class."""

LINEAR = {
    "q_proj": "q_proj",
    "k_proj": "k_proj",
    "v_proj": "v_proj",
    "output_proj": "o_proj",
}
"""transformers' names of the linear layers of attention."""
MLP = ("gate_proj", "up_proj", "down_proj")
FUSED = dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj") | {"output_proj": "o_proj"}
"""The same in families whose weights transformers joins, such as Phi-3."""
FUSED_MLP = ("gate_up_proj", "down_proj")
