"""Weights in four and eight bits: nearest codes, the same for each row alone, as exact as those of torchao.

The memory of a plan, and the jobs and models for which they are refused.
"""

from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from tests.support.builders.specs import TINY, infer_spec, may_read, raw_spec, spec
from tests.support.families.families import small
from train_loop.checkpoint.base_weights import check_base
from train_loop.errors import ModelError
from train_loop.model.folder import model_shape
from train_loop.model.quantize import BLOCK, QuantizedLinear, quantise, restore
from train_loop.plan import plan_job
from train_loop.preflight.model import check_model
from train_loop.run_dir import BaseWeights, ExportWish, Manifest
from train_loop.spec import SpecError, parse, parse_any
from train_loop.spec.kinds.infer import InferModelSpec
from train_loop.spec.kinds.model import model_of_job

KINDS: tuple[Literal["nf4", "int8"], ...] = ("nf4", "int8")


def draw(rows: int, inputs: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, inputs, generator=generator) * torch.rand(rows, 1, generator=generator)
    values[0, :BLOCK] = 0
    return values


def test_nf4_chooses_the_nearest_of_its_16_values() -> None:
    rows = draw(8, 2 * BLOCK)
    codes, scales = quantise(rows, "nf4")
    unit = torch.tensor([[16 * one + two for one, two in zip(range(0, 16, 2), range(1, 16, 2), strict=True)] * 4])
    table = restore(unit.to(torch.uint8), torch.ones(1, 1, dtype=torch.bfloat16), "nf4", torch.float32)[0, :16]
    assert table.tolist() == sorted(table.tolist())
    assert table[[0, 7, 15]].tolist() == [-1, 0, 1]
    candidates = scales.float().repeat_interleave(BLOCK, 1).unsqueeze(2) * table
    nearest = (candidates - rows.unsqueeze(2)).abs().amin(2)
    found = (restore(codes, scales, "nf4", torch.float32) - rows).abs()
    assert torch.allclose(found, nearest, rtol=0, atol=1e-7)
    assert codes.dtype == torch.uint8
    assert codes.shape == (8, BLOCK)
    assert scales.shape == (8, 2)


def test_int8_is_within_half_a_step() -> None:
    rows = draw(8, 100)
    codes, scales = quantise(rows, "int8")
    step = rows.abs().amax(1, keepdim=True) / 127
    # The largest value of a row may be above its rounded scale.
    assert ((restore(codes, scales, "int8", torch.float32) - rows).abs() <= 0.5 * step + 2**-8 * rows.abs()).all()
    assert (codes.dtype, scales.shape) == (torch.int8, (8, 1))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_have_the_same_codes_alone(kind: Literal["nf4", "int8"]) -> None:
    rows = draw(6, 4 * BLOCK)
    codes, scales = quantise(rows, kind)
    for first, last in ((0, 1), (1, 4), (4, 6), (2, 2)):
        part, of_part = quantise(rows[first:last], kind)
        assert torch.equal(part, codes[first:last])
        assert torch.equal(of_part, scales[first:last])
    assert torch.equal(restore(codes, scales, kind, torch.float32)[0, :BLOCK], torch.zeros(BLOCK))


def test_nf4_is_as_exact_as_that_of_torchao() -> None:
    library = pytest.importorskip(
        "torchao.quantization.quantize_.workflows.nf4.nf4_tensor",
        reason="torchao is an optional dependency, which is not installed here",
    )
    rows = draw(128, 128)
    mine = restore(*quantise(rows, "nf4"), "nf4", torch.float32)
    theirs = library.to_nf4(rows).get_original_weight()
    errors = [(one - rows).norm().item() for one in (mine, theirs)]
    assert errors[0] <= 1.001 * errors[1]
    assert (mine - theirs).norm() <= 0.03 * rows.norm()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bias", [True, False])
