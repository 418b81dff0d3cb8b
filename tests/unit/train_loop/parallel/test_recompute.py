"""Kinds of recomputation: all have the bits of a plain step, and `selective` repeats what it does not keep."""

import os
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from tests.families.table import read
from tests.support.builders.specs import may_read, spec
from tests.support.families.families import small
from train_loop.errors import ModelError
from train_loop.model.families.causal.family import CAUSAL
from train_loop.model.families.kept import KeptResults
from train_loop.parallel.layers import apply_checkpointing, apply_tiled_mlp, tiled_mlps
from train_loop.parallel.units import repeated_layers
from train_loop.preflight.model import check_model
from train_loop.spec import Checkpointing, EverySpec, WrapPolicySpec

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers, about kernels that are not installed
FAMILIES: Sequence[str] = ("qwen3", "gpt2", "mixtral", "gpt_oss")
"""Layers like llama's, layers with biases and dropout, experts, and experts with biases."""
if os.environ.get("MORE"):
    FAMILIES = [one for one, row in read().items() if "results" in row]
KINDS: tuple[Checkpointing, ...] = ("full", "selective", EverySpec(every=2))
ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"
Found = tuple[float, dict[str, Tensor], Counter[str]]


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that counts operations by name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.name()] += 1
        return func(*args, **(kwargs or {}))


