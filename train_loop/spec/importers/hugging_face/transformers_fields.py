"""The fields of Hugging Face's `TrainingArguments` and `DistributedConfig`, with what becomes of each.

Sources: transformers 5.23, `training_args.py` and `distributed/configuration_utils.py`, and fields of transformers 4.
"""

from train_loop.spec.importers.draft import Drop, Rule, Take, unneeded
from train_loop.spec.importers.recognise import names_of
from train_loop.spec.importers.values import flag, job_name, no_clipping, number, optimizer, schedule

_RUN = unneeded("the service chooses the run directory")
_OPERATOR = unneeded("the operator chooses trackers (TRAINSHED_SINKS)")
_HUB = unneeded("trainshed export writes a Hugging Face folder, which you upload")
_READER = unneeded("Ray Data reads and prepares the rows")
_DDP = unneeded("DDP is not used")
_LOGS = unneeded("each rank has a log; trainshed logs --level filters it")
_EVALUATION = Drop("evaluation computes loss, perplexity and the metrics of model.head")
_SCRIPT = unneeded("a spec with data.eval is evaluated")

RULES: dict[str, Rule] = {
    "output_dir": _RUN,
    "overwrite_output_dir": _RUN,
    "logging_dir": _RUN,
    "run_name": Take("name", job_name),
    "project": unneeded("the project of the tracker; project is that of the job"),
    "learning_rate": Take("training.learning_rate", number),
    "lr_scheduler_type": Take("training.lr_scheduler_type", schedule),
    "lr_scheduler_kwargs": Drop("not a mapping of options", numbers=True),
    "warmup_steps": Take("training.warmup_steps", number),
    "optim": Take("training.optimizer", optimizer),
    "optim_args": Drop("options of optimizers that do not exist here", numbers=True),
    "optim_target_modules": Drop("modules of optimizers that do not exist here", numbers=True),
    "weight_decay": Take("training.weight_decay", number),
    "adam_beta1": Take("training.adam_beta1", number),
    "adam_beta2": Take("training.adam_beta2", number),
    "adam_epsilon": Take("training.adam_epsilon", number),
    "max_grad_norm": Take("training.max_grad_norm", no_clipping),
    "label_smoothing_factor": Take("training.label_smoothing_factor", number),
    "average_tokens_across_devices": Drop(
        "the loss is always the mean over the tokens of all workers",
        numbers=True,
        harmless=(None, True),
    ),
    "bf16_full_eval": unneeded("evaluation computes in model.dtype"),
    "fp16_full_eval": unneeded("evaluation computes in model.dtype"),
    "half_precision_backend": unneeded("FSDP2 casts parameters; autocast is not used"),
    "tf32": Drop("matrix products of fp32 use torch's default", numbers=True),
    "gradient_checkpointing_kwargs": unneeded("layers are recomputed without reentrant autograd"),
    "gradient_checkpointing_kwargs.*": unneeded("layers are recomputed without reentrant autograd"),
    "activation_checkpointing_kwargs": unneeded("layers are recomputed without reentrant autograd"),
    "activation_checkpointing_kwargs.*": unneeded("layers are recomputed without reentrant autograd"),
    "torch_compile": Take("model.compile", flag, "each layer is compiled separately"),
    "torch_compile_backend": Drop("layers are compiled by inductor", harmless=(None, "inductor")),
    "torch_compile_mode": Drop("layers are compiled in the default mode", harmless=(None, "default")),
    "use_liger_kernel": Drop("the loss is computed in chunks (training.chunked_loss), and MLPs in tiles if asked for"),
    "liger_kernel_config": Drop("Liger kernels are not supported"),
    "liger_kernel_config.*": Drop("Liger kernels are not supported"),
    "use_cache": unneeded("training keeps no cache"),
    "neftune_noise_alpha": Drop("embeddings get no noise", numbers=True),
    "torch_empty_cache_steps": Drop("the allocator keeps its cache"),
    "auto_find_batch_size": Drop(
        "the batch stays as written, and Trainer lowers it if memory runs out; for micro-batches by memory, set "
        "training.per_device_train_batch_size: auto and global_batch_size",
        numbers=True,
    ),
    "logging_steps": Take("training.logging_steps", number),
    "logging_strategy": Drop("metrics are written every logging_steps", harmless=("steps",)),
    "logging_first_step": unneeded("metrics have the loss of every step in their mean"),
    "log_on_each_node": _LOGS,
    "logging_nan_inf_filter": unneeded("steps with a non-finite loss are skipped (training.on_nonfinite) and counted"),
    "include_num_input_tokens_seen": unneeded("metrics always count tokens"),
    "include_tokens_per_second": unneeded("metrics always have tokens per second"),
    "log_level": _LOGS,
    "log_level_replica": _LOGS,
    "disable_tqdm": unneeded("trainshed watch shows progress"),
    "report_to": _OPERATOR,
    "trackio_space_id": _OPERATOR,
    "trackio_bucket_id": _OPERATOR,
    "trackio_static_space_id": _OPERATOR,
    "eval_strategy": Drop("nothing is evaluated", harmless=("no", None)),
    "evaluation_strategy": Drop("nothing is evaluated", harmless=("no", None)),
    "eval_delay": Drop("evaluation begins with the first eval_steps", harmless=(None, 0)),
    "per_gpu_eval_batch_size": Drop("evaluation uses per_device_train_batch_size; its loss is the same"),
    "per_device_eval_batch_size": Drop("evaluation uses per_device_train_batch_size; its loss is the same"),
    "prediction_loss_only": _EVALUATION,
    "eval_on_start": Drop("the first evaluation comes after eval_steps"),
    "eval_do_concat_batches": unneeded("evaluation keeps sums only"),
    "eval_use_gather_object": unneeded("evaluation keeps sums only"),
    "eval_accumulation_steps": unneeded("evaluation keeps sums only"),
    "include_for_metrics": _EVALUATION,
    "include_inputs_for_metrics": _EVALUATION,
    "batch_eval_metrics": unneeded("evaluation keeps sums only"),
    "save_only_model": Drop("checkpoints hold the whole state, so that a job can resume"),
    "save_strategy": unneeded("checkpoint.every_steps"),
    "save_total_limit": Take("checkpoint.keep_last", number),
    "save_safetensors": unneeded("exports are safetensors"),
    "save_on_each_node": unneeded("all hosts see one storage"),
    "enable_jit_checkpoint": unneeded("a preempted worker always saves"),
    "push_to_hub": _HUB,
    "hub_token": _HUB,
    "hub_private_repo": _HUB,
    "hub_model_id": _HUB,
    "hub_strategy": _HUB,
    "hub_always_push": _HUB,
    "hub_revision": _HUB,
    "load_best_model_at_end": unneeded("off"),
    "metric_for_best_model": unneeded("load_best_model_at_end is off"),
    "greater_is_better": unneeded("load_best_model_at_end is off"),
    "ignore_data_skip": Drop("a resumed job always continues with the next sample", numbers=True),
    "restore_callback_states_from_checkpoint": unneeded("callbacks do not exist here"),
    "full_determinism": Drop("see training.reproducible; kernels are torch's own choice"),
    "seed": Take("training.seed", number),
    "data_seed": Take("data.seed", number),
    "use_cpu": unneeded("scaling.resources_per_worker"),
    "no_cuda": unneeded("scaling.resources_per_worker"),
    "accelerator_config": unneeded("Ray Data reads the rows"),
    "accelerator_config.*": unneeded("Ray Data reads the rows; their order differs in any case"),
    "parallelism_config.*": Drop("import the DistributedConfig or Accelerate's file with the same sizes"),
    "parallelism_config": Drop("import the DistributedConfig or Accelerate's file with the same sizes"),
    "dataloader_drop_last": unneeded("epochs follow one another without a shorter batch between them"),
    "dataloader_num_workers": _READER,
    "dataloader_pin_memory": _READER,
    "dataloader_persistent_workers": _READER,
    "dataloader_prefetch_factor": _READER,
    "dataloader_multiprocessing_context": _READER,
    "dataloader_in_order": _READER,
    "remove_unused_columns": unneeded("data.columns names the columns to read"),
    "label_names": unneeded("data.columns names the columns to read"),
    "train_sampling_strategy": Drop(
        "samples are shuffled, or sequential with data.shuffle: false", numbers=True, harmless=(None, "random")
    ),
    "group_by_length": Drop("samples are packed to one length instead (data.packing)", numbers=True),
    "length_column_name": unneeded("rows are not grouped by length"),
    "ddp_find_unused_parameters": _DDP,
    "ddp_bucket_cap_mb": _DDP,
    "ddp_broadcast_buffers": _DDP,
    "ddp_static_graph": _DDP,
    "ddp_backend": unneeded("NCCL on GPUs, gloo on CPUs"),
    "ddp_timeout": unneeded("failure.hang_timeout_seconds"),
    "deepspeed": Drop(
        "DeepSpeed is not supported; ZeRO stage 3 is FSDP2's default, stage 2 reshard_after_forward: false"
    ),
    "deepspeed.*": Drop(
        "DeepSpeed is not supported; ZeRO stage 3 is FSDP2's default, stage 2 reshard_after_forward: false"
    ),
    "debug": Drop("training.on_nonfinite: fail stops at the first non-finite step"),
    "skip_memory_metrics": unneeded("metrics always have the peak memory"),
    "do_train": _SCRIPT,
    "do_eval": _SCRIPT,
    "do_predict": _SCRIPT,
    "resume_from_checkpoint": unneeded("a job resumes automatically; a clone starts from a checkpoint of another job"),
    "local_rank": unneeded("Ray starts the workers"),
    "jit_mode_eval": unneeded("evaluation is not traced"),
    "torchdynamo": Drop("layers are compiled by inductor (model.compile)"),
    "tpu_num_cores": unneeded("TPUs are not supported"),
    **dict.fromkeys(
        names_of(
            "ray_scope tpu_metrics_debug use_mps_device use_ipex fp16_opt_level fp16_backend xpu_backend "
            "use_legacy_prediction_loop dispatch_batches"
        ),
        unneeded("the loop has no such choice; numbers stay"),
    ),
    **dict.fromkeys(names_of("push_to_hub_model_id push_to_hub_organization push_to_hub_token"), _HUB),
    "past_index": unneeded("models keep no past between steps"),
    "mp_parameters": unneeded("SageMaker is not supported"),
}
"""The rule of each field. Fields that depend on others are handled before."""

