"""Names of fields and of values that a spec does not have: misspelt ones, those of other tools, and those to come."""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel

from train_loop.spec.base import Only

_UNKNOWN = "no such field"
_LONGEST = 64
"""Maximum characters of a name that is compared with others."""


def _by_name(table: Mapping[str, str]) -> dict[str, str]:
    return {name: meaning for meaning, names in table.items() for name in names.split()}


_NOT_YET = _by_name(
    {
        "the choice of a cluster (target)": "target",
        "LoRA (model.lora)": "lora lora_config peft peft_config lora_r lora_rank lora_alpha lora_dropout "
        "lora_target lora_target_modules use_lora use_dora use_rslora adapter adapters",
        "a quantised base model (model.quantize_base)": "quantize_base load_in_4bit load_in_8bit "
        "quantization_config quantization_bit qlora",
        "": "add_tokens kernels images balance shard_vision groups profile neftune_noise_alpha group_by_length "
        "length_column_name",
        "pipeline parallelism": "pp_size pipeline_parallel_size pipeline_model_parallel_size",
        "float8 (strategy.float8)": "float8 fp8",
        "training.warmup_ratio; set training.warmup_steps": "warmup_ratio",
        "code that comes with a model (trust_remote_code)": "trust_remote_code",
    }
)
"""Names of fields to come, and of features that this loop lacks, with the feature; empty: the field itself."""

