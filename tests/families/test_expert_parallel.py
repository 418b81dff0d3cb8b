"""Ranks that share experts (expert parallelism): equal to transformers' own model on one rank, in every layout."""

import os
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from tests.families.layouts import folder_with_rows, saved_in_each_layout, train_runs, values_of
from tests.families.parity import NONE, Case, difference, raw_job
from tests.families.routed import Case as Routed
from tests.families.routed import Found, compare
from tests.families.runs import STEPS, Leg
from tests.families.table import accepted
from tests.support.builders.searches import SEED
from tests.support.ranks.gradients import build, divisor, forget_meshes, my_share, random_rows
from tests.support.ranks.ranks import on_ranks
from tests.support.ranks.torchrun import load_checkpoint
from train_loop.checkpoint.digest import digest_checkpoint
from train_loop.checkpoint.export.huggingface import export
from train_loop.conformance.measure import accumulate_plainly, whole
from train_loop.errors import ModelError
from train_loop.loop.batch import micro_batches
from train_loop.loop.reduction import PlainReduction
from train_loop.model.families.causal.parallel.expert import PROVEN, Exchange
from train_loop.model.families.causal.parallel.tensor import MIXTURES
from train_loop.parallel import shard
from train_loop.run_dir import ExportWish, RunDir, read_lines
from train_loop.spec import JobSpec, parse

MORE = bool(os.environ.get("MORE"))
pytestmark = pytest.mark.timeout(7200 if MORE else 300)  # a fixture computes all families
KINDS = ("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "olmoe", "qwen2_moe")
FAMILIES = sorted(PROVEN) if MORE else KINDS
RECOMPUTED, OFFLOADED = (("model", "gradient_checkpointing", way) for way in ("full", "offload"))
GATHERED, TILED = (("strategy", *one) for one in (("reshard_after_forward", False), ("apply_tiled_mlp", True)))


def shared(mesh: str, ep: int, **parts: Any) -> Case:
    """Return a case of four ranks, `ep` of which share experts."""
    others = (("strategy", "ep_size", ep), *parts.pop("others", ()))
    return Case(mesh, 4, others=others, **parts)


MESHES = (
    shared("efsdp 2 x ep 2", 2, others=(GATHERED,)),
    shared("ep 4, packed", 4, packed=True, half_untrained=True, others=(RECOMPUTED,)),
    shared("ddp 2 x ep 2, packed", 2, fsdp_size=2, packed=True, others=(OFFLOADED,)),
    shared("sp 2 x ep 4", 4, ulysses_size=2, others=(TILED,)),
    shared("tp 2 x ep 2", 2, tp_size=2),
    shared("tp 2 x ep 4, packed", 4, tp_size=2, packed=True, half_untrained=True, others=(RECOMPUTED, TILED)),
)


def cases_of(family: str, place: int) -> list[Case]:
    """Return a mesh for a kind of family; with `MORE=1`, each mesh that the family accepts."""
    if not MORE:
        return [MESHES[place]]
    return accepted(family, [case for case in MESHES if case.tp_size == 1 or family in MIXTURES])


CASES = [(family, case) for place, family in enumerate(FAMILIES) for case in cases_of(family, place)]
AUX = {"router_aux_loss": {"coef": 0.1}, "router_z_loss": 0.01}
ROUTED = {
    "aux and z": Routed(world=4, strategy={"ep_size": 2}, training=AUX),
    "aux by document, Ulysses": Routed(
        world=4,
        strategy={"ep_size": 4, "ulysses_size": 2},
        training={"router_aux_loss": {"coef": 0.1, "scope": "sequence"}},
        packed=True,
    ),
    "idle experts": Routed("gpt_oss", world=4, strategy={"ep_size": 4}, training=AUX, idle=True),
    "idle experts, eager": Routed(
        "deepseek_v3", world=4, strategy={"ep_size": 4}, model={"experts_implementation": "eager"}, idle=True
    ),
}
FROZEN = [f"model.layers.1.mlp.{part}" for part in ("gate", "experts")]
SETTINGS = {
    "adafactor, offload": (("training", "optimizer", "adafactor"), ("strategy", "offload_policy", True)),
    "frozen, fp16": (("model", "freeze_module_prefix", FROZEN), ("model", "dtype", "fp16")),
    "lion, groups": (
        ("training", "optimizer", "lion"),
        ("training", "groups", [{"params": ["*.experts", "*.gate"], "lr_scale": 0.5, "betas": [0.8, 0.9]}]),
        ("training", "layer_decay", 0.8),
    ),
    "sgd, bf16": (("training", "optimizer", "sgd"), ("model", "dtype", "bf16"), ("strategy", "norm_dtype", "fp32")),
}
"""Settings of whole runs with and without shared experts, of which each commit draws one."""
DRAWN = [*SETTINGS] if MORE else [random.Random(SEED).choice([*SETTINGS])]
LAYOUTS = {"fsdp 4": (1, 1), "efsdp 2 x ep 2": (1, 2), "ep 4": (1, 4), "fsdp 2 x tp 2, ep 4": (2, 4)}
"""`tp_size` and `ep_size` of each."""
PAIRS = [*pairwise([*LAYOUTS, "fsdp 4"])]
"""Layouts in which a checkpoint is saved and loaded; their digests show the rest."""


def job_of(tp: int, ep: int) -> JobSpec:
    raw = raw_job("qwen3_moe", shared("", ep, tp_size=tp), NONE)
    raw["training"] |= {"ema_decay": 0.5}
    return parse(raw)


def faulty() -> float:
    """Return the difference if gradients of experts are multiplied by the ranks that share them."""
    whole_sum = shard._sum_gradients

    def multiplied(unit: FSDPModule) -> None:
        whole_sum(unit)
        if "Experts" in type(unit).__name__:
            unit.set_gradient_divide_factor(0.5)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard, "_sum_gradients", multiplied)
        return difference("qwen3_moe", MESHES[0], NONE)