_PLAN = Drop("models have their own plans", numbers=False)
DISTRIBUTED: dict[str, Rule] = {
    "tp_size": Take("strategy.tp_size", number),
    "tp_plan": Drop("tensor parallelism follows the model's own plan", harmless=(None, "auto", {})),
    "tp_plan.*": _PLAN,
    "enable_sequence_parallel": Drop("it needs tp_size; strategy.ulysses_size splits sequences without"),
    "enable_expert_parallel": Drop("experts are shared with strategy.ep_size"),
    "fsdp_size": Take("strategy.fsdp_size", number),
    "dp_replicate_size": unneeded("one copy"),
    "fsdp_plan": Drop("units are chosen by strategy.wrap_policy"),
    "fsdp_plan.*": Drop("units are chosen by strategy.wrap_policy"),
    "fsdp_cpu_offload": Take("strategy.offload_policy", flag),
    "fsdp_mixed_precision": unneeded("off"),
    "pp_size": Drop("pipeline parallelism is not supported; use more fsdp_size", harmless=(None, 1)),
    "ep_size": Take("strategy.ep_size", number),
    "ep_plan": _PLAN,
    "ep_plan.*": _PLAN,
    "ep_implementation": Drop("tokens are exchanged all to all", harmless=(None, "auto", "all_to_all")),
}
"""The rule of each field of a DistributedConfig."""
