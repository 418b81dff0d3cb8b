"""Tools whose configurations are not imported, with the fields that no other tool has."""

from train_loop.spec.importers.recognise import Tool, names_of

_ANSWER = "which is not imported; write a spec from trainshed init, with the reference of names of other tools"

REFUSED = (
    Tool(
        "ms-swift", marks=names_of("tuner_type train_type swift_version"), extends="TrainingArguments", refusal=_ANSWER
    ),
    Tool(
        "DeepSpeed",
        marks=names_of(
            "zero_optimization train_micro_batch_size_per_gpu zero_allow_untested_optimizer steps_per_print "
            "wall_clock_breakdown bf16.enabled fp16.enabled optimizer.type scheduler.type prescale_gradients "
            "zero_force_ds_cpu_optimizer communication_data_type"
        ),
        shared=names_of("train_batch_size gradient_clipping gradient_accumulation_steps bf16 fp16"),
        refusal="which is not imported; ZeRO stage 3 is FSDP2's default, stage 2 strategy.reshard_after_forward: false",
    ),
    Tool(
        "verl",
        marks=names_of(
            "actor_rollout_ref model.partial_pretrain data.micro_batch_size_per_gpu data.train_files "
            "trainer.default_local_dir trainer.total_epochs algorithm.adv_estimator data.max_prompt_length "
            "optim.lr_warmup_steps_ratio trainer.total_training_steps trainer.n_gpus_per_node"
        ),
        refusal=_ANSWER,
    ),
    Tool(
        "torchtitan",
        marks=names_of(
            "training.local_batch_size job.dump_folder model.flavor job.config_file training.seq_len metrics.log_freq "
            "parallelism.data_parallel_shard_degree activation_checkpoint.mode profiling.enable_profiling "
            "model.hf_assets_path lr_scheduler.decay_ratio experimental.custom_import model.tokenizer_path "
            "checkpoint.interval training.data_parallel_shard_degree float8.enable_fsdp_float8_all_gather"
        ),
        refusal=_ANSWER,
    ),
    Tool(
        "SkyPilot",
        marks=names_of(
            "file_mounts resources.accelerators resources.cloud resources.infra resources.use_spot setup run "
            "resources.instance_type resources.any_of resources.disk_size"
        ),
        refusal="which is not imported; import the configuration of the tool that its commands start",
    ),
    Tool(
        "Lightning",
        marks=names_of(
            "trainer.accelerator trainer.max_epochs trainer.strategy trainer.enable_checkpointing seed_everything "
            "trainer.accumulate_grad_batches trainer.gradient_clip_val"
        ),
        refusal=_ANSWER,
    ),
    Tool(
        "NeMo",
        marks=names_of(
            "exp_manager model.tensor_model_parallel_size model.megatron_amp_O2 step_scheduler model.restore_from_path "
            "model.peft.peft_scheme model.data.train_ds distributed.dp_size model.micro_batch_size model._target_ "
            "policy.train_global_batch_size"
        ),
        extends="Lightning",
        refusal=_ANSWER,
    ),
    Tool(
        "Megatron",
        marks=names_of(
            "tensor_model_parallel_size pipeline_model_parallel_size train_iters model_parallel language_model "
            "train.train_iters model.pipeline_model_parallel_size use_distributed_optimizer lr_warmup_iters "
            "ddp.use_distributed_optimizer"
        ),
        shared=names_of("micro_batch_size global_batch_size seq_length"),
        refusal=_ANSWER,
    ),
    Tool(
        "a model (config.json)",
        marks=names_of("architectures transformers_version"),
        refusal="which is not imported; set model.path to its folder, or model.config to its fields for random weights",
    ),
    Tool(
        "peft's adapters (adapter_config.json)",
        marks=names_of("peft_type base_model_name_or_path"),
        refusal="which is not imported; set model.adapter to its folder",
    ),
)
