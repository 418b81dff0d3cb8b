"""The linear layers that compute in float8, and the jobs, models and workers for which it is refused."""

import sys
from typing import Any

import pytest
import torch

from tests.support.builders.specs import TINY, code_spec, may_read, raw_spec, spec
from tests.support.families.families import small
from train_loop.errors import ModelError, UserError
from train_loop.model.families.anatomy import Anatomy
from train_loop.model.families.choose import family_of
from train_loop.model.float8 import convert_linears, float8_linears
from train_loop.parallel.units import repeated_layers
from train_loop.plan import plan_job
from train_loop.preflight.model import check_model
from train_loop.run_dir import RunDir
from train_loop.spec import JobSpec, SpecError, parse

TENSORWISE = {"strategy": {"float8": "tensorwise"}}
GPU = {"scaling": {"num_workers": 2, "resources_per_worker": {"CPU": 1, "GPU": 1}}}


def job_of(config: dict[str, Any], **strategy: Any) -> JobSpec:
    return spec(model={"config": config}, strategy={"float8": "rowwise"} | strategy)


def built(job: JobSpec) -> tuple[Anatomy, list[Any]]:
    anatomy = family_of(job).build(job.model)
    return anatomy, repeated_layers(anatomy, job.strategy.wrap_policy)


def test_linears_of_layers_are_chosen_and_odd_sizes_named() -> None:
    shape, problems = check_model(job_of(TINY | {"intermediate_size": 40}), may_read())
    assert problems == []
    assert shape is not None
    assert shape.float8 is not None
    of_layers = [f"model.layers.{n}.self_attn.{p}_proj" for n in range(2) for p in "qkvo"]
    assert [*shape.float8.names] == of_layers
    odd = [f"model.layers.{n}.mlp.{p}_proj" for n in range(2) for p in ("gate", "up", "down")]
    assert [*shape.float8.left_out] == odd
    # q and o have 32 x 32 weights, k and v 16 x 32. The plan without the model counts the odd ones, too.
    assert shape.float8.values == 2 * (2 * 32 * 32 + 2 * 16 * 32)
    attention = [inputs * outputs for name, (inputs, outputs) in shape.linear_layers.items() if name[0] in "qkvo"]
    assert 2 * sum(attention) == shape.float8.values


def test_experts_and_routers_are_left_out() -> None:
    job = job_of(small("qwen2_moe"))
    anatomy, layers = built(job)
    assert anatomy.experts is not None
    names = {one: name for name, one in anatomy.model.named_modules()}
    routed = {names[part] for one in (*anatomy.experts.modules, *anatomy.experts.routers) for part in one.modules()}
    found = float8_linears(anatomy, layers, job)
    assert any("shared_expert." in name for name in found.names)
    assert not routed.intersection((*found.names, *found.left_out))
    assert all(name.endswith("shared_expert_gate") for name in found.left_out)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            small("gpt2"),
            "float8=rowwise has no effect on GPT2LMHeadModel, whose layers have no torch.nn.Linear outside of experts "
            "and routers; remove float8",
        ),
        (
            TINY | {"hidden_size": 36},
            "float8=rowwise has no effect on Qwen3ForCausalLM: sizes in float8 are multiples of 16, and no linear "
            "layer has them, for example model.layers.0.self_attn.q_proj with 36 x 32; remove float8",
        ),
    ],
)
def test_model_without_a_layer_in_float8_is_refused(config: dict[str, Any], message: str) -> None:
    job = job_of(config)
    with pytest.raises(ModelError) as raised:
        float8_linears(*built(job), job)
    assert str(raised.value) == message
    _, problems = check_model(job, may_read())
    assert [(one.pointer, one.message) for one in problems] == [("/strategy/float8", message)]