_OURS = _by_name(
    {
        "checkpoint.every_steps": "save_steps save_interval save_freq checkpointing_steps",
        "checkpoint.every_steps or checkpoint.every_seconds": "save_strategy",
        "checkpoint.keep_last": "save_total_limit",
        "checkpoint.keep_best": "load_best_model_at_end metric_for_best_model greater_is_better",
        "training.eval_steps": "eval_strategy evaluation_strategy",
        "training.logging_steps": "logging_strategy log_interval",
        "training.optimizer": "optim optimizer_type",
        "training.learning_rate": "lr peak_lr",
        "training.weight_decay": "wd",
        "training.lr_scheduler_type": "scheduler lr_scheduler",
        "training.warmup_steps": "warmup num_warmup_steps",
        "training.adam_beta1": "beta1",
        "training.adam_beta2": "beta2",
        "training.adam_beta1 and training.adam_beta2": "betas",
        "training.adam_epsilon": "eps",
        "training.num_train_epochs": "epochs num_epochs n_epochs",
        "training.max_steps": "max_train_steps steps total_steps",
        "training.per_device_train_batch_size or training.global_batch_size": "batch_size",
        "training.per_device_train_batch_size": "micro_batch_size per_device_batch_size per_device_eval_batch_size "
        "train_micro_batch_size_per_gpu",
        "training.gradient_accumulation_steps": "gradient_accumulation grad_accum_steps",
        "training.max_grad_norm": "clip_grad grad_clip gradient_clipping",
        "training.label_smoothing_factor": "label_smoothing",
        "model.head.masked_lm.probability": "mlm_probability mlm_prob masking_ratio",
        "training.router_aux_loss.coef": "router_aux_loss_coef moe_aux_loss_coeff aux_loss_coef",
        "training.router_z_loss": "router_z_loss_coef moe_z_loss_coeff",
        "model.router_bias_update": "moe_router_bias_update_rate bias_update_speed load_balance_coeff",
        "training.ema_decay": "ema",
        "data.seed": "data_seed",
        "model.dtype": "bf16 fp16 torch_dtype mixed_precision autocast amp",
        "model.attn_implementation": "use_flash_attention_2 flash_attn flash_attention attn_impl",
        "model.compile": "torch_compile torch_compile_backend use_torch_compile",
        "model.gradient_checkpointing": "activation_checkpointing gradient_checkpointing_kwargs recompute "
        "fsdp_activation_checkpointing",
        "model.freeze_module_prefix": "freeze freeze_modules",
        "model.path": "model_name model_name_or_path pretrained_model_name_or_path base_model pretrain",
        "model": "model_args",
        "model.config": "model_config",
        "model.tokenizer": "tokenizer_name tokenizer_name_or_path",
        "data.sequence_length": "max_seq_length max_seq_len max_length max_len seq_len seq_length block_size "
        "cutoff_len context_length model_max_length",
        "data.packing": "sample_packing",
        "data.train": "dataset dataset_name dataset_path datasets train_file train_files train_data data_path "
        "file_name",
        "data.eval": "validation_file eval_data eval_dataset test_file val_data",
        "data.columns.text": "dataset_text_field text_column text_field",
        "data.columns.messages": "messages_key",
        "data": "data_args",
        "training": "training_args trainer",
        "strategy.sharding_strategy and strategy.fsdp_size": "fsdp",
        "strategy": "parallelism fsdp_config deepspeed deepspeed_config strategy_args strategy_config",
        "strategy.sharding_strategy": "fsdp_sharding_strategy zero_stage zero_optimization stage",
        "strategy, which is always FSDP2": "fsdp_version strategy_name",
        "strategy.offload_policy": "cpu_offload offload offload_params offload_param fsdp_offload_params",
        "strategy.offload_policy, which may be optimizer": "offload_optimizer optimizer_offload "
        "offload_optimizer_states",
        "strategy.reshard_after_forward": "fsdp_reshard_after_forward",
        "strategy.wrap_policy": "fsdp_auto_wrap_policy auto_wrap_policy",
        "strategy.wrap_policy.transformer_layer_cls_to_wrap": "fsdp_transformer_layer_cls_to_wrap",
        "strategy.wrap_policy.min_num_params": "fsdp_min_num_params",
        "strategy.backward_prefetch": "fsdp_backward_prefetch",
        "strategy.ignored_params": "ignored_modules ignored_parameters fsdp_ignored_modules",
        "strategy.gradient_sync": "no_sync fsdp_no_sync requires_gradient_sync sync_each_batch",
        "strategy.matmul_precision": "tf32 float32_matmul_precision",
        "training.deterministic": "full_determinism use_deterministic_algorithms",
        "strategy.forward_prefetch": "fsdp_forward_prefetch",
        "strategy.fsdp_size": "hsdp data_parallel_shard_degree dp_shard_size",
        "training.global_batch_size": "train_batch_size",
        "strategy.ulysses_size": "sp_size ulysses_degree ulysses_sequence_parallel_size sequence_parallel_size "
        "cp_size context_parallel_size",
        "strategy.tp_size": "tp tp_degree tensor_parallel tensor_parallel_size tensor_model_parallel_size "
        "tensor_parallel_degree autotp_size",
        "strategy.ep_size": "ep expert_parallel_size expert_model_parallel_size expert_parallel_degree",
        "strategy.fsdp_size and scaling.num_workers": "dp_size",
        "scaling.num_workers": "num_processes nproc_per_node nnodes num_nodes num_machines world_size workers",
        "scaling.num_workers and scaling.resources_per_worker": "num_gpus n_gpus gpus",
        "scaling.resources_per_worker": "num_gpus_per_worker device_mapping resources accelerators use_gpu",
        "failure.max_failures": "max_restarts",
        "failure.max_attempts": "retries",
        "failure.hang_timeout_seconds": "timeout ddp_timeout",
        "name": "run_name exp_name job_name",
        "labels": "tags",
        "project": "namespace",
    }
)
"""Names of TrainingArguments, accelerate, DeepSpeed, ROLL and other tools, with the field of the same meaning."""

_NOT_OURS = _by_name(
    {
        "the service chooses the run directory; see run_dir of the job": "output_dir save_dir checkpoint_dir "
        "logging_dir",
        "a job resumes by itself, and a clone starts from another job's checkpoint": "resume_from_checkpoint resume",
        "the operator chooses sinks with TRAINSHED_SINKS": "report_to wandb_project loggers",
        "Ray Data uses the free CPUs": "dataloader_num_workers preprocessing_num_workers num_proc",
        "POST /jobs/{id}/checkpoints/{step}/export writes a Hugging Face folder": "push_to_hub hub_model_id",
        "experts stay whole, and tp_size shares the rest of a layer": "expert_tensor_parallel_size "
        "expert_tensor_parallel_degree etp_size",
        "it is not needed": "do_train do_eval overwrite_output_dir remove_unused_columns disable_tqdm",
    }
)
"""Names of other tools whose meaning is not a field of a spec, with what to do instead."""


