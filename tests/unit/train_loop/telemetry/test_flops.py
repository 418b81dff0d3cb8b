"""MFU: FLOPs per token, and the peak FLOP/s of a device."""

from dataclasses import replace
from typing import Literal

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.builders.specs import TINY, spec
from train_loop.loop.build import count_flops
from train_loop.model.families.causal.family import CAUSAL
from train_loop.model.lora.adapters import inject_adapters
from train_loop.model.quantize import quantize_layers
from train_loop.telemetry.flops import Flops, RowFlops, peak_flops


@pytest.mark.parametrize(
    ("device", "dtype", "teraflops"),
    [
        ("NVIDIA A100-SXM4-80GB", "bf16", 312.0),
        ("NVIDIA A100 80GB PCIe", "fp32", 19.5),
        ("NVIDIA H100 80GB HBM3", "bf16", 989.5),
        ("NVIDIA H100 PCIe", "bf16", 756.5),
        ("NVIDIA H100 NVL", "fp16", 835.5),
        ("NVIDIA H200", "bf16", 989.5),
        ("NVIDIA H200 NVL", "bf16", 835.5),
        ("NVIDIA GH200 480GB", "bf16", 989.5),
        ("NVIDIA B200", "bf16", 2250.0),
        ("NVIDIA GB200", "bf16", 2500.0),
        ("NVIDIA L40S", "bf16", 362.05),
        ("NVIDIA L40", "bf16", 181.05),
        ("NVIDIA L4", "fp32", 30.3),
        ("NVIDIA A10G", "bf16", 70.0),
        ("NVIDIA A10", "bf16", 125.0),
        ("Tesla V100-SXM2-32GB", "fp16", 125.0),
    ],
)
def test_peak_flops_equal_the_data_sheets(device: str, dtype: str, teraflops: float) -> None:
    assert peak_flops(device, dtype) == teraflops * 1e12


@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        ("cpu", "fp32"),
        ("NVIDIA X999", "bf16"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16"),
        ("Tesla V100-SXM2-32GB", "bf16"),
    ],
)
def test_unknown_peak_is_none(device: str, dtype: str) -> None:
    assert peak_flops(device, dtype) is None
    assert Flops(1, 1, 1, 1, device, dtype).mfu(tokens=1.0, rows=1.0) is None
    assert RowFlops(1, device, dtype).mfu(tokens=1.0, rows=1.0) is None


def test_mfu_of_own_code_follows_the_rows() -> None:
    assert RowFlops(10**12, "NVIDIA H200", "bf16").mfu(tokens=0.0, rows=98.95) == pytest.approx(0.1)
    assert RowFlops(None, "NVIDIA H200", "bf16").mfu(tokens=0.0, rows=98.95) is None


def test_mfu_equals_the_formula() -> None:
    flops = Flops(
        parameters=8_030_261_248,
        layers=32,
        attention_width=4096,
        sequence_length=4096,
        device="NVIDIA H200",
        dtype="bf16",
    )
    assert flops.per_token == 6 * 8_030_261_248 + 12 * 32 * 4096 * 4096
    assert flops.mfu(tokens=10_471.0, rows=1.0) == pytest.approx(0.578, abs=0.001)
    assert flops.stated()["peak_flops"] == 989.5e12
    # Gradients of frozen parameters are a third of the products with parameters.
    assert replace(flops, frozen=8_030_261_248).per_token == 4 * 8_030_261_248 + 12 * 32 * 4096 * 4096


@pytest.mark.parametrize("sizes", [{}, {"head_dim": 16}, {"tie_word_embeddings": True}])
def test_flops_cover_the_whole_model(sizes: dict[str, int]) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**TINY | sizes))
    flops = count_flops(CAUSAL.anatomy(model), sequence_length=32, dtype="fp32", device="cpu")
    assert flops.parameters == sum(p.numel() for p in model.parameters())
    assert (flops.layers, flops.attention_width, flops.device) == (2, 4 * sizes.get("head_dim", 8), "cpu")


@pytest.mark.parametrize("kind", [None, "nf4"])
def test_flops_of_adapters_have_no_gradients_of_frozen_weights(kind: Literal["nf4"] | None) -> None:
    """A quantised weight counts with its values, and not with its codes."""
    with torch.device("meta"):
        sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**TINY | sizes))
    frozen = sum(p.numel() for p in model.parameters())
    anatomy = CAUSAL.anatomy(model)
    inject_adapters(anatomy, spec(model={"lora": {"r": 4}}).model)
    adapters = sum(p.numel() for p in model.parameters()) - frozen
    if kind is not None:
        quantize_layers(anatomy, anatomy.layers, kind)
    flops = count_flops(anatomy, sequence_length=32, dtype="fp32", device="cpu")
    attention = 12 * flops.layers * flops.attention_width * 32
    assert flops.per_token == 4 * frozen + 6 * adapters + attention
