"""The fields of ROLL's configurations, with what becomes of each.

Source: github.com/alibaba/ROLL at 8eb27cc, `roll/configs` and `roll/distributed/strategy/fsdp2_strategy.py`.
"""

from train_loop.spec.importers.draft import Drop, Rule, Take, unneeded
from train_loop.spec.importers.report import Outcome
from train_loop.spec.importers.values import attention, dtype, flag, frozen, head, names, no_clipping, number, switch

_RUN = unneeded("the service chooses the run directory")
_RAY = unneeded("the service runs on its own Ray cluster")
_OPERATOR = unneeded("the operator chooses trackers (TRAINSHED_SINKS)")
_LORA = unneeded("the worker trains no adapters: they need lora_target")
_OF_INFERENCE = Drop("inference reads adapters from a folder; set model.adapter, or model.job", numbers=True)
_ROLLOUT = Drop("rollouts and rewards are not part of a training job", Outcome.NOT_IMPORTED)
_PIXELS = Drop("images are not supported", numbers=True)
_DYNAMIC = Drop("micro-batches have a fixed number of sequences; use data.packing")
_LENGTHS = unneeded("use_dynamic_batching is off")

PIPELINE: dict[str, Rule] = {
    "seed": Take("training.seed", number),
    "save_steps": Take("checkpoint.every_steps", number),
    "logging_steps": Take("training.logging_steps", number),
    "max_grad_norm": Take("training.max_grad_norm", no_clipping),
    "sequence_length": Take("data.sequence_length", number),
    "output_dir": _RUN,
    "base_dir": _RUN,
    "logging_dir": _RUN,
    "checkpoint_config": _RUN,
    "checkpoint_config.*": _RUN,
    "resume_from_checkpoint": unneeded("a job resumes automatically; a clone starts from a checkpoint of another job"),
    "hydra.*": unneeded("settings of Hydra itself"),
    "defaults": unneeded("the configs that it names are part of this file"),
    "system_envs.*": _RAY,
    "num_gpus_per_node": _RAY,
    "num_nodes": _RAY,
    "rpc_timeout": _RAY,
    "local_rank": _RAY,
    "track_with": _OPERATOR,
    "tracker_kwargs.*": _OPERATOR,
    "profiler_timeline": unneeded("training.profile_steps"),
    "profiler_memory": unneeded("training.profile_steps"),
    "profiler_output_dir": _RUN,
    "model_download_type": unneeded("models are read from storage"),
    "is_offload_states": unneeded("one worker group has its devices for itself"),
    "is_offload_optimizer_states_in_train_step": Drop(
        "optimizer states stay on the device; see strategy.offload_policy"
    ),
    "query_key": Drop("prompts are one column: join both columns in your rows", numbers=True),
    "system_key": Drop("system prompts are one text (data.system_prompt), or messages of the rows", numbers=True),
    "global_template": Drop("rows are rendered by the tokenizer's own chat template", numbers=True),
}
"""Fields of all pipelines; fields that depend on others are handled before. The rest concerns rollouts and rewards."""

