"""Bytes and FLOPs that calls without values count: of own code, as in a real call, and of encoders."""

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed._tools.mem_tracker import MemTracker
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.support.builders.specs import may_read, spec
from tests.support.families.families import small
from tests.support.own_code import MODEL, example_job, forget_imports, own_spec, write_example
from train_loop.code.package import read_package, unpack
from train_loop.code.use import own_code
from train_loop.loop.objectives.own_loss import call_batch, call_loss
from train_loop.parallel.layers import apply_checkpointing
from train_loop.plan import ModelShape, plan_job
from train_loop.preflight.call_sizes import measure_call
from train_loop.preflight.model import check_model
from train_loop.preflight.own_calls import first_batch
from train_loop.preflight.own_code import first_rows_of
from train_loop.spec import JobSpec, override, parse

ON_GPU = {"num_workers": 1, "resources_per_worker": {"GPU": 1}}
CONFIGS = {
    "simple": {"inputs": 16, "width": 64, "classes": 4},
    "transformer": {"n_layers": 3, "vocab_size": 8, "max_seq_len": 16, "dim": 64, "n_heads": 4},
    "vit": {"patch": 2, "dim": 64, "depth": 3, "heads": 4, "classes": 4},
}


@pytest.fixture(autouse=True)
def _private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with forget_imports():
        yield


def unpacked(spec: JobSpec) -> JobSpec:
    """Return a spec whose package is unpacked."""
    assert spec.code is not None
    package = read_package(spec.code.package)
    unpack(package)
    return spec.model_copy(update={"code": spec.code.model_copy(update={"sha256": package.sha256})})


@pytest.mark.parametrize(("name", "recompute"), [("simple", "none"), ("transformer", "full"), ("vit", "none")])
def test_sizes_are_those_of_a_real_call(tmp_path: Path, name: str, recompute: str) -> None:
    write_example(tmp_path, name)
    raw = example_job(tmp_path, name)
    raw["code"]["config"], raw["model"]["gradient_checkpointing"] = CONFIGS[name], recompute
    raw["training"] |= {"per_device_train_batch_size": 32, "global_batch_size": 64}
    spec = unpacked(parse(raw))
    found = measure_call(spec)
    assert spec.code is not None
    assert found.problem is None
    assert found.activations is not None
    code = own_code(spec.code)
    model, batch = (
        code.model(spec.code.config),
        call_batch(code, first_batch(first_rows_of(spec), spec), torch.device("cpu")),
    )
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        torch.autograd.backward(call_loss(code, model, batch).total)
    assert found.flops == counter.get_total_flops()
    if recompute == "full":
        blocks = [one for one in model.modules() if type(one).__name__ in getattr(model, "_no_split_modules", ())]
        apply_checkpointing(blocks, "full")
    # The gradients of an earlier micro-batch exist, as in most steps.
    tracker = MemTracker()
    tracker.track_external(model)
    with tracker:
        torch.autograd.backward(call_loss(code, model, batch).total)
    (peak,) = tracker.get_tracker_snapshot("peak").values()
    assert found.activations == pytest.approx(peak["Total"] - peak["Parameter"] - peak["Gradient"], rel=0.1)


def test_plan_counts_activations_and_says_so_if_it_cannot(tmp_path: Path) -> None:
    spec = unpacked(parse(own_spec(tmp_path / "a")))
    plan = plan_job(spec, replace(ModelShape.of_code(), call=measure_call(spec)))
    assert {term.name: term.bytes for term in plan.memory}["activations"] > 0
    assert plan.warnings == ("own code: activations are estimated from a call of its first rows without values",)
    text = MODEL.replace('len(batch["y"])', 'int((batch["y"] > 0).sum())')
    spec = unpacked(parse(own_spec(tmp_path / "b", text)))
    plan = plan_job(spec, replace(ModelShape.of_code(), call=measure_call(spec)))
    assert "activations" not in {term.name for term in plan.memory}
    assert plan.warnings[0].startswith(
        "own code: its activations are not part of the memory estimate, because it cannot be called without values "
        "(mymodel:loss failed: DataDependentOutputException: "
    )
    assert plan.warnings[0].endswith("(mymodel.py, line 21, in loss))")


def test_activations_follow_the_rows_and_the_ranks_of_a_sequence(tmp_path: Path) -> None:
    write_example(tmp_path, "transformer")
    spec = unpacked(parse(example_job(tmp_path, "transformer")))
    one = measure_call(spec).activations
    two = measure_call(override(spec, {"training": {"per_device_train_batch_size": 8}})).activations
    assert one is not None
    assert two == pytest.approx(2 * one, rel=0.05)


def labelled(family: str, **parts: dict[str, Any]) -> JobSpec:
    """Return the spec of a small encoder with labels of rows."""
    model = {"config": small(family), "head": {"sequence_classification": {"labels": 3}}, "dtype": "fp32"}
    data = {"packing": False, "columns": {"input_ids": "ids", "label": "class"}}
    return spec(**parts | {"model": model | parts.get("model", {}), "data": data})


def terms(job: JobSpec) -> dict[str, int]:
    """Return the bytes of the plan by term."""
    shape, problems = check_model(job, may_read())
    assert problems == []
    assert shape is not None
    assert shape.is_measured
    return {term.name: term.bytes for term in plan_job(job, shape).memory}


@pytest.mark.parametrize("family", ["longformer", "xlm", "ibert", "qwen3_moe"])
def test_models_that_ask_for_values_are_measured(family: str) -> None:
    assert terms(labelled(family))["activations"] > 0


def test_encoders_keep_scores_on_cpus_and_inputs_of_layers_on_hosts() -> None:
    cpu, gpu = (
        terms(labelled("bert", model={"gradient_checkpointing": "none"}, scaling=scaling)) for scaling in ({}, ON_GPU)
    )
    assert gpu["activations"] < cpu["activations"]
    kept, moved = (
        terms(labelled("bert", model={"gradient_checkpointing": mode}, scaling=ON_GPU)) for mode in ("full", "offload")
    )
    assert moved["activations"] + moved["offloaded_activations"] == kept["activations"]
