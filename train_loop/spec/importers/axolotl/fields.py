"""The fields of axolotl's configurations, with what becomes of each.

Source: axolotl 0.19, `utils/schemas` and `core/builders`; fields of its older examples are known, too.
"""

from train_loop.spec.importers.draft import Drop, Rule, Take, alike, unneeded
from train_loop.spec.importers.values import flag, no_clipping, number, optimizer

_RUN = unneeded("the service chooses the run directory")
_OPERATOR = unneeded("the operator chooses trackers (TRAINSHED_SINKS)")
_HUB = unneeded("trainshed export writes a Hugging Face folder, which you upload")
_READER = unneeded("Ray Data reads and prepares the rows")
_KERNELS = unneeded("other kernels for the same numbers; see training.chunked_loss and strategy.apply_tiled_mlp")
_EVALUATION = Drop("evaluation computes loss, perplexity and the metrics of model.head")
_LOADER = unneeded("the model's folder has its config.json")
_DDP = unneeded("DDP is not used")
_RAY = unneeded("the service runs on its own Ray cluster")
_GENERATION = Drop("training jobs generate no samples; see jobs of kind: infer")
_TOKENIZER = Drop("the tokenizer's folder decides: change its files", numbers=True)
_TEMPLATE = Drop("rows are rendered by the tokenizer's own chat template; set data.chat_template", numbers=True,
                 harmless=(None, "tokenizer_default"))  # fmt: skip
_RULE = Drop("the optimizer has no such option here", numbers=True)
_GALORE = unneeded("options of optimizers that are not chosen")
_RESTARTS = Drop("schedules do not restart so; see lr_scheduler_type: cosine_with_restarts", numbers=True)
_PATTERN = Drop("all adapters have one rank and one alpha", numbers=True)
_ORDER = unneeded("samples are packed as they come, and shuffled")
_PREFERENCES = unneeded("rl is not set")