def norms() -> tuple[float, float, float]:
    """Return the norm of a step's gradients, that of whole ones, and that with experts counted on each of ep ranks."""
    model, loss, mesh = build(job_of(1, 2))
    batch = my_share(random_rows(8, 32, vocab=300, packed=False), mesh)
    accumulate_plainly(loss, micro_batches(batch, 2, loss.anatomy, mesh), divisor(batch, mesh), mesh)
    gradients = [p.grad for p in model.parameters()]
    wholes = torch.stack([whole(one).norm() for one in gradients]).norm()
    meshes = {one.device_mesh for one in gradients if isinstance(one, DTensor)}
    assert len(meshes) == 2, "expected experts on a mesh of their own"
    experts = [one for one in gradients if isinstance(one, DTensor) and one.device_mesh.ndim == 2]
    twice = wholes.square() + torch.stack([whole(one).norm() for one in experts]).square().sum()
    return PlainReduction(model, mesh).grad_norm().item(), wholes.item(), twice.sqrt().item()


def without_exchange() -> str:
    """Return the error if experts compute the tokens of their own rank only."""
    _, loss, mesh = build(job_of(1, 4))
    batch = my_share(random_rows(8, 32, vocab=300, packed=False), mesh)
    micro = micro_batches(batch, 2, loss.anatomy, mesh)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Exchange, "__call__", lambda self, hidden, *_: hidden)
        with pytest.raises(ModelError) as raised:
            accumulate_plainly(loss, micro, 1.0, mesh)
    return str(raised.value)