def step(
    family: str, how: Checkpointing, *, dtype: torch.dtype = torch.float32, tiles: int = 1, **config: Any
) -> Found:
    """Return the loss of a forward pass, its gradients, and the operations of its backward pass."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**small(family) | config), dtype=dtype)
    anatomy = CAUSAL.anatomy(model.train())
    layers, experts = repeated_layers(anatomy, WrapPolicySpec()), anatomy.experts
    if tiles > 1:
        apply_tiled_mlp(tiled_mlps(anatomy, layers), tiles=tiles)
    if how != "none":
        apply_checkpointing(layers, how, routers=() if experts is None else experts.routers)
    torch.manual_seed(1)
    ids = torch.randint(0, 300, (2, 24))
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    with Operations() as operations:
        loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, operations.counts


def assert_same_bits(ours: Found, expected: Found) -> None:
    assert ours[0] == expected[0]
    assert ours[1].keys() == expected[1].keys()
    assert [name for name, value in expected[1].items() if not torch.equal(ours[1][name], value)] == []


@pytest.mark.parametrize("family", FAMILIES)
def test_every_kind_has_the_bits_of_a_plain_step(family: str) -> None:
    for dtype in (torch.float32, torch.bfloat16) if family in ("qwen3", "gpt2") else (torch.float32,):
        plain = step(family, "none", dtype=dtype)
        for how in KINDS:
            assert_same_bits(step(family, how, dtype=dtype), plain)


def test_dropout_repeats_its_numbers() -> None:
    found = [step("gpt2", how, attn_pdrop=0.5, resid_pdrop=0.5) for how in ("none", "full", "selective")]
    for one in found[1:]:
        assert_same_bits(one, found[0])
    assert found[0][0] != step("gpt2", "none", attn_pdrop=0.0, resid_pdrop=0.0)[0]


def test_selective_repeats_neither_attention_nor_every_second_product() -> None:
    plain, full, selective = (step("qwen3", how)[2] for how in ("none", "full", "selective"))
    layers = small("qwen3")["num_hidden_layers"]
    assert (plain[ATTENTION], full[ATTENTION], selective[ATTENTION]) == (0, layers, 0)
    # Backward of a layer ends its recomputation before the last product, of which it needs only the input.
    assert full["aten::mm"] - plain["aten::mm"] == 6 * layers
    assert selective["aten::mm"] - plain["aten::mm"] == 3 * layers, "k, o and up"


def test_every_n_layers_repeat_the_first_of_each_group() -> None:
    plain, some = (step("qwen3", how, num_hidden_layers=5, layer_types=None)[2] for how in ("none", EverySpec(every=2)))
    assert some[ATTENTION] - plain[ATTENTION] == 3


def test_tiles_keep_no_results() -> None:
    plain, full, selective = (step("qwen3", how, tiles=2) for how in ("none", "full", "selective"))
    assert_same_bits(selective, plain)
    assert full[2]["aten::mm"] - selective[2]["aten::mm"] == 2 * small("qwen3")["num_hidden_layers"], "q and v"


@pytest.mark.parametrize(("dropout", "keeps"), [(0.0, True), (0.1, False)])
def test_attention_that_drops_values_is_repeated(dropout: float, keeps: bool) -> None:
    aten, x = torch.ops.aten, torch.empty(1, 1, 1, 8)
    for kernel, inputs in (
        (aten._scaled_dot_product_flash_attention.default, (x, x, x, dropout)),
        (aten._scaled_dot_product_efficient_attention.default, (x, x, x, None, True, dropout)),
        (aten._scaled_dot_product_cudnn_attention.default, (x, x, x, None, True, dropout, True)),
    ):
        assert KeptResults().keeps(kernel, inputs, {}, x) is keeps
        assert KeptResults().keeps(kernel, (x, x, x), {"dropout_p": dropout}, x) is keeps
        assert KeptResults().keeps(kernel, (x, x, x), {}, x)


def test_products_with_a_bias_count_as_others() -> None:
    policy, aten = KeptResults(), torch.ops.aten
    kinds = (aten.mm.default, aten.addmm.default, aten.add.Tensor, aten._grouped_mm.default, aten.mm.default)
    assert [policy.keeps(one, (), {}, torch.empty(1)) for one in kinds] == [True, False, False, False, True]


@pytest.mark.parametrize(
    ("clip", "how", "refused"), [(8.0, "selective", True), (8.0, "full", False), (None, "selective", False)]
)
def test_results_that_a_layer_changes_in_place_are_refused(clip: float | None, how: str, refused: bool) -> None:
    job = spec(model={"config": small("olmo") | {"clip_qkv": clip}, "gradient_checkpointing": how})
    _, problems = check_model(job, may_read())
    expected = (
        "gradient_checkpointing=selective keeps results of matrix products, and layers of OlmoForCausalLM change some "
        "of them in place; choose full or {every: 2}"
    )
    found = {one.pointer: one.message for one in problems}
    assert found == ({"/model/gradient_checkpointing": expected} if refused else {})


def test_layer_that_changes_a_kept_result_is_an_error() -> None:
    with pytest.raises(ModelError, match=r"aten::clamp_ of a layer changes one in place; choose full or {every: 2}"):
        step("olmo", "selective", clip_qkv=8.0)


def test_layers_that_are_not_recomputed_keep_their_forward() -> None:
    layers = [nn.Linear(2, 2) for _ in range(4)]
    apply_checkpointing(layers, EverySpec(every=3))
    assert ["forward" in vars(one) for one in layers] == [True, False, False, True]


@pytest.mark.parametrize(
    ("model", "strategy", "cause"),
    [
        ({"config": small("mixtral")}, {}, "mixtures of experts"),
        ({}, {"norm_dtype": "fp32"}, "norm_dtype=fp32"),
        ({}, {"precision": {"model.layers.0.mlp": "fp32"}}, "strategy.precision"),
        ({}, {"wrap_policy": {"min_num_params": 1000}}, "a wrap_policy with units inside of layers"),
    ],
)
def test_selective_is_refused_where_layers_have_units_inside(
    model: dict[str, Any], strategy: dict[str, Any], cause: str
) -> None:
    job = spec(model={"gradient_checkpointing": "selective", "dtype": "bf16"} | model, strategy=strategy)
    _, problems = check_model(job, may_read())
    assert [str(one.message) for one in problems] == [
        f"gradient_checkpointing=selective is not supported with {cause}: it needs layers without units inside; "
        "choose full or {every: 2}"
    ]