RULES: dict[str, Rule] = {
    **alike("output_dir dataset_prepared_path axolotl_config_path strict debug", _RUN),
    **alike("resume_from_checkpoint auto_resume_from_checkpoints", unneeded("a job resumes automatically")),
    **alike(
        "use_wandb wandb_name wandb_run_id wandb_mode wandb_project wandb_entity wandb_watch wandb_log_model "
        "use_mlflow mlflow_tracking_uri mlflow_experiment_name mlflow_run_name hf_mlflow_log_artifacts use_comet "
        "comet_api_key comet_workspace comet_project_name comet_experiment_key comet_mode comet_online "
        "comet_experiment_config comet_experiment_config.* use_tensorboard use_otel_metrics otel_metrics_host "
        "otel_metrics_port use_trackio trackio_project_name trackio_run_name trackio_space_id use_swanlab "
        "swanlab_project swanlab_experiment_name swanlab_description swanlab_mode swanlab_workspace "
        "swanlab_log_model swanlab_log_completions swanlab_completion_log_interval swanlab_completion_max_buffer",
        _OPERATOR,
    ),
    **alike("hub_model_id hub_strategy hub_revision push_dataset_to_hub hf_use_auth_token save_safetensors", _HUB),
    **alike(
        "dataset_processes dataset_num_proc dataset_keep_in_memory dataloader_pin_memory dataloader_num_workers "
        "dataloader_prefetch_factor remove_unused_columns dataset_shard_num num_dataset_shards_to_save "
        "is_preprocess preprocess_iterable streaming_multipack_buffer_size pretrain_multipack_buffer_size "
        "shuffle_before_merging_datasets shuffle_merged_datasets skip_prepare_dataset total_num_tokens "
        "total_supervised_tokens",
        _READER,
    ),
    "dataset_shard_idx": Drop("all rows of the files are read", numbers=True),
    "dataset_exact_deduplication": Drop("rows are not compared: remove duplicates", numbers=True),
    "dataloader_drop_last": unneeded("epochs follow one another without a shorter batch between them"),
    "streaming": unneeded("rows are prepared before the run"),
    "accelerator_config.split_batches": Drop(
        "micro_batch_size is that of a process; set training.global_batch_size", numbers=True
    ),
    "accelerator_config.*": Drop("batches are counted in samples, whatever the number of workers"),
    "accelerator_config": unneeded("off"),
    **alike(
        "model_type type_of_model tokenizer_type tokenizer_use_fast tokenizer_legacy tokenizer_save_jinja_files "
        "cls_model_config is_falcon_derived_model is_llama_derived_model is_mistral_derived_model "
        "is_qwen_derived_model low_cpu_mem_usage device_map device_map.* max_memory max_memory.* gpu_memory_limit "
        "base_model_ignore_patterns revision_of_model model_revision experimental_skip_move_to_device device "
        "local_rank world_size",
        _LOADER,
    ),
    "base_model_config": Drop("the folder's own config.json is used", numbers=True),
    "trust_remote_code": Drop("code that comes with a model is not run", harmless=(None, False)),
    **alike(
        "overrides_of_model_config overrides_of_model_config.* model_config model_config.* "
        "overrides_of_model_kwargs overrides_of_model_kwargs.* model_kwargs model_kwargs.* rope_scaling "
        "rope_scaling.*",
        Drop("the folder's own config.json is used: change it there", numbers=True),
    ),
    **alike(
        "model_quantization_config model_quantization_config_kwargs model_quantization_config_kwargs.*",
        Drop("folders of quantised weights are not read: give one in bf16", numbers=True),
    ),
    **alike(
        "tokenizer_use_mistral_common tokens tokens.* added_tokens_overrides added_tokens_overrides.* "
        "special_tokens.bos_token special_tokens.eos_token special_tokens.unk_token "
        "special_tokens.additional_special_tokens special_tokens.* fix_untrained_tokens "
        "resize_token_embeddings_to_32x shrink_embeddings mean_resizing_embeddings",
        _TOKENIZER,
    ),
    "special_tokens": unneeded("none"),
    "special_tokens.pad_token": unneeded("padding is not trained"),
    "embeddings_skip_upcast": unneeded("embeddings are in model.master_dtype"),
    "chat_template": _TEMPLATE,
    "chat_template_jinja": _TEMPLATE,
    "chat_template_kwargs": _TEMPLATE,
    "chat_template_kwargs.*": _TEMPLATE,
    "eot_tokens": Drop("trained turns end as the chat template ends them", numbers=True),
    "default_system_message": Drop("set data.system_prompt, for conversations that have none", numbers=True),
    "optimizer": Take("training.optimizer", optimizer),
    "learning_rate": Take("training.learning_rate", number),
    "weight_decay": Take("training.weight_decay", number),
    "adam_beta1": Take("training.adam_beta1", number),
    "adam_beta2": Take("training.adam_beta2", number),
    "adam_epsilon": Take("training.adam_epsilon", number),
    "adam_eps": Drop("axolotl does not read it; its field is adam_epsilon", numbers=True),
    "adam_beta3": _RULE,
    "adam_epsilon2": _RULE,
    "optim_args": _RULE,
    "optim_args.*": _RULE,
    "optim_target_modules": _RULE,
    "torchdistx_path": unneeded("optimizers are torch's"),
    **alike(
        "dion_lr dion_momentum dion_rank_fraction dion_rank_multiple_of qgalore_rank qgalore_update_proj_gap "
        "qgalore_scale qgalore_proj_type qgalore_proj_quant qgalore_proj_bits qgalore_proj_group_size "
        "qgalore_cos_threshold qgalore_gamma_proj qgalore_queue_size",
        _GALORE,
    ),
    "lr_quadratic_warmup": Drop("warm-ups are linear", numbers=True),
    "lr_div_factor": unneeded("the schedule one_cycle is not chosen"),
    "eta_min": Drop("axolotl does not read it; its field is cosine_min_lr_ratio", numbers=True),
    **alike(
        "lr_groups embedding_lr embedding_lr_scale",
        Drop("all parameters have one rate; set training.groups", numbers=True),
    ),
    "loraplus_lr_embedding": unneeded("embeddings have no adapters"),
    **alike("jagged_restart_steps jagged_restart_warmup_steps jagged_restart_anneal_steps", _RESTARTS),
    **alike("relora_prune_ratio relora_prune_method relora_cpu_offload", unneeded("relora is off")),
    **alike(
        "lisa_n_layers lisa_step_interval lisa_layers_attribute",
        Drop("all layers are trained in each step", numbers=True),
    ),
    "max_grad_norm": Take("training.max_grad_norm", no_clipping),
    "seed": Take("training.seed", number),
    "logging_steps": Take("training.logging_steps", number),
    "gradient_accumulation_steps": Take("training.gradient_accumulation_steps", number),
    "micro_batch_size": Take("training.per_device_train_batch_size", number),
    "eval_batch_size": Drop("evaluation uses per_device_train_batch_size; its loss is the same"),
    "auto_find_batch_size": Drop("set training.per_device_train_batch_size: auto and global_batch_size"),
    "group_by_length": Drop("samples are packed to one length instead (data.packing)", numbers=True),
    "neftune_noise_alpha": Drop("embeddings get no noise", numbers=True),
    "noisy_embedding_alpha": Drop("embeddings get no noise", numbers=True),
    "sequence_len": Take("data.sequence_length", number),
    "eval_sequence_len": Drop("rows to evaluate have data.sequence_length, too"),
    "min_sample_len": Drop("short rows are trained", numbers=True),
    "max_prompt_len": _PREFERENCES,
    "max_packed_sequence_len": unneeded("axolotl does not read it"),
    "sample_packing": Take("data.packing", flag),
    "curriculum_sampling": Take("data.shuffle", lambda value: not flag(value)),
    "train_on_inputs": unneeded("answers alone are trained"),
    "eval_sample_packing": unneeded("rows to evaluate are packed as those to train on; the loss is the same"),
    **alike(
        "sample_packing_group_size sample_packing_bin_size sample_packing_sequentially "
        "sample_packing_mp_start_method sample_packing_eff_est sample_packing_seq_len_multiplier "
        "multipack_real_batches pad_to_sequence_len pad_to_multiple_of batch_flattening",
        _ORDER,
    ),
    "pretrain_multipack_attn": Drop(
        "documents of a sample never attend to each other", numbers=True, harmless=(None, True)
    ),
    "pretraining_sample_concatenation": Drop("documents of a sample never attend to each other", numbers=True),
    "torch_compile": Take("model.compile", lambda value: value is True, "each layer is compiled separately"),
    **alike(
        "torch_compile_backend torch_compile_mode torch_compile_options torch_compile_options.* deepcompile "
        "flex_attn_compile_kwargs flex_attn_compile_kwargs.*",
        Drop("layers are compiled by inductor in the default mode"),
    ),
    **alike(
        "lora_mlp_kernel lora_qkv_kernel lora_o_kernel lora_embedding_kernel lora_on_cpu lora_fan_in_fan_out "
        "qlora_sharded_model_loading merge_method peft_autocast_adapter_dtype flash_attn_cross_entropy "
        "flash_attn_rms_norm flash_attn_fuse_mlp flash_optimum use_kernels liger_rope liger_rms_norm "
        "liger_rms_norm_gated liger_layer_norm liger_swiglu liger_glu_activation liger_cross_entropy "
        "liger_fused_linear_cross_entropy liger_kernel_impl cut_cross_entropy chunked_cross_entropy "
        "chunked_cross_entropy_num_chunks use_scattermoe use_sonicmoe fused_attn_kernel large_head_attention "
        "flash_attn_d512 sdpa_varlen heads_k_stride ring_attn_func gemma4_hybrid_attn_impl "
        "unsloth_cross_entropy_loss unsloth_lora_mlp unsloth_lora_qkv unsloth_lora_o unsloth_rms_norm unsloth_rope "
        "llama4_linearized_experts expert_parallel_num_nvl_bytes expert_parallel_token_capacity use_glm_dsa_kernels "
        "use_dsv4_kernels experts_implementation tiled_mlp_use_original_mlp",
        _KERNELS,
    ),
    "liger_use_token_scaling": Drop("tokens count alike", numbers=True),
    "tiled_mlp": Take("strategy.apply_tiled_mlp", flag),
    "tiled_mlp_num_shards": Take("strategy.tiled_num_shards", number),
    **alike(
        "scaling_softmax scaling_softmax_factor scaling_softmax_bias s2_attention",
        Drop("attention is the model's own", numbers=True),
    ),
    **alike("lora_rank_pattern lora_rank_pattern.* lora_alpha_pattern lora_alpha_pattern.*", _PATTERN),
    "peft_layers_pattern": unneeded("layers are those of the model"),
    "peft_layer_replication": Drop("layers are not repeated", numbers=True),
    "peft_trainable_token_indices": Drop(
        "name embed_tokens in model.lora.modules_to_save to train it whole", numbers=True
    ),
    "peft_trainable_token_indices.*": Drop(
        "name embed_tokens in model.lora.modules_to_save to train it whole", numbers=True
    ),
    "peft_ensure_weight_tying": Drop("tied weights have no adapters", numbers=True),
    "peft": unneeded("off"),
    "peft.*": Drop("adapters begin as kaiming or gaussian", numbers=True),
    "quantize_moe_experts": Drop("experts are not quantised", numbers=True),
    "bnb_config_kwargs.bnb_4bit_quant_type": Drop("4 bits are always nf4", numbers=True, harmless=(None, "nf4")),
    "bnb_config_kwargs.*": unneeded("scales are bf16"),
    "bnb_config_kwargs": unneeded("scales are bf16"),
    "gptq_groupsize": unneeded("gptq is off"),
    "gptq_model_v1": unneeded("gptq is off"),
    "gptq_disable_exllama": unneeded("gptq is off"),
    **alike("ddp ddp_timeout ddp_bucket_cap_mb ddp_broadcast_buffers ddp_find_unused_parameters", _DDP),
    **alike(
        "deepspeed deepspeed.*",
        Drop("DeepSpeed is not supported; ZeRO stage 3 is FSDP2's default, stage 2 reshard_after_forward: false"),
    ),
    "fsdp_version": unneeded("every job trains with FSDP2"),
    "fsdp_final_state_dict_type": unneeded("trainshed export writes a Hugging Face folder"),
    "fp32_norms": Take("strategy.norm_dtype", lambda value: "fp32" if flag(value) else None),
    "fp32_norm_classes": Drop("all norms, or none (strategy.norm_dtype)"),
    "ple_cpu_offload": Drop("see strategy.offload_policy"),
    "fp8": Take("strategy.float8", lambda value: "tensorwise" if flag(value) else None),
    "fp8_config": Drop("see strategy.float8", numbers=True),
    "fp8_config.*": Drop("see strategy.float8", numbers=True),
    "fp8_enable_fsdp_float8_all_gather": unneeded("strategy.float8: tensorwise gathers weights in float8"),
    "torch_dtype": Drop("axolotl does not read it; its fields are bf16 and fp16"),
    **alike("use_ray ray_run_name resources_per_worker resources_per_worker.*", _RAY),
    "expert_parallel_size": Take("strategy.ep_size", number),
    "early_stopping_patience": Drop(
        "runs do not stop early; checkpoint.keep_best keeps the best checkpoint", numbers=True
    ),
    "loss_watchdog_threshold": Drop("training.on_nonfinite: fail stops at the first non-finite step"),
    "loss_watchdog_patience": unneeded("training.max_consecutive_skips"),
    "save_only_model": Drop("checkpoints hold the whole state, so that a job can resume"),
    "save_first_step": Drop("checkpoints follow checkpoint.every_steps"),
    "dynamic_checkpoint.*": unneeded("a preempted worker always saves"),
    "save_total_limit": Take("checkpoint.keep_last", number),
    "load_best_model_at_end": unneeded("off"),
    "metric_for_best_model": unneeded("load_best_model_at_end is off"),
    "greater_is_better": unneeded("load_best_model_at_end is off"),
    **alike(
        "do_causal_lm_eval do_bench_eval bench_dataset bench_split eval_causal_lm_metrics eval_table_size "
        "eval_max_new_tokens",
        _EVALUATION,
    ),
    **alike(
        "generate_samples num_generation_samples generation_max_new_tokens generation_temperature generation_top_p "
        "generation_top_k generation_prompt_ratio generation_do_sample gradio_title gradio_share gradio_server_name "
        "gradio_server_port gradio_max_new_tokens gradio_temperature",
        _GENERATION,
    ),
    **alike("gc_steps gc_collect_steps torch_empty_cache_steps", unneeded("the allocator keeps its cache")),
    "include_tokens_per_second": unneeded("metrics always have tokens per second"),
    "include_tkps": unneeded("metrics always have tokens per second"),
    "profiler_steps": Drop("set training.profile_steps"),
    "profiler_steps_start": unneeded("training.profile_steps"),
    **alike(
        "trl trl.* vllm vllm.* ebft ebft.* dpo_use_weighting dpo_label_smoothing precompute_ref_log_probs "
        "dpo_use_liger_kernel dpo_padding_free dpo_loss_type dpo_loss_weights orpo_alpha simpo_gamma cpo_alpha "
        "kto_desirable_weight kto_undesirable_weight rl_beta dpo_beta rpo_alpha "
        "num_labels image_resize_algorithm role_boundaries freeze_mm_modules processor_kwargs processor_kwargs.* "
        "eaft_alpha eaft_k quantization quantization.*",
        _PREFERENCES,
    ),
}
"""The rule of each field. Fields that depend on others are handled before."""

ATTENTION = {
    "xformers_attention": "sdpa",
    "sage_attention": "sage",
    "flex_attention": "flex_attention",
    "flash_attention": "flash_attention_2",
    "sdp_attention": "sdpa",
    "eager_attention": "sdpa",
}
"""The kernel of each older switch."""