def test_layer_computes_as_a_linear_one_with_the_restored_weight(kind: Literal["nf4", "int8"], bias: bool) -> None:
    linear, weight = nn.Linear(2 * BLOCK, 24, bias=bias), draw(24, 2 * BLOCK)
    layer = QuantizedLinear(linear, kind)
    with layer.writable() as written:
        written.copy_(weight)
    restored = layer.restored(torch.float32)
    assert torch.equal(restored, restore(*quantise(weight, kind), kind, torch.float32))
    with torch.no_grad():
        linear.weight.copy_(restored)
    x = [draw(5, 2 * BLOCK, seed=1)[None].requires_grad_() for _ in range(2)]
    found, expected = layer(x[0]), linear(x[1])
    for output in (found, expected):
        output.square().sum().backward()
    assert torch.allclose(found, expected, rtol=1e-6, atol=1e-6)
    gradients = [one.grad for one in x]
    assert gradients[0] is not None
    assert gradients[1] is not None
    assert torch.allclose(gradients[0], gradients[1], rtol=1e-6, atol=1e-6)
    assert [name for name, p in layer.named_parameters() if p.requires_grad] == (["bias"] if bias else [])


WIDE = TINY | {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
LAYERS = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128)
"""Weights of the linear layers of two layers."""


@pytest.mark.parametrize(("kind", "stored"), [("nf4", LAYERS // 2 + 2 * LAYERS // 64), ("int8", LAYERS + 2 * 2 * 512)])
def test_plan_counts_codes_and_scales(kind: str, stored: int) -> None:
    lora, terms = {"r": 2, "target_modules": ["q_proj"]}, []
    for quantized in (None, kind):
        job = spec(
            model={"config": WIDE, "dtype": "bf16", "master_dtype": "bf16", "lora": lora, "quantize_base": quantized},
            scaling={"num_workers": 2},
        )
        shape, problems = check_model(job, may_read())
        assert problems == []
        assert shape is not None
        terms.append({term.name: term for term in plan_job(job, shape).memory})
    plain, small_ones = terms
    frozen = plain["frozen_parameters"].bytes - small_ones["frozen_parameters"].bytes
    assert frozen == pytest.approx((2 * LAYERS - stored) / 2, abs=2)
    assert f"{stored / LAYERS:.4g} bytes x quantised weights" in small_ones["frozen_parameters"].formula
    assert small_ones["gathered_parameters"].bytes < plain["gathered_parameters"].bytes
    assert small_ones["parameters"] == plain["parameters"]
    # A plan without the model, such as that of workers which choose micro-batches, has the same codes and scales.
    estimated = {term.name: term for term in plan_job(job, model_shape(job.model)).memory}
    assert estimated["frozen_parameters"] == small_ones["frozen_parameters"]
    sizes = [one["gathered_parameters"].bytes for one in (estimated, small_ones)]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.1)


def test_plan_has_the_units_of_quantised_layers() -> None:
    """A table with fewer values than a layer, and more than its codes, is a unit of the run."""
    lora = {"r": 2, "target_modules": ["q_proj"]}
    sizes: dict[str, Any] = {"config": WIDE | {"vocab_size": 384}, "lora": lora}
    found = {}
    for kind in (None, "nf4"):
        shape, problems = check_model(spec(model=sizes | {"quantize_base": kind}), may_read())
        assert problems == []
        assert shape is not None
        assert shape.built is not None
        found[kind] = {one.module for one in shape.built.units}
    assert "Embedding" not in found[None]
    assert "Embedding" in found["nf4"]


@pytest.mark.parametrize(("then", "now"), [("nf4", "int8"), (None, "nf4"), ("int8", None)])
def test_worker_refuses_adapters_of_another_quantisation(then: str | None, now: str | None) -> None:
    base = BaseWeights(path="/m", sha256="a", quantized=then)
    manifest = Manifest.model_construct(step=5, base=base)  # type: ignore[call-arg]
    check_base(BaseWeights(path="/elsewhere", sha256="a", quantized=then), manifest)
    with pytest.raises(
        ModelError, match=f"trained with quantize_base={then or 'null'}, and quantize_base={now or 'null'}"
    ):
        check_base(BaseWeights(path="/m", sha256="a", quantized=now), manifest)


@pytest.mark.parametrize(
    ("model", "pointer", "message"),
    [
        (
            {"config": WIDE | {"hidden_size": 72}, "lora": {}, "quantize_base": "nf4"},
            "/model/quantize_base",
            "quantize_base=nf4 needs numbers of inputs that are multiples of 64, and "
            "model.layers.0.self_attn.q_proj.base_layer of Qwen3ForCausalLM has 72; choose quantize_base: int8, or "
            "remove it",
        ),
        (
            {"config": small("qwen3_moe"), "lora": {}, "quantize_base": "nf4"},
            "/model/quantize_base",
            "quantize_base=nf4 is not supported for Qwen3MoeForCausalLM: its experts hold most of the weights, and are "
            "not linear layers; remove quantize_base",
        ),
        (
            {"config": small("gpt2"), "lora": {}, "quantize_base": "int8"},
            "/model/quantize_base",
            "quantize_base=int8 has no effect on GPT2LMHeadModel, which has no frozen torch.nn.Linear in its layers; "
            "remove it",
        ),
    ],
)
def test_models_that_cannot_be_quantised_are_refused(model: dict[str, Any], pointer: str, message: str) -> None:
    _, problems = check_model(spec(model=model), may_read())
    assert [(one.pointer, one.message) for one in problems] == [(pointer, message)]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            {"quantize_base": "nf4"},
            "quantize_base=nf4 stores weights that are frozen, and without lora all are trained; add lora, or remove "
            "quantize_base",
        ),
        (
            {"quantize_base": "int8", "lora": {}, "dtype": "fp16"},
            "quantize_base=int8 is not proven with dtype=fp16; choose bf16, or remove one",
        ),
        (
            {"quantize_base": "nf4", "lora": {"use_dora": True}},
            "quantize_base=nf4 is not supported with use_dora, which computes norms of whole weights in each step; set "
            "use_dora: false, or remove quantize_base",
        ),
    ],
)
def test_specs_that_do_not_freeze_the_weights_are_refused(model: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as raised:
        parse(raw_spec(model=model))
    assert [one.message for one in raised.value.problems] == [message]


@pytest.mark.parametrize(
    ("form", "quantized", "message"),
    [
        ("adapter", "nf4", None),
        ("dequantized", "nf4", None),
        ("merged", None, None),
        (
            "merged",
            "nf4",
            "the adapters were trained with weights in nf4 (model.quantize_base), and those at model.path are "
            "others; choose form dequantized, which adds them to the restored weights, or adapter",
        ),
        (
            "dequantized",
            None,
            "the run has no quantised weights (model.quantize_base) to restore; choose form merged",
        ),
    ],
)
def test_adapters_are_added_to_the_weights_beside_which_they_were_trained(
    form: Any, quantized: str | None, message: str | None
) -> None:
    job = spec(model={"lora": {}, "quantize_base": quantized})
    assert ExportWish(dtype="fp32", form=form).fault(job.model) == message


@pytest.mark.parametrize("of", [{"job": "job-1"}, {"path": "/models/base", "adapter": "/models/adapter"}])
def test_adapters_of_a_folder_or_job_may_have_a_quantised_base(of: dict[str, Any]) -> None:
    parse_any(infer_spec(model={"config": None, "quantize_base": "nf4"} | of))
    if "path" in of:
        parse(raw_spec(model={"config": None, "quantize_base": "nf4"} | of))


def test_inference_without_adapters_has_no_quantised_base() -> None:
    with pytest.raises(SpecError, match="quantize_base=nf4 stores weights that are frozen, and without lora all are"):
        parse_any(infer_spec(model={"quantize_base": "nf4"}))


def test_inference_computes_with_the_weights_of_the_job() -> None:
    job = spec(model={"path": "/models/base", "config": None, "lora": {"r": 2}, "quantize_base": "nf4"})
    model = parse_any(infer_spec(model={"config": None, "job": "job-1"})).model
    found = model_of_job(model, "job-1", job.model, None, reads_text=False)
    assert InferModelSpec.model_validate({**model.model_dump(), **found}).quantize_base == "nf4"