def everything(folder: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    forget_meshes()
    run = shared("ep 2", 2)
    resized = [Leg(run, stops_at=2), Leg(Case("fsdp 4", 4), stops_at=4), Leg(shared("tp 2 x ep 4", 4, tp_size=2))]
    train_runs(
        folder,
        "qwen3_moe",
        {"whole": [Leg(run)], "resumed": [Leg(run, stops_at=3), Leg(run)], "resized": resized},
    )
    for name in DRAWN:
        runs = {f"{name}, ep {ep}": [Leg(shared(f"ep {ep}", ep, others=SETTINGS[name]))] for ep in (1, 2)}
        train_runs(folder, "qwen3_moe", runs)
    found = {
        "differences": {(family, case.mesh): difference(family, case, NONE) for family, case in CASES},
        "faulty": faulty(),
        "norms": norms(),
        "without exchange": without_exchange(),
        "layouts": saved_in_each_layout(
            folder, {name: values_of(job_of(*sizes)) for name, sizes in LAYOUTS.items()}, PAIRS
        ),
    }
    # Each comparison forgets the meshes of those before.
    return found | {"routed": {name: compare(case) for name, case in ROUTED.items()}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_with_rows(tmp_path_factory.mktemp("experts"), 11)


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, Any]:
    first: dict[str, Any] = on_ranks(4, everything, folder)[0]
    return first


@pytest.mark.parametrize(("family", "mesh"), [(family, case.mesh) for family, case in CASES])
def test_loss_and_gradients_are_those_of_one_rank(found: dict[str, Any], family: str, mesh: str) -> None:
    assert found["differences"][family, mesh] < 1e-5


@pytest.mark.parametrize("name", ROUTED)
def test_losses_of_routers_are_those_of_one_rank(found: dict[str, Any], name: str) -> None:
    routed: Found = found["routed"][name]
    assert routed.error < 1e-5
    assert routed.named_error < 1e-5
    assert {sum(layer) for layer in routed.loads} == {routed.expected_tokens}


def test_a_factor_of_the_ranks_that_share_experts_is_found(found: dict[str, Any]) -> None:
    assert found["faulty"] > 0.1


def test_norm_counts_each_parameter_once(found: dict[str, Any]) -> None:
    norm, expected, counted_twice = found["norms"]
    assert norm == pytest.approx(expected, rel=1e-6)
    assert counted_twice > norm * 1.0001


def test_a_call_without_exchange_is_an_error(found: dict[str, Any]) -> None:
    assert found["without exchange"] == (
        "Qwen3MoeExperts computed without an exchange of tokens between the ranks that share its experts; choose "
        "ep_size: 1"
    )


def test_checkpoint_of_any_layout_loads_in_any_other(found: dict[str, Any]) -> None:
    layouts = found["layouts"]
    assert layouts["tensors"] > 20
    assert layouts["faults"] == {pair: [] for pair in PAIRS}
    assert len(set(layouts["digests"].values())) == 1


@pytest.mark.usefixtures("found")
def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped(folder: Path) -> None:
    whole, resumed = (digest_checkpoint(RunDir(folder / name).checkpoint(STEPS)) for name in ("whole", "resumed"))
    assert resumed.tensors == whole.tensors


@pytest.mark.usefixtures("found")
def test_a_run_resumes_in_other_layouts(folder: Path) -> None:
    lines = {
        name: {line["step"]: line["loss"] for attempt in (1, 2, 3) for line in lines_of(folder / name, attempt)}
        for name in ("whole", "resized")
    }
    assert lines["resized"] == pytest.approx(lines["whole"], rel=1e-5)


@pytest.mark.usefixtures("found")
@pytest.mark.parametrize("name", DRAWN)
def test_settings_change_nothing_but_roundings(folder: Path, name: str) -> None:
    whole, shared = (
        [(line["loss"], line["grad_norm"]) for line in lines_of(folder / f"{name}, ep {ep}", 1)] for ep in (1, 2)
    )
    assert len(whole) == STEPS
    for one, other in zip(whole, shared, strict=True):
        assert other == pytest.approx(one, rel=1e-5 if "16" not in name else 1e-3)


def lines_of(run: Path, attempt: int) -> list[dict[str, Any]]:
    file = RunDir(run).attempt(attempt).metrics
    return list(read_lines(file)) if file.exists() else []


@pytest.mark.usefixtures("found")
def test_an_export_has_the_weights_in_the_public_layout(folder: Path) -> None:
    stored = load_file(export(RunDir(folder / "whole"), STEPS, ExportWish(dtype="fp32")) / "model.safetensors")
    weights = load_checkpoint(folder / "whole", STEPS)["model"]
    fused = weights["model.layers.0.mlp.experts.down_proj"]
    for number, expert in enumerate(fused):
        assert torch.equal(stored[f"model.layers.0.mlp.experts.{number}.down_proj.weight"], expert)


@pytest.mark.skipif(not MORE, reason="starts eight ranks: `make more` runs it")
def test_replicas_of_shards_of_experts_are_one_rank() -> None:
    case = Case("ddp 2 x efsdp 2 x ep 2", 8, fsdp_size=4, packed=True, others=(("strategy", "ep_size", 2),))
    assert on_ranks(8, difference, "qwen3_moe", case, NONE)[0] < 1e-5
