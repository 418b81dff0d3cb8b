"""Ranks that share layers (tensor parallelism): equal to transformers' own model on one rank, in every layout."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from tests.families.layouts import folder_with_rows, saved_in_each_layout, train_runs, values_of, wrong
from tests.families.parity import NONE, Case, difference, raw_job, uneven
from tests.families.runs import STEPS, Leg
from tests.support.families.families import small
from tests.support.ranks.gradients import build, divisor, forget_meshes, my_share, random_rows
from tests.support.ranks.ranks import on_ranks
from tests.support.ranks.torchrun import load_checkpoint
from train_loop.checkpoint.digest import digest_checkpoint
from train_loop.checkpoint.export.huggingface import export
from train_loop.checkpoint.files.reader import CheckpointReader
from train_loop.conformance.measure import accumulate_plainly, whole
from train_loop.loop.batch import micro_batches
from train_loop.loop.objectives.token_cross_entropy import LossRule
from train_loop.loop.objectives.vocabulary import VocabularyPart, _SumOfRanks
from train_loop.loop.reduction import PlainReduction
from train_loop.model.families.causal.parallel.tensor import PROVEN
from train_loop.run_dir import ExportWish, RunDir, read_lines
from train_loop.spec import JobSpec, parse

pytestmark = pytest.mark.timeout(7200 if os.environ.get("MORE") else 300)  # a fixture computes all families
KINDS = ("qwen3", "llama", "phi3", "gemma3_text", "olmo2")
FAMILIES = sorted(PROVEN) if os.environ.get("MORE") else KINDS
NO_SHARDS = ("strategy", "sharding_strategy", "NO_SHARD")
RECOMPUTED, OFFLOADED, SELECTED = (("model", "gradient_checkpointing", way) for way in ("full", "offload", "selective"))
TILED, GATHERED = (("strategy", *one) for one in (("apply_tiled_mlp", True), ("reshard_after_forward", False)))
ENDS = ("strategy", "wrap_policy", {"wrap_embeddings": True, "wrap_lm_output": True})
MESHES = (
    Case("fsdp 2 x tp 2", 4, tp_size=2, others=(GATHERED, ENDS, SELECTED)),
    Case("ddp 2 x tp 2, packed", 4, tp_size=2, packed=True, half_untrained=True, others=(NO_SHARDS, RECOMPUTED)),
    Case("sp 2 x tp 2, packed", 4, tp_size=2, ulysses_size=2, packed=True, others=(OFFLOADED, TILED)),
)


def with_keys(case: Case, heads: int) -> Case:
    """Return a case of a model with so many kv heads."""
    few = ("model", "config", {"num_key_value_heads": heads})
    return replace(case, mesh=f"{case.mesh}, {heads} kv heads", others=(*case.others, few))


def has_keys(family: str) -> bool:
    """Return whether a family may have fewer kv heads than heads; youtu has other keys."""
    return "num_key_value_heads" in small(family) and family != "youtu"


CASES = [
    (family, case)
    for number, family in enumerate(FAMILIES)
    for place, case in enumerate(MESHES)
    if os.environ.get("MORE") or number % 3 == place
]
"""Each kind of family on one mesh; with `MORE=1`, every proven family on all."""
FEW_KEYS = [
    ("gemma2", with_keys(MESHES[0], 1)),
    ("qwen2", with_keys(MESHES[2], 1)),
    ("qwen3", with_keys(Case("tp 4", 4, tp_size=4, others=(RECOMPUTED,)), 2)),
    *((family, with_keys(MESHES[0], 1)) for family in FAMILIES if os.environ.get("MORE") and has_keys(family)),
]
"""Models with fewer kv heads than ranks that share layers; with `MORE=1`, every family that has them."""
EIGHT = [
    Case("ddp 2 x fsdp 2 x tp 2", 8, fsdp_size=2, tp_size=2, packed=True),
    with_keys(Case("fsdp 2 x tp 4", 8, tp_size=4, others=(("strategy", "norm_dtype", "fp32"),)), 2),
]

LAYOUTS = {"fsdp 4": 1, "fsdp 2 x tp 2": 2, "tp 4": 4}
PAIRS = [("fsdp 4", "fsdp 2 x tp 2"), ("fsdp 2 x tp 2", "tp 4"), ("tp 4", "fsdp 4")]
"""Layouts in which a checkpoint is saved and loaded; their digests show the rest."""
PACKED = _StridedShard(0, split_factor=2)
"""Placement of a weight of two matrices, of which ranks that share layers have a part each."""
UNEVEN = {"vocab_size": 61, "intermediate_size": 30, "num_attention_heads": 4, "num_key_value_heads": 2}
"""Sizes of which ranks have unequal parts, with fewer kv heads than ranks."""


def differences() -> dict[tuple[str, str], float]:
    """Return the largest relative difference of loss and gradients, by family and mesh."""
    return {(family, case.mesh): difference(family, case, uneven(family)) for family, case in [*CASES, *FEW_KEYS]}


def of_eight() -> list[float]:
    torch.set_num_threads(1)
    forget_meshes()
    return [difference("qwen3", case, NONE) for case in EIGHT]


def losses() -> list[tuple[Tensor, Tensor]]:
    """Return the loss and gradient of whole logits and of parts of the vocabulary, with all its terms."""
    torch.manual_seed(0)
    found = []
    for size in (61, 64, 5):
        logits, labels = torch.randn(9, size, requires_grad=True), torch.randint(0, size, (9,))
        labels[4], weights = -100, torch.rand(9)
        rank, ranks = dist.get_rank(), dist.get_world_size()
        own = slice(rank * -(-size // ranks), (rank + 1) * -(-size // ranks))
        for rule in (LossRule(), LossRule(0.1, 0.01)):
            for each in (None, weights):
                assert dist.group.WORLD is not None
                part = VocabularyPart(dist.group.WORLD, size)
                of_parts = LossRule(rule.label_smoothing, rule.z_loss, vocabulary=part)
                leaf = logits.detach()[:, own].clone().requires_grad_()
                expected, mine = rule.sum(logits, labels, each), of_parts.sum(leaf, labels, each)
                for loss in (expected, mine):
                    torch.autograd.backward(loss)
                assert logits.grad is not None
                assert leaf.grad is not None
                found += [(mine.detach(), expected.detach()), (leaf.grad, logits.grad[:, own].clone())]
                logits.grad = None
    return found


def faulty() -> float:
    """Return the difference if each rank's gradient of the loss is multiplied by their number."""

    def multiplied(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * 2, None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_SumOfRanks, "backward", staticmethod(multiplied))
        return difference("qwen3", MESHES[0], NONE)