@pytest.mark.parametrize(
    ("part", "setting", "pointer"),
    [
        ("model", {"dtype": "fp16"}, "/model/dtype"),
        ("model", {"lora": {}}, "/model/lora"),
        ("model", {"adapter": "/models/adapter", "path": "/models/base", "config": None}, "/model/adapter"),
        ("model", {"gradient_checkpointing": "selective"}, "/model/gradient_checkpointing"),
        ("model", {"gradient_checkpointing": {"budget": 0.5}, "compile": True}, "/model/gradient_checkpointing"),
        ("training", {"optimizer": "muon"}, "/training/optimizer"),
        ("training", {"optimizer": "adafactor"}, "/training/optimizer"),
        ("training", {"optimizer": "adamw_8bit"}, "/training/optimizer"),
        ("training", {"optimizer": "lion"}, "/training/optimizer"),
        ("training", {"optimizer": "schedule_free_adamw", "lr_scheduler_type": "constant"}, "/training/optimizer"),
        ("strategy", {"tp_size": 2}, "/strategy/tp_size"),
        ("strategy", {"precision": {"lm_head": "fp32"}}, "/strategy/precision"),
        ("strategy", {"ignored_params": ["*norm*"]}, "/strategy/ignored_params"),
        ("strategy", {"offload_policy": True}, "/strategy/offload_policy"),
        ("strategy", {"offload_policy": "optimizer"}, "/strategy/offload_policy"),
        ("strategy", {"reshard_after_forward": 2}, "/strategy/reshard_after_forward"),
    ],
)
def test_unproven_settings_are_refused(part: str, setting: dict[str, Any], pointer: str) -> None:
    raw = raw_spec(**TENSORWISE)
    raw[part] = raw.get(part, {}) | setting
    with pytest.raises(SpecError) as raised:
        parse(raw)
    name = next(iter(setting))
    (found,) = (one for one in raised.value.problems if "float8" in one.message)
    assert found.pointer == pointer
    assert name in found.message
    assert found.message.endswith(" is not proven with float8=tensorwise; change it, or remove float8")


def test_own_code_and_any_size_are_refused() -> None:
    with pytest.raises(SpecError, match=r"own code \(code\) is not proven with float8=rowwise; change it, or remove"):
        parse(code_spec(strategy={"float8": "rowwise"}))
    with pytest.raises(SpecError) as raised:
        parse(raw_spec(training={"reproducible": "any_size", "global_batch_size": 8}, **TENSORWISE))
    assert [one.message for one in raised.value.problems] == [
        "float8=tensorwise, with scales that depend on the tokens of a rank, is not proven to give the same bits at "
        "every size; change it, or choose training.reproducible=same_size"
    ]


def test_cpus_emulate_it_with_a_warning() -> None:
    job = job_of(TINY)
    shape, _ = check_model(job, may_read())
    assert shape is not None
    assert plan_job(job, shape).warnings == (
        "float8=rowwise is emulated on CPUs: operands are rounded to float8 and multiplied in fp32, which takes more "
        "time than without float8",
    )
    assert plan_job(spec(**TENSORWISE, **GPU), shape).warnings == ()


def test_run_may_go_on_without_it(tmp_path: Any) -> None:
    run_dir, batch = RunDir(tmp_path), {"global_batch_size": 4}
    run_dir.write_spec(spec(training=batch, **TENSORWISE))
    run_dir.write_spec(spec(training=batch))


def test_workers_without_torchao_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    job = job_of(TINY)
    anatomy, layers = built(job)
    names = float8_linears(anatomy, layers, job).names
    with pytest.raises(UserError, match=r"^float8=rowwise needs torchao, which cannot be imported here .*\[torchao\]'"):
        convert_linears(anatomy, names, job, shards=1, device=torch.device("cpu"))


def converted(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], **parts: Any) -> Anatomy:
    """Return a model that is converted for a GPU of a compute capability, on the meta device."""
    pytest.importorskip("torchao", reason="torchao is an optional dependency, which is not installed here")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    job = spec(**parts)
    anatomy, layers = built(job)
    convert_linears(anatomy, float8_linears(anatomy, layers, job).names, job, shards=3, device=torch.device("cuda"))
    return anatomy


def test_gpus_without_float8_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"needs a GPU of compute capability 8.9 or later, and this one has 8.0; rem"):
        converted(monkeypatch, (8, 0), **TENSORWISE)


@pytest.mark.parametrize(
    ("parts", "pads"),
    [
        ({}, False),
        ({"data": {"sequence_length": 24}}, True),
        ({"strategy": {"float8": "tensorwise", "apply_tiled_mlp": True}}, True),
    ],
)
def test_gpus_compute_it_themselves_and_gather_even_shards(
    monkeypatch: pytest.MonkeyPatch, parts: dict[str, Any], pads: bool
) -> None:
    model: Any = converted(monkeypatch, (9, 0), **TENSORWISE | parts).model
    layer = model.model.layers[0]
    assert {(one.config.emulate, one.config.pad_inner_dim) for one in (layer.mlp.up_proj, layer.self_attn.q_proj)} == {
        (False, pads)
    }
    # Three ranks have 16 of 48 rows each, and no equal numbers of 32.
    assert layer.mlp.up_proj.config.enable_fsdp_float8_all_gather
    assert not layer.self_attn.q_proj.config.enable_fsdp_float8_all_gather
    assert type(model.lm_head) is torch.nn.Linear
