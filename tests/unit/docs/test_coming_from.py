"""The pages for users of other tools: every name of the guides, tests that exist, and specs that parse and plan."""

import re
from pathlib import Path

import pytest

from train_loop.plan import plan_batch, plan_mesh
from train_loop.spec import dump, load, parse_any_text

PAGES = {file.stem: file.read_text() for file in Path("docs/coming-from").glob("*.md")}
EXAMPLES = sorted(Path("examples/coming-from").glob("*.yaml"))
NAMES = {
    "roll": """actor_train reference model_args disable_gradient_checkpointing dtype model_type training_args
        learning_rate weight_decay per_device_train_batch_size gradient_accumulation_steps warmup_steps
        num_train_epochs strategy_args strategy_name fsdp2_train fsdp2_infer strategy_config fsdp_size param_dtype
        reduce_dtype float32 reshard_after_forward offload_policy device_mapping infer_batch_size ulysses_size
        wrap_policy transformer_layer_cls_to_wrap wrap_embeddings wrap_lm_output moe_experts apply_expert_patch
        apply_tiled_mlp tiled_num_shards async_save_ckpt freeze_module_prefix _no_split_modules TiledMLP
        ddp_size""",
    "pytorch": """fully_shard unshard device_mesh init_device_mesh reshard_after_forward set_modules_to_forward_prefetch
        set_modules_to_backward_prefetch num_to_forward_prefetch num_to_backward_prefetch mp_policy MixedPrecisionPolicy
        param_dtype reduce_dtype output_dtype cast_forward_inputs offload_policy CPUOffloadPolicy clip_grad_norm_
        full_tensor distribute_tensor load_state_dict mmap weights_only set_model_state_dict get_model_state_dict
        set_optimizer_state_dict get_optimizer_state_dict full_state_dict broadcast_from_rank0 cpu_offload to_empty
        reset_parameters set_requires_gradient_sync ignored_params no_sync nproc_per_node torchrun LOCAL_RANK RANK
        WORLD_SIZE set_device init_process_group DeviceMesh DTensor to_local DistributedDataParallel StateDictOptions
        map_location OffloadPolicy async_save get_state_dict set_state_dict Stateful zero_grad amp forward""",
    "fsdp1": """FullyShardedDataParallel sharding_strategy FULL_SHARD SHARD_GRAD_OP HYBRID_SHARD _HYBRID_SHARD_ZERO2
        NO_SHARD auto_wrap_policy size_based_auto_wrap_policy transformer_auto_wrap_policy transformer_layer_cls
        min_num_params ModuleWrapPolicy cpu_offload CPUOffload offload_params backward_prefetch BACKWARD_PRE
        BACKWARD_POST device_id mixed_precision buffer_dtype cast_root_forward_inputs sync_module_states
        forward_prefetch limit_all_gathers use_orig_params no_sync ignored_states param_init_fn FullStateDictConfig
        state_dict_type offload_to_cpu rank0_only optim_state_dict_config FullyShardedDataParallelPlugin
        LlamaDecoderLayer StateDictType FullOptimStateDictConfig enable_wrap current_device""",
    "ray-train": """auto_wrap_policy size_based_auto_wrap_policy min_num_params transformer_auto_wrap_policy cpu_offload
        mixed_precision backward_prefetch CrossEntropyLoss Adam lr TorchTrainer ScalingConfig""",
}
"""The options in the configurations of each guide that users come with."""


@pytest.mark.parametrize("page", NAMES)
def test_every_option_of_a_guide_is_on_its_page(page: str) -> None:
    assert [
        name for name in NAMES[page].split() if not re.search(rf"(?<!\w){re.escape(name)}(?!\w)", PAGES[page])
    ] == []


def test_tests_that_pages_name_exist() -> None:
    named = {name for text in PAGES.values() for name in re.findall(r"`((?:tests/)?[\w/]+/test_\w+\.py)`", text)}
    assert len(named) > 20
    every = [str(file) for file in Path("tests").rglob("test_*.py")]
    assert [name for name in named if not any(file.endswith(f"/{name.removeprefix('tests/')}") for file in every)] == []


def test_pages_show_every_example() -> None:
    shown = {name for text in PAGES.values() for name in re.findall(r'^--8<-- "([^"]+)"', text, re.MULTILINE)}
    assert shown == {str(file) for file in EXAMPLES}


MESHES = {
    "roll": (2, 4, 2, 1),
    "roll-infer": (2, 4, 1, 1),
    "fsdp1": (1, 8, 1, 1),
    "accelerate": (2, 2, 1, 2),
    "trainer": (1, 8, 1, 1),
}
"""Replicas, shards, parts of sequences and parts of layers of each example."""


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: str(file.stem))
def test_example_plans_the_mesh_of_its_guide(file: Path) -> None:
    job = parse_any_text(file.read_text())
    assert job == load(dump(job))
    strategy = job.strategy
    mesh = plan_mesh(
        world=job.scaling.world,
        fsdp_size=strategy.shards,
        ulysses_size=strategy.ulysses_size,
        tp_size=strategy.tp_size,
    )
    assert (mesh.ddp, mesh.fsdp, mesh.sp, mesh.tp) == MESHES[file.stem]
    assert plan_batch(job.run.training, dp=mesh.dp).global_batch >= mesh.dp