def job_of(tp: int, sizes: dict[str, Any], dtype: str = "fp32") -> JobSpec:
    raw = raw_job("qwen3", Case("", 4, tp_size=tp, others=(("model", "dtype", dtype),)), NONE)
    raw["model"]["config"] |= sizes
    raw["training"] |= {"ema_decay": 0.5}
    return parse(raw)


def values_with_matrices(job: JobSpec) -> dict[str, Any]:
    """Return the tensors of a job's checkpoints, and a weight of two matrices of which each rank has parts."""
    values = values_of(job)
    grid = next(one for one in values["model"].values() if isinstance(one, DTensor)).device_mesh
    placements = [Shard(0)] if grid.ndim == 1 else [_StridedShard(0, split_factor=grid.size(1)), PACKED]
    packed = DTensor.from_local(
        torch.zeros(6, 5), grid, placements, run_check=False, shape=torch.Size([24, 5]), stride=(5, 1)
    )
    return values | {"packed": packed}


def layouts(folder: Path, sizes: dict[str, Any]) -> dict[str, Any]:
    """Save in each layout and read in each other; return what is wrong, also in what DCP alone reads."""
    states = {name: values_with_matrices(job_of(tp, sizes)) for name, tp in LAYOUTS.items()}
    found = saved_in_each_layout(folder, states, PAIRS)
    alone = states["fsdp 2 x tp 2"]
    load(alone, storage_reader=CheckpointReader(folder / "fsdp 4"))
    return found | {"alone": wrong(alone)}


