"""The fields that LLaMA-Factory adds to TrainingArguments, with what becomes of each.

Source: LLaMA-Factory 0.9.5, `hparams`.
"""

from train_loop.spec.importers.draft import Drop, Rule, Take, alike, unneeded
from train_loop.spec.importers.hugging_face.transformers_fields import RULES as ARGUMENTS
from train_loop.spec.importers.values import dtype, flag, number

_LOADER = unneeded("the model's folder has its config.json and its tokenizer")
_VOCABULARY = Drop("the tokenizer's folder decides: add tokens to its files, and rows to the embeddings", numbers=True)
_READER = unneeded("Ray Data reads and prepares the rows")
_RAY = unneeded("the service runs on its own Ray cluster")
_OPERATOR = unneeded("the operator chooses trackers (TRAINSHED_SINKS)")
_OTHERS = unneeded("options of methods that are not chosen")
_GENERATION = unneeded("training jobs generate nothing; see jobs of kind: infer")
_EXPORT = unneeded("trainshed export writes a Hugging Face folder")
_CHATS = Drop("rows are rendered by the tokenizer's own chat template; set data.chat_template", numbers=True)
_PROFILE = unneeded("training.profile_steps")

REFUSED = {
    "use_dft_loss": "the DFT loss",
    "use_asft_loss": "the ASFT loss",
    "use_eaft_loss": "the EAFT loss",
    "use_llama_pro": "LLaMA Pro, which trains new layers",
    "use_galore": "GaLore",
    "use_apollo": "APOLLO",
    "use_badam": "BAdam",
    "use_adam_mini": "Adam-mini",
    "use_mca": "Megatron",
    "use_hyper_parallel": "HyperParallel",
    "use_kt": "KTransformers",
    "shift_attn": "shifted attention",
    "mixture_of_depths": "mixture of depths",
    "train_from_scratch": "training from random weights, which model.config starts",
    "create_new_adapter": "a merge of adapters before the run; export them with --merged first",
    "pissa_init": "adapters that begin as PiSSA",
    "media_dir": "images, videos or audio",
    "image_max_pixels": "images",
    "video_max_pixels": "videos",
    "freeze_language_model": "images",
}
"""Fields that make a run another one than a full or LoRA fine-tune, with the words for it."""

