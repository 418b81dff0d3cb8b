"""Gradients of adapters on meshes, compared with plain peft; a step without a trained B, compared with the base."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.builders.any_size import GPT2
from tests.support.builders.folders import write_model
from tests.support.builders.searches import drawn
from tests.support.builders.specs import spec
from tests.support.ranks.adapters import Step, adapter_step, peft_step
from tests.support.ranks.gradients import forget_meshes, one_step, random_rows
from train_loop.spec import JobSpec

CallRanks = Callable[..., Any]
ROWS = random_rows(8, 32, vocab=200, packed=False)
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
MOE = {"model_type": "qwen3_moe", "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "qwen3": {},
    "gpt2": GPT2 | {"n_embd": 32} | dict.fromkeys(("resid_pdrop", "attn_pdrop", "embd_pdrop"), 0.0),
    "qwen3_moe": MOE,
}
LORA: dict[str, dict[str, Any]] = {
    "llama": {"r": 3, "alpha": 6.0, "modules_to_save": ["lm_head"]},
    "qwen3": {"r": 3, "use_dora": True, "target_modules": ["q_proj", "down_proj"]},
    "gpt2": {"r": 4, "use_rslora": True},
    "qwen3_moe": {"r": 3, "target_modules": ["q_proj", "o_proj"], "target_parameters": EXPERTS},
}
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
PEFT: dict[str, dict[str, Any]] = {
    "llama": {"r": 3, "lora_alpha": 6, "target_modules": [*ATTENTION, "gate_proj", "up_proj", "down_proj"]},
    "qwen3": {"r": 3, "lora_alpha": 32, "use_dora": True, "target_modules": ["q_proj", "down_proj"]},
    "gpt2": {"r": 4, "lora_alpha": 32, "use_rslora": True, "fan_in_fan_out": True}
    | {"target_modules": ["c_attn", "c_proj", "c_fc"]},
    "qwen3_moe": {"r": 3, "lora_alpha": 32, "target_modules": ["q_proj", "o_proj"], "target_parameters": EXPERTS},
}
MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "1": (1, {}),
    "fsdp 2": (2, {}),
    "2x2": (4, {"fsdp_size": 2}),
    "ulysses 2": (2, {"ulysses_size": 2}),
}


SHARED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "llama": (MODELS["llama"], PEFT["llama"]["target_modules"]),
    "qwen3": ({}, ["q_proj", "down_proj"]),
    "phi3": (
        {"model_type": "phi3", "eos_token_id": 2, "pad_token_id": 0},
        ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
    ),
    "qwen3_moe": (MOE, ["q_proj", "o_proj"]),
}
"""Models whose layers or experts ranks share, and the targets of their adapters: phi3 has fused ones."""
SHARING: dict[str, tuple[int, dict[str, Any]]] = {
    "1": (1, {}),
    "fsdp 2 x tp 2": (4, {"tp_size": 2}),
    "ddp 2 x tp 2": (4, {"tp_size": 2, "sharding_strategy": "NO_SHARD"}),
    "sp 2 x tp 2": (4, {"tp_size": 2, "ulysses_size": 2}),
}
OF_EXPERTS: dict[str, tuple[int, dict[str, Any]]] = {
    "1": (1, {}),
    "fsdp 4, ep 2": (4, {"ep_size": 2}),
    "ddp 2 x fsdp 2, ep 2": (4, {"fsdp_size": 2, "ep_size": 2}),
    "sp 2, ep 2": (4, {"ulysses_size": 2, "ep_size": 2}),
    "fsdp 2 x tp 2, ep 2": (4, {"tp_size": 2, "ep_size": 2}),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    home = tmp_path_factory.mktemp("models")
    return {name: write_model(home / name, **config) for name, config in MODELS.items()}


def job(folder: Path, mesh: str, *, lora: Any, **parts: dict[str, Any]) -> JobSpec:
    world, strategy = (MESHES | SHARING | OF_EXPERTS)[mesh]
    model = {"path": str(folder), "config": None, "lora": lora, "gradient_checkpointing": "full"}
    batch = {"global_batch_size": 8, "per_device_train_batch_size": 1}
    return spec(
        model=model | parts.get("model", {}),
        training=batch | parts.get("training", {}),
        data={"packing": False},
        strategy=strategy | parts.get("strategy", {}),
        scaling={"num_workers": world},
    )


def differences(one: dict[str, Any], other: dict[str, Any]) -> dict[str, float]:
    """Return the relative differences by name."""
    assert one.keys() == other.keys()
    return {name: float((one[name] - other[name]).norm() / other[name].norm()) for name in one}


@pytest.mark.parametrize("model", drawn([*MODELS], 1))
def test_gradients_on_each_mesh_equal_those_of_peft(
    call_ranks: CallRanks, folders: dict[str, Path], model: str
) -> None:
    steps: dict[str, Step] = {
        mesh: call_ranks(world, adapter_step, job(folders[model], mesh, lora=LORA[model]), ROWS)
        for mesh, (world, _) in MESHES.items()
    }
    _, gradients, weights = steps["1"]
    loss, expected = peft_step(folders[model], ROWS, weights, **PEFT[model])
    if model == "llama":
        expected["lm_head.weight"] = gradients["lm_head.weight"]
    assert all(grad.norm() > 0 for grad in expected.values())
    for mesh, (own, grads, values) in steps.items():
        assert own == pytest.approx(loss, rel=1e-5), mesh
        assert max(differences(grads, expected).values()) < 1e-5, mesh
        assert [name for name in weights if not torch.equal(values[name], weights[name])] == [], mesh


@pytest.mark.parametrize("model", [*drawn(["llama", "qwen3", "phi3"], 1), "qwen3_moe"])
def test_gradients_of_ranks_that_share_layers_or_experts_equal_those_of_peft(
    call_ranks: CallRanks, tmp_path: Path, model: str
) -> None:
    config, targets = SHARED[model]
    meshes = OF_EXPERTS if model == "qwen3_moe" else SHARING
    folder = write_model(tmp_path / "m", **config)
    # With the default, alpha = 32, peft's own rounding reaches 3e-5 of float64 in this model.
    lora = {"r": 3, "alpha": 5.0, "target_modules": targets, "modules_to_save": ["lm_head"] if model == "llama" else []}
    steps: dict[str, Step] = {
        mesh: call_ranks(world, adapter_step, job(folder, mesh, lora=lora), ROWS) for mesh, (world, _) in meshes.items()
    }
    _, gradients, weights = steps["1"]
    loss, expected = peft_step(folder, ROWS, weights, r=3, lora_alpha=5, target_modules=targets)
    expected = gradients | expected
    for mesh, (own, grads, values) in steps.items():
        assert own == pytest.approx(loss, rel=1e-5), mesh
        assert max(differences(grads, expected).values()) < 1e-5, mesh
        assert [name for name in weights if not torch.equal(values[name], weights[name])] == [], mesh


@pytest.mark.parametrize("model", drawn([*MODELS], 1))
def test_first_step_equals_that_of_the_base_bit_for_bit(
    call_ranks: CallRanks, folders: dict[str, Path], model: str
) -> None:
    half = {"dtype": "bf16", "master_dtype": "bf16"}
    for mesh, options in (("fsdp 2", half), ("ulysses 2", {})):
        plain = call_ranks(2, _loss, job(folders[model], mesh, lora=None, model=options))
        adapted = call_ranks(2, _loss, job(folders[model], mesh, lora=LORA[model], model=options))
        assert adapted == plain, mesh


SETTINGS: dict[str, dict[str, dict[str, Any]]] = {
    "offloaded inputs": {"model": {"gradient_checkpointing": "offload"}},
    "kept activations": {"model": {"gradient_checkpointing": "none"}},
    "offloaded weights": {"strategy": {"offload_policy": True}},
    "tiles": {"strategy": {"apply_tiled_mlp": True, "tiled_num_shards": 3}},
    "precision": {"strategy": {"precision": {"*.q_proj": "fp32", "model.layers.1.mlp": "fp32"}}},
    "units": {"strategy": {"wrap_policy": {"min_num_params": 2000}}},
    "accumulation": {"strategy": {"gradient_sync": "last"}},
    "chunks": {"training": {"chunked_loss": True}},
}


@pytest.mark.parametrize("setting", drawn([*SETTINGS], 2))
def test_setting_leaves_the_gradients(call_ranks: CallRanks, folders: dict[str, Path], setting: str) -> None:
    plain = job(folders["llama"], "1", lora=LORA["llama"])
    changed = job(folders["llama"], "fsdp 2", lora=LORA["llama"], **SETTINGS[setting])
    _, expected, _ = call_ranks(1, adapter_step, plain, ROWS)
    _, found, _ = call_ranks(2, adapter_step, changed, ROWS)
    assert max(differences(found, expected).values()) < 1e-5


def _loss(job: JobSpec) -> float:
    forget_meshes()
    return adapter_step(job, ROWS, filled=False)[0] if job.model.lora is not None else one_step(job, ROWS)[0]