_VALUES = _by_name(
    {
        "bf16": "bfloat16",
        "fp16": "float16 half",
        "fp32": "float32 float",
        "adamw": "adam adamw_torch adamw_torch_fused adamw_hf adamw_apex_fused",
        "adamw_8bit": "adamw_bnb_8bit paged_adamw_8bit adamw_torch_8bit",
        "constant_with_warmup": "warmup",
        "sdpa": "eager",
        "full": "selective",
        "jsonl": "json ndjson",
        "text": "txt",
        "truncate": "truncate_right",
    }
)
"""Values of other tools, with the value of the same or the nearest meaning."""


def nearest_value(given: Any, expected: Sequence[str]) -> str | None:
    """Return the expected value that a misspelt value, or one of another tool, may have meant; None if none is near."""
    if not isinstance(given, str):
        return None
    name = _normalised(given[:_LONGEST]).removeprefix("torch.")
    if _VALUES.get(name) in expected:
        return _VALUES[name]
    lower = {_normalised(one): one for one in expected}
    near = difflib.get_close_matches(name, lower, n=1, cutoff=0.75)
    return lower[near[0]] if near else None


def unknown_field(place: Sequence[str], model: type[BaseModel]) -> str:
    """Return the message about an unknown field at a place of a spec: what it may have meant, or that it is to come."""
    name, fields = place[-1][:_LONGEST], field_paths(model)
    known = _normalised(name)
    elsewhere = [path for path in fields if path.rpartition(".")[2] == known]
    if known in _NOT_YET and (_NOT_YET[known] or not elsewhere):
        feature, _, remedy = (_NOT_YET[known] or ".".join(place)).partition("; ")
        return f"{feature} is not supported yet; {remedy or 'remove it'}"
    if known in _NOT_OURS:
        return f"{_UNKNOWN}; {_NOT_OURS[known]}; remove it"
    if known in _OURS:
        return f"{_UNKNOWN}; use {_OURS[known]}"
    if elsewhere:
        return f"{_UNKNOWN} here; did you mean {' or '.join(elsewhere[:3])}?"
    beside = {path.rpartition(".")[2]: path for path in fields if path.rpartition(".")[0] == ".".join(place[:-1])}
    if near := difflib.get_close_matches(known, beside, n=1, cutoff=0.7):
        return f"{_UNKNOWN}; did you mean {near[0]}?"
    leaves = {path.rpartition(".")[2]: path for path in fields}
    if near := difflib.get_close_matches(known, [*leaves, *_OURS], n=1, cutoff=0.8):
        return f"{_UNKNOWN}; did you mean {leaves.get(near[0]) or _OURS[near[0]]}?"
    return f"{_UNKNOWN}; check its spelling against GET /openapi.json, or remove it"


def _normalised(name: str) -> str:
    return name.strip().lstrip("-").replace("-", "_").lower()


@cache
def field_paths(model: type[BaseModel]) -> tuple[str, ...]:
    """Return the paths of all fields of a spec, as model.dtype; those of a list's elements are those of the list."""
    return tuple(dict.fromkeys(_paths(model, "")))


def _paths(model: type[BaseModel], before: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield f"{before}{name}"
        # Fields of a part that is not supported yet are no help.
        if any(isinstance(one, Only) for one in field.metadata):
            continue
        for inner in _models(field.annotation):
            yield from _paths(inner, f"{before}{name}.")


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif get_origin(annotation) in (Annotated, Union, UnionType, tuple):
        for part in get_args(annotation):
            yield from _models(part)
