"""The table of names of other tools: TrainingArguments, Accelerate, DeepSpeed, FSDP1, FSDP2, ROLL, Ray Train, axolotl.

Each name has the field of the same meaning, the reason why it is not needed, or the feature that is absent. The answers
to unknown fields, `docs/reference/names.md` and importers of other tools' files read it.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Kind = Literal["field", "not_needed", "absent"]


@dataclass(frozen=True)
class OtherName:
    """The meaning of a name of another tool."""

    kind: Kind
    """field: a field has this meaning; not_needed: nothing has to be set; absent: this version lacks the feature."""
    meaning: str
    """The field or fields, as strategy.fsdp_size; the reason; or the feature. A note or remedy follows a semicolon."""

    @property
    def fields(self) -> tuple[str, ...]:
        """The paths of the fields with this meaning; empty for other kinds."""
        named = self.meaning.partition(";")[0]
        return tuple(re.split(", | and | or ", named)) if self.kind == "field" else ()

    @property
    def answer(self) -> str:
        """The message about a spec that has this name as a field."""
        if self.kind == "field":
            return f"no such field; use {self.meaning}"
        if self.kind == "not_needed":
            return f"no such field; {self.meaning}; remove it"
        feature, _, remedy = self.meaning.partition("; ")
        return f"{feature} is not supported yet; {remedy or 'remove it'}"


def _by_name(table: Mapping[str, str]) -> dict[str, str]:
    return {name: meaning for meaning, names in table.items() for name in names.split()}


TO_COME = _by_name({"": "add_tokens kernels images balance shard_vision profile"}).keys()
"""Names of fields to come."""

_ABSENT = _by_name(
    {
        "the choice of a cluster (target)": "target",
        "adapters that are tied to those of another module": "ensure_weight_tying",
        "another rank for some modules": "rank_pattern alpha_pattern",
        "a list of modules without adapters; name the others in model.lora.target_modules": "exclude_modules",
        "trained biases of the frozen model": "lora_bias bias",
        "another storage of quantised weights; model.quantize_base has bf16 scales": "bnb_4bit_quant_storage "
        "bnb_4bit_use_double_quant",
        "noise on embeddings (NEFTune)": "neftune_noise_alpha",
        "grouping of samples by length; data.packing wastes no padding": "group_by_length length_column_name",
        "pipeline parallelism": "pp_size pipeline_parallel_size pipeline_model_parallel_size",
        "code that comes with a model (trust_remote_code)": "trust_remote_code",
        "another dimension than the first of sharded tensors": "shard_placement_fn",
        "early stopping; checkpoint.keep_best keeps the best checkpoint": "early_stopping early_stopping_patience",
        "the choice of nodes by label or accelerator": "label_selector accelerator_type topology",
        "the use of Liger kernels; training.chunked_loss saves memory of logits": "use_liger_kernel use_liger liger",
        "beam search": "num_beams num_beam_groups best_of use_beam_search beam_width",
        "a penalty of repeated tokens": "repetition_penalty presence_penalty frequency_penalty no_repeat_ngram_size "
        "length_penalty",
        "a limit of probability relative to the most probable token; set infer.generation.top_p": "min_p typical_p "
        "epsilon_cutoff eta_cutoff",
        "a second answer to a row; repeat the row, or use another infer.generation.seed": "num_return_sequences "
        "num_generations",
        "text of a given form": "guided_json guided_regex guided_decoding structured_outputs grammar",
        "a draft model": "assistant_model draft_model speculative_config num_speculative_tokens",
        "offload to NVMe; set strategy.offload_policy: true for host memory": "offload_nvme nvme_path "
        "offload_optimizer_nvme_path offload_param_nvme_path",
    }
)
"""Names of features that this loop lacks, by feature and remedy."""

FIELDS = _by_name(
    {
        "checkpoint.every_steps": "save_steps save_interval save_freq checkpointing_steps checkpoint_frequency",
        "checkpoint.every_steps or checkpoint.every_seconds": "save_strategy",
        "checkpoint.keep_last": "save_total_limit num_to_keep",
        "checkpoint.keep_best": "load_best_model_at_end metric_for_best_model greater_is_better "
        "checkpoint_score_attribute checkpoint_score_order",
        "checkpoint": "checkpoint_config",
        "training.eval_steps": "eval_strategy evaluation_strategy eval_freq eval_interval eval_on_start",
        "training.logging_steps": "logging_strategy log_interval",
        "training.optimizer": "optim optimizer_type",
        "training.learning_rate": "lr peak_lr max_lr",
        "training.groups": "param_groups parameter_groups optimizer_groups optimizer_grouped_parameters params_groups",
        "training.groups; a group of lora_B has lr_scale": "loraplus_lr_ratio lora_plus_lr_ratio",
        "training.groups; a group of embeddings has learning_rate": "lr_embed embedding_lr embedding_learning_rate "
        "embed_lr loraplus_lr_embedding lora_plus_lr_embedding",
        "training.groups; a group of the head has learning_rate": "lr_head head_lr head_learning_rate",
        "training.layer_decay": "llrd layerwise_lr_decay layer_wise_lr_decay layerwise_learning_rate_decay "
        "layer_lr_decay lr_layer_decay lr_layerwise_decay",
        "training.weight_decay": "wd",
        "training.lr_scheduler_type": "scheduler lr_scheduler lr_decay_style",
        "training.lr_scheduler_kwargs": "min_learning_rate final_lr end_lr decay_steps lr_decay_iters scheduler_kwargs",
        "training.warmup_steps": "warmup num_warmup_steps warmup_num_steps lr_warmup_steps",
        "training.warmup_steps; it takes fractions of the run, too": "lr_warmup_fraction warmup_fraction",
        "training.adam_beta1": "beta1",
        "training.adam_beta2": "beta2",
        "training.adam_beta1 and training.adam_beta2": "betas",
        "training.adam_epsilon": "eps adam_eps",
        "training.num_train_epochs": "epochs num_epochs n_epochs max_epochs",
        "training.max_steps": "max_train_steps steps total_steps train_iters num_train_steps",
        "training.per_device_train_batch_size or training.global_batch_size": "bsz batch_size",
        "training.per_device_train_batch_size": "micro_batch_size per_device_batch_size per_device_eval_batch_size "
        "train_micro_batch_size_per_gpu eval_batch_size",
        "training.per_device_train_batch_size; auto takes the largest": "auto_find_batch_size auto_batch_size",
        "training.gradient_accumulation_steps": "gradient_accumulation grad_accum_steps grad_accum accumulation_steps "
        "accumulate_grad_batches",
        "training.max_grad_norm": "clip_grad grad_clip gradient_clipping gradient_clip_val max_norm clip_grad_norm",
        "training.label_smoothing_factor": "label_smoothing",
        "model.head.masked_lm.probability": "mlm_probability mlm_prob masking_ratio",
        "training.router_aux_loss.coef": "router_aux_loss_coef moe_aux_loss_coeff aux_loss_coef",
        "training.router_z_loss": "router_z_loss_coef moe_z_loss_coeff",
        "model.router_bias_update": "moe_router_bias_update_rate bias_update_speed load_balance_coeff",
        "training.ema_decay": "ema",
        "data.seed": "data_seed",
        "model.dtype": "bf16 fp16 torch_dtype mixed_precision autocast amp",
        "strategy.float8": "fp8 use_fp8 enable_fp8 fp8_config fp8_recipe float8_recipe float8_recipe_name "
        "enable_float8 enable_float8_linear float8_config",
        "model.dtype, strategy.reduce_dtype and strategy.output_dtype": "mp_policy "
        "mixedprecision mixedprecisionpolicy fsdp_mixed_precision_policy",
        "model.attn_implementation": "use_flash_attention_2 flash_attn flash_attention attn_impl",
        "model.compile": "torch_compile torch_compile_backend torch_compile_mode use_torch_compile dynamo_config",
        "model.gradient_checkpointing": "activation_checkpoint activation_checkpointing gradient_checkpointing_kwargs "
        "fsdp_activation_checkpointing use_reentrant enable_gradient_checkpointing recompute recompute_granularity",
        "model.gradient_checkpointing; selective, or {every: n}": "selective_ac_option selective_ac_op_list",
        "model.gradient_checkpointing; {every: n}": "ac_freq",
        "model.gradient_checkpointing; {budget: 0..1}": "activation_memory_budget memory_budget",
        "model.freeze_module_prefix": "freeze freeze_modules",
        "model.adapter": "adapters adapter_path adapter_name_or_path adapter_model_name_or_path lora_model_dir "
        "lora_path lora_adapter_path",
        "model.quantize_base": "bnb_4bit_quant_type load_in_4bit load_in_8bit quantization_config quantization_bit "
        "qlora use_qlora bnb_config quantization quantize",
        "model.dtype; quantised weights are restored in it": "bnb_4bit_compute_dtype",
        "model.lora": "lora_config peft peft_config use_lora use_peft",
        "model.lora.r": "lora_r lora_rank lora_dim lora_attn_dim",
        "model.lora.alpha": "lora_alpha",
        "model.lora.dropout": "lora_dropout",
        "model.lora.target_modules": "lora_target lora_target_modules lora_target_linear",
        "model.lora.target_parameters": "lora_target_parameters",
        "model.lora.modules_to_save": "additional_target lora_modules_to_save",
        "model.lora.init": "init_lora_weights peft_init_lora_weights",
        "model.lora.layers": "layers_to_transform peft_layers_to_transform",
        "model.lora.use_dora": "dora lora_use_dora",
        "model.lora.use_rslora": "rslora peft_use_rslora use_rs_lora",
        "model.path": "model_name model_name_or_path pretrained_model_name_or_path base_model pretrain model_id",
        "model": "model_args",
        "model.config": "vocab_size hidden_size num_layers num_experts_per_tok rope_scaling rope_theta "
        "max_position_embeddings router_jitter_noise model_config",
        "model.head; model.config has the model_type of Hugging Face": "model_type",
        "model.tokenizer": "tokenizer_name tokenizer_name_or_path",
        "data.sequence_length": "max_seq_length max_seq_len max_length max_len seq_len seq_length block_size "
        "cutoff_len context_length model_max_length sequence_len",
        "data.packing": "sample_packing use_sequence_packing padding_free pack_sequences",
        "data.train": "dataset dataset_name dataset_path datasets train_file train_files train_data data_path "
        "file_name",
        "data.eval": "validation_file eval_data eval_dataset test_file val_data val_set_size test_datasets",
        "data.columns.text": "dataset_text_field text_column text_field",
        "data.columns.messages": "messages_key field_messages",
        "data.on_long_rows": "excess_length_strategy",
        "data": "data_args",
        "infer.batch_size; evaluation of a training job uses training.per_device_train_batch_size": "infer_batch_size",
        "infer.generation": "generation_config generating_args generation_args generation_kwargs gen_kwargs "
        "sampling_params",
        "infer.generation.max_new_tokens": "max_completion_tokens max_generated_tokens",
        "infer.generation.temperature; 0, the default, is greedy": "do_sample",
        "infer.generation.stop": "stop_strings stop_sequences",
        "infer.generation.stop_tokens": "stop_token_ids eos_token_id",
        "infer.generation.logprobs": "output_scores output_logits return_logprobs",
        "training": "training_args trainer",
        "strategy.sharding_strategy and strategy.fsdp_size": "fsdp",
        "strategy": "parallelism fsdp_config deepspeed deepspeed_config strategy_args strategy_config fsdp_plugin "
        "distributed_config parallelism_config fully_shard fullyshardeddataparallel",
        "strategy.sharding_strategy": "zero2 zero3 fsdp_sharding_strategy zero_stage zero_optimization stage "
        "shardingstrategy",
        "strategy; it is always FSDP2": "fsdp_version strategy_name fsdp2",
        "strategy.offload_policy": "cpu_offload offload offload_params offload_param "
        "fsdp_offload_params cpuoffload cpuoffloadpolicy",
        "strategy.offload_policy; it may be optimizer": "offload_optimizer optimizer_offload offload_optimizer_states",
        "strategy.ignored_params": "ignored_modules ignored_parameters ignored_states fsdp_ignored_modules",
        "strategy.reshard_after_forward": "fsdp_reshard_after_forward rehard_after_forward",
        "strategy.wrap_policy": "fsdp_auto_wrap_policy auto_wrap_policy fsdp_wrap_policy",
        "strategy.wrap_policy.transformer_layer_cls_to_wrap": "fsdp_transformer_layer_cls_to_wrap "
        "transformer_layer_cls transformer_auto_wrap_policy modulewrappolicy no_split_modules",
        "strategy.wrap_policy.min_num_params": "fsdp_min_num_params size_based_auto_wrap_policy",
        "strategy.backward_prefetch": "fsdp_backward_prefetch fsdp_backward_prefetch_policy "
        "set_modules_to_backward_prefetch",
        "strategy.gradient_sync": "no_sync fsdp_no_sync requires_gradient_sync set_requires_gradient_sync "
        "require_backward_grad_sync sync_each_batch",
        "strategy.matmul_precision": "tf32 float32_matmul_precision set_float32_matmul_precision",
        "training.deterministic": "full_determinism use_deterministic_algorithms deterministic_algorithms",
        "strategy.cast_forward_inputs": "cast_root_forward_inputs",
        "model.load": "broadcast_from_rank0 fsdp_cpu_ram_efficient_loading cpu_ram_efficient_loading",
        "strategy.forward_prefetch": "fsdp_forward_prefetch set_modules_to_forward_prefetch",
        "strategy.fsdp_size": "hsdp data_parallel_shard_degree dp_shard_size fsdp_degree dp_shard",
        "training.global_batch_size": "train_batch_size",
        "strategy.ulysses_size": "ulysses cp sp sp_size ulysses_degree ulysses_sequence_parallel_size "
        "sequence_parallel_size "
        "cp_size context_parallel_size context_parallel_degree",
        "strategy.tp_size": "tp tp_degree tensor_parallel tensor_parallel_size tensor_model_parallel_size "
        "tensor_parallel_degree autotp_size",
        "strategy.sequence_parallel": "enable_sequence_parallel",
        "strategy.ep_size": "ep expert_parallel_size expert_model_parallel_size expert_parallel_degree",
        "strategy.fsdp_size and scaling.num_workers": "dp_size dp_replicate_size data_parallel_replicate_degree "
        "dp_replicate device_mesh",
        "scaling.num_workers": "min_workers max_workers elastic devices num_processes nproc_per_node nnodes "
        "num_nodes num_machines world_size workers",
        "scaling.num_workers and scaling.resources_per_worker": "num_gpus n_gpus gpus scaling_config",
        "scaling.num_workers and scaling.resources_per_worker; Ray chooses the devices": "device_mapping "
        "num_gpus_per_node gpu_ids cuda_visible_devices",
        "scaling.resources_per_worker": "num_gpus_per_worker resources accelerators use_gpu use_cpu no_cuda",
        "model.experts_implementation": "moe_use_grouped_mm use_grouped_mm moe_grouped_gemm",
        "strategy.apply_tiled_mlp": "tiled_mlp tiledmlp",
        "training.seed": "seed_everything random_seed",
        "data.columns.prompt": "prompt_key input_key",
        "data.columns.response": "response_key output_key",
        "name, checkpoint and failure": "run_config",
        "code.loss": "loss_fn loss_function loss_type",
        "failure.max_failures": "max_restarts",
        "failure": "fail_fast failure_policy failure_config",
        "failure.max_attempts": "retries",
        "failure.hang_timeout_seconds": "timeout ddp_timeout",
        "name": "project_name run_name exp_name job_name",
        "labels": "tags",
        "project": "namespace",
        "model, training and strategy; a job is one worker block of ROLL": "actor_train actor_infer critic reference",
    }
)
"""Names with the fields of the same meaning."""

_NOT_NEEDED = _by_name(
    {
        "the service chooses the run directory; see run_dir of the job": "outdir output_path output_dir save_dir "
        "checkpoint_dir "
        "logging_dir storage_path",
        "jobs resume without a setting, and a clone starts from another job's checkpoint": "resume_from_checkpoint "
        "resume resume_from init_from load_from load_checkpoint ckpt_path",
        "it follows from the other sizes": "eddp eddp_size ddp_size replicas num_replicas",
        "the model says it": "task_type inference_mode fan_in_fan_out",
        "the optimizer's kernels are chosen for the device": "fused foreach",
        "only answers are trained, by data.columns": "train_on_inputs train_on_prompt completion_only_loss "
        "assistant_only_loss mask_prompt",
        "the operator installs packages, and own code is a package (code.package)": "runtime_env env env_vars "
        "working_dir pip",
        "the spec itself is the configuration of the loop": "train_loop_config torch_config",
        "the operator chooses sinks with TRAINSHED_SINKS": "wandb tensorboard mlflow trackers log_with logger "
        "report_to wandb_project wandb_entity loggers track_with",
        "the path of a source names files, such as those of one split": "split",
        "Ray Data uses the free CPUs": "dataloader_num_workers preprocessing_num_workers num_proc "
        "dataloader_prefetch_factor dataloader_persistent_workers dataset_processes",
        "batches are read ahead, and the last is padded, so that no sample is lost": "dataloader_drop_last drop_last "
        "dataloader_pin_memory",
        "POST /jobs/{id}/checkpoints/{step}/export writes a Hugging Face folder": "push_to_hub hub_model_id "
        "hub_strategy hub_token save_safetensors save_only_model",
        "experts stay whole, and tp_size shares the rest of a layer": "expert_tensor_parallel_size "
        "expert_tensor_parallel_degree etp_size",
        "FSDP2 frees memory without waiting for the CPU, so that it needs no limit": "limit_all_gathers",
        "FSDP2 always keeps the original parameters": "use_orig_params fsdp_use_orig_params",
        "weights are drawn or read by name, so that all ranks have the same": "sync_module_states "
        "fsdp_sync_module_states param_init_fn to_empty reset_parameters meta_device",
        "each rank reads only its parts of the weights": "low_cpu_mem_usage",
        "buffers keep the dtype that the model gives them": "buffer_dtype keep_low_precision_grads",
        "each worker has one device": "device_id local_rank device",
        "checkpoints have a shard for each rank; trainshed export writes whole tensors, and checkpoint.export.full a "
        "file for torch.load": "state_dict_type fsdp_state_dict_type full_state_dict sharded_state_dict "
        "state_dict_config optim_state_dict_config offload_to_cpu rank0_only distributed_checkpoint dcp "
        "get_model_state_dict get_optimizer_state_dict",
        "each parameter of a unit is a DTensor; see the plan for units and sizes": "dtensor fsdpmodule flat_parameter",
        "the first layers are gathered before they are needed": "unshard",
        "gradients are clipped by their norm over all ranks": "clip_grad_norm_",
        "the loop starts its processes and groups itself": "init_process_group process_group backend ddp_backend "
        "rdzv_backend rdzv_endpoint main_process_ip main_process_port machine_rank master_addr master_port torchrun "
        "compute_environment distributed_type same_network main_training_function enable_cpu_affinity "
        "dispatch_batches split_batches accelerator_config even_batches",
        "every parameter without a gradient counts as zero, on all ranks": "find_unused_parameters "
        "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers broadcast_buffers",
        "losses are divided by the tokens of all ranks": "average_tokens_across_devices num_items_in_batch",
        "skipped and non-finite steps are counted; see training.on_nonfinite": "logging_nan_inf_filter",
        "the loop frees memory itself": "torch_empty_cache_steps empty_cache_steps skip_memory_metrics",
        "the service stops and restarts jobs": "ignore_data_skip restore_callback_states_from_checkpoint",
        "it is not needed": "do_train do_eval do_predict overwrite_output_dir remove_unused_columns disable_tqdm "
        "prediction_loss_only log_level logging_first_step include_tokens_per_second include_num_input_tokens_seen "
        "debug downcast_bf16 half_precision_backend fp16_opt_level bf16_full_eval fp16_full_eval jit_mode_eval "
        "past_index label_names eval_accumulation_steps eval_delay batch_eval_metrics save_on_each_node tpu_num_cores "
        "trainer_resources",
    }
)
"""Names that have no field, by the reason."""

NAMES: Mapping[str, OtherName] = {
    **{name: OtherName("absent", meaning) for name, meaning in _ABSENT.items()},
    **{name: OtherName("not_needed", meaning) for name, meaning in _NOT_NEEDED.items()},
    **{name: OtherName("field", meaning) for name, meaning in FIELDS.items()},
}
"""All names, in lower case with underscores."""
