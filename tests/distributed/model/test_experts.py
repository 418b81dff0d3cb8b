"""Mixtures of experts on real ranks: losses of routers, idle experts, recomputation, units of experts and fp32 routers.

Each case is compared with a plain loop over transformers' own model and its own auxiliary loss. The first half of the
rows has no labels, so that some data ranks train no token.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.families.routed import BIASES, Balanced, Case, Found, balance, compare, gathered_ahead, precision
from tests.families.table import read
from tests.support.builders.small_runs import LENGTH, STEPS, events, job_of, lines, run
from tests.support.families.families import small
from tests.support.ranks.gradients import forget_meshes
from tests.support.ranks.ranks import ranks_of_any_number
from tests.support.ranks.torchrun import load_tensors, write_tokens
from train_loop.checkpoint.export.huggingface import export
from train_loop.model.families.anatomy import Experts
from train_loop.model.families.causal.family import CAUSAL
from train_loop.run_dir import ExportWish, RunDir
from train_loop.spec import ModelSpec

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers, about kernels that are not installed
AUX = {"router_aux_loss": {"coef": 0.1}, "router_z_loss": 0.01}
BY_DOCUMENT = {"router_aux_loss": {"coef": 0.1, "scope": "sequence"}}
MORE = bool(os.environ.get("MORE"))


def experts_by_family() -> dict[str, Experts]:
    """Return the experts of each mixture that is trained."""
    named = [one for one, row in read().items() if "results" in row and any("expert" in name for name in small(one))]
    found = {family: CAUSAL.build(ModelSpec(config=small(family))).experts for family in named}
    return {family: experts for family, experts in found.items() if experts is not None}


MIXTURES = experts_by_family() if MORE else {}
FAMILIES = [one for one in MIXTURES if one != "minimax"] or ["deepseek_v3"]
"""Mixtures that compute in half precision."""
PLAIN = {"gradient_checkpointing": "none"}
CASES = {
    "aux and z, FSDP, accumulation, recomputation": Case(world=2, training=AUX),
    "aux, HSDP, packed": Case(world=4, strategy={"fsdp_size": 2}, training=AUX, packed=True),
    "aux, Ulysses, padding": Case(world=2, strategy={"ulysses_size": 2}, training=AUX, model=PLAIN),
    "aux by document, Ulysses, packed": Case(world=4, strategy={"ulysses_size": 2}, training=BY_DOCUMENT, packed=True),
    "units of experts, prefetched": Case(
        world=2, strategy={"wrap_policy": {"moe_experts": ["Qwen3MoeMLP"]}, "forward_prefetch": 2}, training=AUX
    ),
    "idle experts, grouped": Case("gpt_oss", world=2, training=AUX, idle=True),
    "idle experts, eager": Case("gpt_oss", world=2, model={"experts_implementation": "eager"}, idle=True),
    "idle experts, correction bias, dense MLPs in tiles": Case(
        "deepseek_v3", world=4, strategy={"fsdp_size": 2, "apply_tiled_mlp": True}, idle=True
    ),
    "experts that ranks do not divide": Case(world=4, config={"num_experts": 6}, training=AUX),
    "frozen routers": Case(
        world=2,
        training=AUX,
        model={"freeze_module_prefix": ["model.layers.0.mlp.gate", "model.layers.1.mlp.gate"]},
    ),
}

if MORE:
    with_loss = [family for family, experts in MIXTURES.items() if experts.auxiliary is not None]
    CASES |= {f"aux, {family}": Case(family, training=AUX) for family in with_loss}


@pytest.fixture(scope="module")
def call_ranks() -> Iterator[Callable[..., Any]]:
    with ranks_of_any_number(4) as call:
        yield call


@pytest.mark.parametrize("name", CASES)
def test_a_step_equals_a_plain_loop(name: str, call_ranks: Callable[..., Any]) -> None:
    case = CASES[name]
    found: Found = call_ranks(case.world, compare, case)
    assert found.error < 1e-5
    assert found.named_error < 1e-5
    assert {sum(layer) for layer in found.loads} == {found.expected_tokens}
    if case.idle:
        assert [sum(layer[2:]) for layer in found.loads] == [0] * len(found.loads)


BALANCED = {"router_bias_update": 0.05}
STILL: dict[str, Any] = {"learning_rate": 1e-30, "weight_decay": 0.0}
"""Weights do not change."""
BALANCES = {
    "HSDP x ep, packed, all layers": Case(
        "deepseek_v3", 4, {"fsdp_size": 2, "ep_size": 2}, STILL, BALANCED, {"first_k_dense_replace": 0}, packed=True
    ),
    "tp x ep": Case("deepseek_v3", 4, {"tp_size": 2, "ep_size": 4}, STILL, BALANCED),
    "Ulysses, padding, a parameter that does not train": Case(
        "ernie4_5_moe", 2, {"ulysses_size": 2}, STILL, BALANCED | {"gradient_checkpointing": "offload"}
    ),
    "accumulation, a frozen router": Case(
        "deepseek_v3",
        1,
        training=STILL,
        model=BALANCED | {"freeze_module_prefix": ["model.layers.0.mlp.gate"]},
        config={"first_k_dense_replace": 0},
    ),
}
if MORE:
    with_bias = [family for family, experts in MIXTURES.items() if experts.corrections]
    BALANCES |= {family: Case(family, 2, training=STILL, model=BALANCED) for family in with_bias}
    BALANCES |= {"tp": Case("ernie4_5_moe", 4, {"tp_size": 2, "ep_size": 4}, STILL, BALANCED)}


@pytest.mark.parametrize("name", BALANCES)
def test_biases_follow_the_loads_of_all_ranks_and_micro_batches(name: str, call_ranks: Callable[..., Any]) -> None:
    """The rows have padding, layers are recomputed, and one of three steps is skipped."""
    case = BALANCES[name]
    found: Balanced = call_ranks(case.world, balance, case)
    assert found.are_equal
    assert found.loads == found.expected_loads
    assert found.biases.keys() == found.expected.keys()
    for bias, expected in found.expected.items():
        assert torch.equal(found.biases[bias].cpu(), expected), bias


BF16 = {"dtype": "bf16"}


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        (Case(world=2, model=BF16), torch.float32),
        (Case(world=2, model=BF16 | {"router_dtype": None}), torch.bfloat16),
        (Case(world=2, model=BF16, strategy={"wrap_policy": {"moe_experts": ["Qwen3MoeExperts"]}}), torch.float32),
        *((Case(family, world=2, model=BF16), torch.float32) for family in FAMILIES),
    ],
)
def test_routers_compute_in_their_dtype(case: Case, dtype: torch.dtype, call_ranks: Callable[..., Any]) -> None:
    assert call_ranks(case.world, precision, case) == (dtype, True)


def test_experts_are_gathered_while_attention_computes(call_ranks: Callable[..., Any]) -> None:
    case = Case(world=2, strategy={"wrap_policy": {"moe_experts": ["Qwen3MoeExperts"]}})
    first, second = ("model.layers.0", "model.layers.1")
    inner, last = (f"{layer}.mlp.experts" for layer in (first, second))
    assert call_ranks(2, gathered_ahead, case) == {
        first: ([inner], [inner]),
        inner: ([second], []),
        second: ([last], [last]),
        last: ([], [first]),
    }


def test_a_published_folder_trains_and_is_exported_bit_equal(tmp_path: Path, call_ranks: Callable[..., Any]) -> None:
    """Weights do not change at a learning rate of 1e-30; the folder's own config asks for the auxiliary loss."""
    # About one in ten million drawn weights is exactly 0, and would change.
    torch.manual_seed(0)
    config = AutoConfig.for_model(**small("qwen3_moe") | {"output_router_logits": True})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "published")
    write_tokens(tmp_path / "d.parquet", rows=24, length=LENGTH, vocab=300)
    call_ranks(2, train_published, tmp_path)
    found = export(RunDir(tmp_path / "run"), STEPS, ExportWish(dtype="fp32"))
    expected = load_file(tmp_path / "published" / "model.safetensors")
    exported = load_file(found / "model.safetensors")
    assert exported.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(exported[name], expected[name])] == []
    _, info = AutoModelForCausalLM.from_pretrained(found, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    assert AutoConfig.from_pretrained(found).output_router_logits is True
    assert len(events(tmp_path / "run", "expert_patch_not_needed")) == 1
    for line in lines(tmp_path / "run"):
        assert line["router_aux_loss"] > 1
        assert [load >= 1 for load in line["expert_load"]] == [True, True]


def test_a_balanced_run_resumes_bit_equal_and_exports_its_biases(
    tmp_path: Path, call_ranks: Callable[..., Any]
) -> None:
    write_tokens(tmp_path / "d.parquet", rows=24, length=LENGTH, vocab=300)
    call_ranks(2, train_balanced, tmp_path)
    whole = load_tensors(tmp_path / "run", STEPS)
    biases = {name: one for name, one in whole.items() if name.endswith(BIASES)}
    shutil.rmtree(RunDir(tmp_path / "run").checkpoint(STEPS))
    call_ranks(2, train_balanced, tmp_path)
    assert [event["resumed_from"] for event in events(tmp_path / "run", "training_started")] == [0, STEPS // 2]
    resumed = load_tensors(tmp_path / "run", STEPS)
    assert [name for name in whole if not torch.equal(resumed[name], whole[name])] == []
    exported = load_file(export(RunDir(tmp_path / "run"), STEPS, ExportWish(dtype="bf16")) / "model.safetensors")
    for name, bias in biases.items():
        assert bias.abs().max() >= 0.01, "expected a move"
        assert torch.equal(exported[name.removeprefix("/model/")], bias), name
    assert biases


def train_balanced(folder: Path) -> None:
    """Train with biases that balance experts, from the newest checkpoint, on the existing ranks."""
    torch.set_num_threads(1)
    forget_meshes()
    model = {"config": small("deepseek_v3"), "router_bias_update": 0.01, "gradient_checkpointing": "full"}
    if dist.get_rank() == 0:
        RunDir(folder / "run").write_spec(job_of(folder / "d.parquet", 2, model=model))
    dist.barrier()
    run(folder / "d.parquet", folder / "run", model=model)


def train_published(folder: Path) -> None:
    """Train the folder `published` for some steps on the existing ranks."""
    torch.set_num_threads(1)
    forget_meshes()
    model = {"path": str(folder / "published"), "config": None}
    parts: dict[str, Any] = {"model": model, "strategy": {"apply_expert_patch": True}}
    training: dict[str, Any] = {"learning_rate": 1e-30, "weight_decay": 0.0}
    if dist.get_rank() == 0:
        RunDir(folder / "run").write_spec(job_of(folder / "d.parquet", 2, **parts, training=training))
    dist.barrier()
    run(folder / "d.parquet", folder / "run", **parts, **training)