WORKER: dict[str, Rule] = {
    "name": unneeded("the name of the worker"),
    "worker_cls": unneeded("the loop is Trainshed's"),
    "model_args.attn_implementation": Take("model.attn_implementation", attention),
    "model_args.flash_attn": Take("model.attn_implementation", attention, "an older name of attn_implementation"),
    "model_args.disable_gradient_checkpointing": Take(
        "model.gradient_checkpointing", lambda off: "none" if off else "full"
    ),
    "model_args.gradient_checkpointing_use_reentrant": unneeded("layers are recomputed without reentrant autograd"),
    "model_args.device_map": unneeded("FSDP2 places the parameters"),
    "model_args.model_type": Take("model.head", head),
    "model_args.num_labels": Drop("see model.head", harmless=(None, 1)),
    "model_args.model_config_kwargs.*": Drop("the folder's own config.json is used", numbers=True),
    "model_args.model_config_kwargs": Drop("the folder's own config.json is used", numbers=True),
    "model_args.freeze_module_prefix": Take("model.freeze_module_prefix", frozen),
    "model_args.adapter_name_or_path": Drop("set model.adapter to a folder of adapters", numbers=True),
    "model_args.additional_target": _LORA,
    "model_args.autocast_adapter_dtype": unneeded("adapters are always fp32 between steps"),
    "model_args.lora_alpha": _LORA,
    "model_args.lora_dropout": _LORA,
    "model_args.lora_rank": _LORA,
    "model_args.lora_target": _LORA,
    "model_args.ulysses_size": Take("strategy.ulysses_size", number),
    "model_args.max_pixels": _PIXELS,
    "model_args.min_pixels": _PIXELS,
    "training_args.learning_rate": Take("training.learning_rate", number),
    "training_args.weight_decay": Take("training.weight_decay", number),
    "training_args.adam_beta1": Take("training.adam_beta1", number),
    "training_args.adam_beta2": Take("training.adam_beta2", number),
    "training_args.per_device_train_batch_size": Take("training.per_device_train_batch_size", number),
    "training_args.gradient_accumulation_steps": Take("training.gradient_accumulation_steps", number),
    "training_args.warmup_steps": Take("training.warmup_steps", number),
    "training_args.num_train_epochs": Take("training.num_train_epochs", number),
    "training_args.data_seed": Take("data.seed", number),
    "training_args.seed": unneeded("ROLL replaces it by the seed of the pipeline"),
    "training_args.output_dir": _RUN,
    "training_args.dataloader_num_workers": unneeded("Ray Data reads and prepares the rows"),
    "training_args.fp16": unneeded("ROLL sets it from model_args.dtype"),
    "training_args.bf16": unneeded("ROLL sets it from model_args.dtype"),
    "training_args.tf32": Take("strategy.matmul_precision", lambda on: "high" if flag(on) else "highest"),
    "training_args.save_hf_model": unneeded("trainshed export writes a Hugging Face folder"),
    "data_args.template": Drop("rows are rendered by the tokenizer's own chat template", numbers=True),
    "data_args.domain_interleave_probs.*": Drop(
        "shares belong to sources (data.train, each with weight), not to tags of rows", numbers=True
    ),
    "data_args.interleave_probs": unneeded("one source"),
    "data_args.dataset_dir": unneeded("data.train has whole paths"),
    "data_args.dataset_type": unneeded("data.train.format, by file extension"),
    "data_args.preprocessing_num_workers": unneeded("Ray Data uses the free CPUs"),
    "data_args.tag": unneeded("rows are not chosen by tag"),
    "data_args.id": unneeded("samples are counted"),
    "strategy_args.strategy_name": unneeded("every job uses FSDP2"),
    "strategy_args.strategy_config.param_dtype": Take("model.dtype", dtype),
    "strategy_args.strategy_config.reduce_dtype": Take("strategy.reduce_dtype", dtype),
    "strategy_args.strategy_config.reshard_after_forward": Take("strategy.reshard_after_forward", switch),
    "strategy_args.strategy_config.offload_policy": Take("strategy.offload_policy", switch),
    "strategy_args.strategy_config.fsdp_size": Take("strategy.fsdp_size", number),
    "strategy_args.strategy_config.ep_size": Take("strategy.ep_size", number),
    "strategy_args.strategy_config.apply_expert_patch": Take(
        "strategy.apply_expert_patch", reason="changes nothing: experts without tokens have gradients"
    ),
    "strategy_args.strategy_config.apply_tiled_mlp": Take("strategy.apply_tiled_mlp", switch),
    "strategy_args.strategy_config.tiled_num_shards": Take("strategy.tiled_num_shards", number),
    "strategy_args.strategy_config.model_type": unneeded("tiles are found by the names of the model's modules"),
    "strategy_args.strategy_config.async_save_ckpt": Take("strategy.async_save_ckpt", switch),
    "strategy_args.strategy_config.save_only_model": Drop("checkpoints hold the whole state, so that a job can resume"),
    "strategy_args.strategy_config.use_batched_model_update": unneeded("no weights are sent to rollout workers"),
    "strategy_args.strategy_config.forward_prefetch": unneeded("ROLL's FSDP2 does not read it; see strategy"),
    "strategy_args.strategy_config.wrap_policy.transformer_layer_cls_to_wrap": Take(
        "strategy.wrap_policy.transformer_layer_cls_to_wrap", names
    ),
    "strategy_args.strategy_config.wrap_policy.wrap_embeddings": Take("strategy.wrap_policy.wrap_embeddings"),
    "strategy_args.strategy_config.wrap_policy.wrap_lm_output": Take("strategy.wrap_policy.wrap_lm_output"),
    "strategy_args.strategy_config.wrap_policy.moe_experts": Take("strategy.wrap_policy.moe_experts", names),
    "use_sequence_packing": Take(
        "data.packing",
        lambda on: False,
        "only ROLL's Megatron strategy packs: its FSDP2 pads each row; data.packing: true packs rows here",
    ),
    "sequence_packing_args.*": unneeded("rows are packed to data.sequence_length"),
    "use_remove_padding": unneeded("time only; data.packing leaves no padding"),
    "num_gpus_per_worker": unneeded("a worker has one GPU"),
    "infer_batch_size": Drop("evaluation uses per_device_train_batch_size; its loss is the same"),
    "backend_timeout": unneeded("failure.hang_timeout_seconds"),
    "system_envs.*": _RAY,
    "max_concurrency": _RAY,
    "offload_nccl": unneeded("ROLL sets it to false"),
    "checkpoint_config.*": _RUN,
    "logits_in_fp32": unneeded("the loss is always computed in fp32"),
    "apply_loss_scale": unneeded("the loss is a sum over the tokens of the step, divided by their number"),
    "use_dynamic_batching_in_train": _DYNAMIC,
    "use_dynamic_batching_in_infer": _DYNAMIC,
    "max_tokens_per_microbatch_in_train": _LENGTHS,
    "max_tokens_per_microbatch_in_infer": _LENGTHS,
    "sequence_length_round_in_train": _LENGTHS,
    "sequence_length_round_in_infer": _LENGTHS,
    "model_update_frequency": _ROLLOUT,
    "pg_variant": _ROLLOUT,
    "topr_positive_weight": _ROLLOUT,
    "topr_negative_weight": _ROLLOUT,
    "opd_kl_coef": _ROLLOUT,
    "tag_included": _ROLLOUT,
    "judge_prompt": _ROLLOUT,
    "generating_args.*": _ROLLOUT,
    "router_replay.*": _ROLLOUT,
    "mtp_training_mode": Drop("extra prediction layers are not trained", numbers=True, harmless=(None, "disabled")),
    **{f"data_args.{name}": _PIXELS for name in (
        "image_max_pixels", "image_min_pixels", "video_max_pixels", "video_min_pixels", "video_total_pixels",
        "video_fps", "video_max_frames", "video_resize_chunk_frames", "image_folder", "video_folder", "audio_folder",
        "custom_data_kwargs_func",
    )},
}  # fmt: skip
"""Fields of a worker."""

ADAPTERS = {
    "r": "lora_rank",
    "alpha": "lora_alpha",
    "dropout": "lora_dropout",
    "target_modules": "lora_target",
    "modules_to_save": "additional_target",
}
"""Fields of a worker's `model_args` by field of `model.lora`."""

INFERENCE = WORKER | {name: _OF_INFERENCE for name, rule in WORKER.items() if rule is _LORA}
"""Rules of a worker that infers."""