def norms(dtype: str) -> tuple[float, float, float, float]:
    """Return loss and norm of a step, the norm of whole gradients, and that with parts of equal ranks counted each."""
    model, loss, mesh = build(job_of(2, {"tie_word_embeddings": True}, dtype))
    rows = random_rows(8, 32, vocab=300, packed=False)
    batch = my_share(rows, mesh)
    mean = accumulate_plainly(loss, micro_batches(batch, 2, loss.anatomy, mesh), divisor(batch, mesh), mesh)
    gradients = [p.grad for p in model.parameters()]
    wholes = torch.stack([whole(one).norm() for one in gradients]).norm()
    squares = torch.stack([one.to_local().norm() for one in gradients if isinstance(one, DTensor)]).square().sum()
    dist.all_reduce(squares)
    return mean.item(), PlainReduction(model, mesh).grad_norm().item(), wholes.item(), squares.sqrt().item()


def everything(folder: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    forget_meshes()
    train_runs(folder, "qwen3", {"whole": [Leg(MESHES[0])], "resumed": [Leg(MESHES[0], stops_at=3), Leg(MESHES[0])]})
    return {
        "differences": differences(),
        "losses": losses(),
        "faulty": faulty(),
        "norms": {dtype: norms(dtype) for dtype in ("bf16", "fp32")},
        "layouts": layouts(folder, UNEVEN | {"tie_word_embeddings": True}),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_with_rows(tmp_path_factory.mktemp("tensor"), 11)


@pytest.fixture(scope="module")
def found(folder: Path) -> list[dict[str, Any]]:
    return on_ranks(4, everything, folder)


@pytest.mark.parametrize(("family", "mesh"), [(family, case.mesh) for family, case in [*CASES, *FEW_KEYS]])
def test_loss_and_gradients_are_those_of_one_rank(found: list[dict[str, Any]], family: str, mesh: str) -> None:
    assert found[0]["differences"][family, mesh] < 1e-5


@pytest.mark.skipif("MORE" not in os.environ, reason="starts eight ranks: `make more` runs it")
def test_eight_ranks_are_one_rank() -> None:
    assert {case.mesh: off for case, off in zip(EIGHT, on_ranks(8, of_eight)[0], strict=True) if not off < 1e-5} == {}


def test_a_factor_of_the_ranks_that_share_layers_is_found(found: list[dict[str, Any]]) -> None:
    assert found[0]["faulty"] > 0.1


def test_bf16_trains_near_fp32(found: list[dict[str, Any]]) -> None:
    bf16, fp32 = (found[0]["norms"][dtype][0] for dtype in ("bf16", "fp32"))
    assert 0 < abs(bf16 - fp32) < 0.01 * fp32


def test_parts_of_the_vocabulary_give_the_loss_of_whole_logits(found: list[dict[str, Any]]) -> None:
    for rank in found:
        for mine, expected in rank["losses"]:
            torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-6)


def test_norm_counts_each_parameter_once(found: list[dict[str, Any]]) -> None:
    _, norm, expected, counted_twice = found[0]["norms"]["fp32"]
    assert norm == pytest.approx(expected, rel=1e-6)
    assert counted_twice > norm * 1.0001, "expected parameters that several ranks have"


def test_checkpoint_of_any_layout_loads_in_any_other(found: list[dict[str, Any]]) -> None:
    layouts = found[0]["layouts"]
    assert layouts["tensors"] > 20
    assert layouts["faults"] == {pair: [] for pair in PAIRS}
    assert len(set(layouts["digests"].values())) == 1


def test_torch_alone_would_read_another_layout_wrongly(found: list[dict[str, Any]]) -> None:
    assert "['packed']" in found[0]["layouts"]["alone"], "`described` is not needed"


@pytest.mark.usefixtures("found")
def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped(folder: Path) -> None:
    starts = [
        one for one in read_lines(RunDir(folder / "resumed").attempt(2).events) if one["event"] == "training_started"
    ]
    assert [start["resumed_from"] for start in starts] == [3]
    whole, resumed = (digest_checkpoint(RunDir(folder / name).checkpoint(STEPS)) for name in ("whole", "resumed"))
    assert resumed.tensors == whole.tensors


@pytest.mark.usefixtures("found")
def test_an_export_has_the_weights_in_the_public_layout(folder: Path) -> None:
    stored = load_file(export(RunDir(folder / "whole"), STEPS, ExportWish(dtype="fp32")) / "model.safetensors")
    weights = load_checkpoint(folder / "whole", STEPS)["model"]
    assert stored.keys() == weights.keys()
    assert all(torch.equal(stored[name], weights[name]) for name in stored)
