"""The plan's memory of gathered parameters and gradients, compared with what FSDP2 holds at each layer of a step."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import PreTrainedModel

from tests.support.builders.specs import TINY, may_read, raw_spec
from train_loop.model.families.causal.build import build_model
from train_loop.model.families.causal.family import CAUSAL
from train_loop.model.folder import model_shape
from train_loop.parallel.mesh import Mesh
from train_loop.parallel.shard import apply_fsdp
from train_loop.plan import plan_job
from train_loop.plan.memory.forward import Forward
from train_loop.preflight.model import check_model
from train_loop.spec import JobSpec, parse

LAYERS = 6
# gloo would copy gradients once more.
ON_GPU: dict[str, Any] = {"resources_per_worker": {"CPU": 1.0, "GPU": 1.0}}
ROOT = {"wrap_embeddings": False, "wrap_lm_output": False}


@pytest.fixture(params=[1, 4])
def world(request: pytest.FixtureRequest) -> Iterator[int]:
    """Number of ranks of a process group whose other ranks do not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=request.param)
    yield request.param
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def _without_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the plan count what is gathered as if it could not take the place of logits."""
    monkeypatch.setattr(Forward, "beyond", lambda _, head: head)
    monkeypatch.setattr(Forward, "used", 0)
    monkeypatch.setattr(Forward, "after_layer", 0)


def sharded(spec: JobSpec, world: int) -> PreTrainedModel:
    model = build_model(spec.model).to_empty(device="cpu")
    fsdp = init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))
    mesh = SimpleNamespace(
        plan=SimpleNamespace(world=world), fsdp=fsdp, experts=None, wholes=None, device=torch.device("cpu")
    )
    apply_fsdp(CAUSAL.anatomy(model), cast(Mesh, mesh), spec.strategy)
    for weight in model.parameters():
        torch.nn.init.zeros_(weight)
    return model


def held(model: PreTrainedModel) -> int:
    """Return the bytes of gathered parameters and of gradients, whole and sharded."""
    groups = [one._get_fsdp_state()._fsdp_param_group for one in model.modules() if isinstance(one, FSDPModule)]
    total = 0
    for group in filter(None, groups):
        part = {"SHARDED": 0.0, "SHARDED_POST_FORWARD": 0.5, "UNSHARDED": 1.0}[group._sharded_state.name]
        for one in group.fsdp_params:
            whole = getattr(one, "_unsharded_param", None)
            gradients = (one.unsharded_accumulated_grad, getattr(whole, "grad", None), one.sharded_param.grad)
            total += int(part * one._orig_size.numel() * (one.param_dtype or one.orig_dtype).itemsize)
            total += sum(getattr(grad, "_local_tensor", grad).nbytes for grad in gradients if grad is not None)
    return total


@pytest.mark.parametrize("reshard", [None, True, False, 2])
def test_plan_counts_what_is_gathered_at_the_peak_of_a_step(world: int, reshard: Any) -> None:
    if reshard == 2 and world == 1:
        pytest.skip("there is no group of two ranks")
    config = TINY | {"num_hidden_layers": LAYERS, "vocab_size": 600}
    strategy = {"reshard_after_forward": reshard, "wrap_policy": ROOT}
    parts: dict[str, Any] = {"strategy": strategy, "scaling": ON_GPU | {"num_workers": world}}
    spec = parse(raw_spec(model={"config": config, "dtype": "fp32"}, **parts))
    model, seen = sharded(spec, world), list[int]()
    for layer in cast(Any, model).model.layers:
        layer.mlp.register_forward_pre_hook(lambda *_: seen.append(held(model)))
        layer.mlp.register_full_backward_pre_hook(lambda *_: seen.append(held(model)))
    model(input_ids=torch.zeros(1, 8, dtype=torch.long)).logits.sum().backward()
    assert len(seen) == 2 * LAYERS
    terms = {term.name: term.bytes for term in plan_job(spec, model_shape(spec.model)).memory}
    planned = terms["gathered_parameters"] + terms["gradients"]
    assert 0.8 * planned < max(seen) < 1.01 * planned


def test_plan_counts_whole_gradients_that_wait_for_the_last_micro_batch(world: int) -> None:
    parts: dict[str, Any] = {"strategy": {"gradient_sync": "last"}, "scaling": ON_GPU | {"num_workers": world}}
    training = {"gradient_accumulation_steps": 2}
    spec = parse(raw_spec(model={"config": TINY, "dtype": "fp32"}, training=training, **parts))
    model = sharded(spec, world)
    cast(Any, model).set_requires_gradient_sync(False)
    model(input_ids=torch.zeros(1, 8, dtype=torch.long)).logits.sum().backward()
    terms = {term.name: term.bytes for term in plan_job(spec, model_shape(spec.model)).memory}
    assert held(model) == terms["whole_gradients"]
    alone = parse(raw_spec(model={"config": TINY, "dtype": "fp32"}, **parts))
    assert "whole_gradients" not in {term.name for term in plan_job(alone, model_shape(alone.model)).memory}


@pytest.mark.parametrize("least", [500, 4000, 7760, 12000, 30000])
def test_plan_counts_what_units_by_size_gather(world: int, least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_plan_counts_units({"wrap_policy": {"min_num_params": least}}, "fp32", world, monkeypatch)


@pytest.mark.parametrize(
    "policy", [{}, {"wrap_embeddings": False}, {"wrap_lm_output": False}, {"wrap_embeddings": True}]
)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_plan_counts_what_embeddings_and_head_gather(
    world: int, policy: dict[str, bool], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # FSDP2 gathers a layer ahead, which is not seen here.
    assert_plan_counts_units({"wrap_policy": policy}, dtype, world, monkeypatch, least=0.7)


@pytest.mark.parametrize(
    "precision", [{"model.layers.*": "fp32"}, {"lm_head": "fp32"}, {"model": "fp32", "*.mlp": "bf16"}]
)
def test_plan_counts_what_units_of_other_dtypes_gather(
    world: int, precision: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_plan_counts_units({"precision": precision}, "bf16", world, monkeypatch)


def assert_plan_counts_units(
    strategy: dict[str, Any], dtype: str, world: int, monkeypatch: pytest.MonkeyPatch, least: float = 0.9
) -> None:
    """Compare the plan with the most that is held when gradients of units are reduced."""
    config = TINY | {"num_hidden_layers": LAYERS, "vocab_size": 600}
    model_spec = {"config": config, "dtype": dtype}
    spec = parse(raw_spec(model=model_spec, strategy=strategy, scaling=ON_GPU | {"num_workers": world}))
    shape, problems = check_model(spec, may_read())
    assert shape is not None
    assert problems == []
    model, seen, reduce = sharded(spec, world), list[int](), FSDPParamGroup.post_backward

    def watched(group: FSDPParamGroup, *inputs: Any) -> None:
        # FSDP2 frees weights that are gathered, and reduces gradients from a copy. Then it frees all of them but the
        # last one, and allocates shards.
        sizes = [one._orig_size.numel() for one in group.fsdp_params]
        each = [
            (one.param_dtype or one.orig_dtype).itemsize * n for one, n in zip(group.fsdp_params, sizes, strict=True)
        ]
        before, copy = held(model) - sum(each) * group.is_unsharded, 4 * sum(sizes)
        last = each[-1] if world > 1 else 0
        seen.append(max(before + copy, before - sum(each) + last + copy + copy // world))
        reduce(group, *inputs)

    monkeypatch.setattr(FSDPParamGroup, "post_backward", watched)
    model(input_ids=torch.zeros(1, 8, dtype=torch.long)).logits.sum().backward()
    terms = {term.name: term.bytes for term in plan_job(spec, shape).memory}
    planned = terms["gathered_parameters"] + terms["gradients"]
    # The plan does not know the last parameter of a unit. In bf16 it counts the largest dtype of a step for all units.
    assert (least if dtype == "fp32" else 0.68) * planned <= max(seen) <= 1.06 * planned