RULES: dict[str, Rule] = {
    **ARGUMENTS,
    **alike(
        "cache_dir use_fast_tokenizer model_revision low_cpu_mem_usage offload_folder use_kv_cache infer_backend "
        "infer_dtype hf_hub_token ms_hub_token om_hub_token print_param_status adapter_folder device_map",
        _LOADER,
    ),
    **alike("resize_vocab add_tokens add_special_tokens new_special_tokens_config split_special_tokens", _VOCABULARY),
    "init_special_tokens": unneeded("no tokens are added"),
    "rope_scaling": Drop("the folder's own config.json is used: change it there", numbers=True),
    "trust_remote_code": Drop("code that comes with a model is not run"),
    "use_unsloth": unneeded("other kernels for the same numbers"),
    "use_v1_kernels": unneeded("other kernels for the same numbers"),
    "enable_liger_kernel": unneeded("the loss is computed in chunks if that saves memory (training.chunked_loss)"),
    "moe_aux_loss_coef": Take("training.router_aux_loss.coef", number),
    "use_reentrant_gc": unneeded("layers are recomputed without reentrant autograd"),
    "upcast_layernorm": Take("strategy.norm_dtype", lambda value: "fp32" if flag(value) else None),
    "upcast_lmhead_output": unneeded("the loss is always computed in fp32"),
    "compute_dtype": Take("model.dtype", dtype),
    "quantization_method": Drop(
        "weights are quantised here as bitsandbytes does", numbers=True, harmless=(None, "bnb", "bitsandbytes")
    ),
    "quantization_type": Drop("4 bits are always nf4", numbers=True, harmless=(None, "nf4")),
    "double_quantization": unneeded("scales are bf16"),
    "quantization_device_map": unneeded("FSDP2 places the parameters"),
    **alike(
        "image_min_pixels image_do_pan_and_scan crop_to_patches video_min_pixels video_fps video_maxlen "
        "use_audio_in_video audio_sampling_rate freeze_vision_tower freeze_multi_modal_projector",
        unneeded("rows have text alone"),
    ),
    **alike(
        "export_dir export_size export_device export_quantization_bit export_quantization_dataset "
        "export_quantization_nsamples export_quantization_maxlen export_legacy_format export_hub_model_id",
        _EXPORT,
    ),
    **alike(
        "vllm_maxlen vllm_gpu_util vllm_enforce_eager vllm_max_lora_rank vllm_config sglang_maxlen "
        "sglang_mem_fraction sglang_tp_size sglang_config sglang_lora_backend do_sample temperature top_p top_k "
        "num_beams max_length max_new_tokens repetition_penalty length_penalty skip_special_tokens "
        "predict_with_generate generation_max_length generation_num_beams generation_config eval_num_beams "
        "sortish_sampler",
        _GENERATION,
    ),
    "vllm_config.*": _GENERATION,
    "sglang_config.*": _GENERATION,
    **alike(
        "kt_weight_path kt_expert_checkpoint_path kt_use_lora_experts kt_lora_expert_num "
        "kt_lora_expert_intermediate_size hyper_parallel_args freeze_trainable_layers freeze_trainable_modules "
        "freeze_extra_modules module_dropout oft_rank oft_block_size oft_target pref_beta pref_ftx pref_bco_weight "
        "pref_loss dpo_label_smoothing kto_chosen_weight kto_rejected_weight simpo_gamma ppo_buffer_size ppo_epochs "
        "ppo_score_norm ppo_target ppo_whiten_rewards ref_model ref_model_adapters ref_model_quantization_bit "
        "reward_model reward_model_adapters reward_model_quantization_bit reward_model_type ld_alpha galore_target "
        "galore_rank galore_update_interval galore_scale galore_proj_type galore_layerwise apollo_target "
        "apollo_rank apollo_update_interval apollo_scale apollo_proj apollo_proj_type apollo_scale_type "
        "apollo_layerwise apollo_scale_front badam_mode badam_start_block badam_switch_mode badam_switch_interval "
        "badam_update_ratio badam_mask_mode badam_verbose asft_alpha eaft_alpha pissa_iter pissa_convert",
        _OTHERS,
    ),
    **alike(
        "use_swanlab swanlab_project swanlab_workspace swanlab_run_name swanlab_mode swanlab_api_key swanlab_logdir "
        "swanlab_lark_webhook_url swanlab_lark_secret plot_loss",
        _OPERATOR,
    ),
    **alike(
        "ray_init_kwargs ray_init_kwargs.* master_addr master_port ray_run_name ray_storage_path "
        "ray_storage_filesystem resources_per_worker resources_per_worker.* placement_strategy",
        _RAY,
    ),
    "enable_torch_profiler": Drop("set training.profile_steps"),
    **alike(
        "profiler_output_dir profiler_wait_steps profiler_warmup_steps profiler_active_steps profiler_repeat "
        "profiler_record_shapes profiler_profile_memory profiler_with_stack profile_modules",
        _PROFILE,
    ),
    "fp8": Take("strategy.float8", lambda value: "tensorwise" if flag(value) else None),
    "fp8_backend": unneeded("float8 is torchao's"),
    "fp8_enable_fsdp_float8_all_gather": unneeded("strategy.float8: tensorwise gathers weights in float8"),
    "include_effective_tokens_per_second": unneeded("metrics always have tokens per second"),
    "compute_accuracy": Drop("evaluation computes loss, perplexity and the metrics of model.head"),
    "early_stopping_steps": Drop(
        "runs do not stop early; checkpoint.keep_best keeps the best checkpoint", numbers=True
    ),
    "disable_shuffling": Take("data.shuffle", lambda value: not flag(value)),
    "loraplus_lr_embedding": unneeded("embeddings have no adapters"),
    "cutoff_len": Take("data.sequence_length", number),
    "dataset_dir": unneeded("data.train has whole paths"),
    "template": _CHATS,
    "tool_format": _CHATS,
    "enable_thinking": Drop(
        "rows are rendered by the tokenizer's own chat template", numbers=True, harmless=(None, True)
    ),
    "preserve_thinking": _CHATS,
    "default_system": Drop("set data.system_prompt, for conversations that have none", numbers=True),
    "ignore_pad_token_for_loss": Drop("padding is never trained", numbers=True, harmless=(None, True)),
    "mix_strategy": Drop(
        "sources are mixed by the weight of each (data.train)", numbers=True, harmless=(None, "concat")
    ),
    "interleave_probs": Drop("sources are mixed by the weight of each (data.train)", numbers=True),
    "max_samples": Drop("all rows of the files are read: write the chosen ones to another file", numbers=True),
    "eval_on_each_dataset": Drop("rows to evaluate are evaluated together"),
    "tokenized_path": unneeded("prepared rows are kept for later jobs"),
    **alike(
        "streaming buffer_size overwrite_cache preprocessing_batch_size preprocessing_num_workers "
        "data_shared_file_system",
        _READER,
    ),
}
"""The rule of each field. Fields that depend on others are handled before."""
