"""Ranks that share layers, with a part of the tokens between projections each (sequence parallelism)."""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from tests.families.parity import LENGTH, NONE, VOCAB, Case, difference, raw_job, uneven
from tests.families.routed import Case as Routed
from tests.families.routed import Found, compare
from tests.families.table import accepted
from tests.support.builders.searches import drawn
from tests.support.builders.specs import may_read
from tests.support.ranks.gradients import build, divisor, forget_meshes, mesh_of, my_share, random_rows
from tests.support.ranks.ranks import on_ranks
from tests.support.ranks.waits import Waits
from train_loop.conformance.measure import accumulate_plainly, measure_memory
from train_loop.errors import ModelError
from train_loop.loop.batch import micro_batches
from train_loop.loop.build import build_state, build_token_loss
from train_loop.model.families.causal.parallel.sequence import Regions
from train_loop.model.families.causal.parallel.tensor import MIXTURES, PROVEN
from train_loop.model.families.causal.parallel.token_parts import SharedParts
from train_loop.parallel.build import build_sharded
from train_loop.plan import plan_job
from train_loop.preflight.model import check_model
from train_loop.spec import JobSpec, parse

Field = tuple[str, str, Any]
SPLIT: Field = ("strategy", "sequence_parallel", True)
NO_SHARDS: Field = ("strategy", "sharding_strategy", "NO_SHARD")
RECOMPUTED, OFFLOADED = (("model", "gradient_checkpointing", way) for way in ("full", "offload"))
TILED: Field = ("strategy", "apply_tiled_mlp", True)
ENDS: Field = ("strategy", "wrap_policy", {"wrap_embeddings": True, "wrap_lm_output": True})
MESHES = (
    Case("fsdp 2 x tp 2", 4, tp_size=2, others=(SPLIT, ENDS)),
    Case("ddp 2 x tp 2, packed", 4, tp_size=2, packed=True, half_untrained=True, others=(SPLIT, NO_SHARDS, RECOMPUTED)),
    Case("sp 2 x tp 2, packed", 4, tp_size=2, ulysses_size=2, packed=True, others=(SPLIT, OFFLOADED, TILED)),
    Case("tp 4", 4, tp_size=4, others=(SPLIT, ("strategy", "norm_dtype", "fp32"))),
)


def with_experts(case: Case) -> Case:
    """Return a case whose ranks share experts, too, which replicas of whole models do not."""
    ep = 4 if case.packed or case.tp_size == 4 else 2
    others = (*(one for one in case.others if one != NO_SHARDS), ("strategy", "ep_size", ep))
    return replace(case, mesh=f"{case.mesh.replace('ddp', 'fsdp')}, ep {ep}", others=others)


def cases_of(family: str, cases: Sequence[Case]) -> list[tuple[str, Case]]:
    """Return the cases of a family that it accepts; a mixture shares experts."""
    own = accepted(family, map(with_experts, cases)) if family in MIXTURES else cases
    return [(family, case) for case in own]


FAMILIES = sorted(PROVEN | MIXTURES)
MORE = bool(os.environ.get("MORE"))
pytestmark = pytest.mark.timeout(7200 if MORE else 300)  # a fixture computes all families
CASES = [
    one
    for place, family in enumerate(drawn(FAMILIES, len(MESHES)))
    for one in cases_of(family, MESHES if MORE else MESHES[place : place + 1])
]
"""A family on each mesh, which each commit draws from those with `tp_size`; with `MORE=1`, all on all meshes."""
ROUTED = {
    "aux and z": Routed(
        world=4,
        strategy={"tp_size": 2, "ep_size": 4, "sequence_parallel": True},
        training={"router_aux_loss": {"coef": 0.1}, "router_z_loss": 0.01},
    ),
    "aux by document, Ulysses": Routed(
        world=4,
        strategy={"tp_size": 2, "ep_size": 2, "ulysses_size": 2, "sequence_parallel": True},
        training={"router_aux_loss": {"coef": 0.1, "scope": "sequence"}, "router_z_loss": 0.01},
        packed=True,
    ),
}
"""Losses of routers that see a part of the tokens."""
LAYERS, TOKENS = 6, 128


def differences() -> dict[tuple[str, str], float]:
    """Return the largest relative difference of loss and gradients, by family and mesh."""
    return {
        (family, case.mesh): difference(family, case, NONE if family in MIXTURES else uneven(family))
        for family, case in CASES
    }


def without_sum() -> float:
    """Return the difference if each rank keeps only the gradient of its tokens for a norm."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Regions, "has_part", lambda *_: False)
        return difference("qwen3", MESHES[0], NONE)


def without_exchange() -> str:
    """Return the error of a forward pass whose ranks neither take parts nor exchange them."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("own", "gather", "sum"):
            patch.setattr(SharedParts, name, lambda _, states: states)
        try:
            difference("qwen3", MESHES[0], NONE)
        except ModelError as error:
            return str(error)
    return ""


class Step(NamedTuple):
    """Observations of a rank in a step of one micro-batch."""

    tokens: set[int]
    """Numbers of tokens of the inputs of layers and norms."""
    waits: list[bool]
    """True for each exchange of the ranks that share layers at which the timer has stopped."""
    exchanges: Counter[str]
    """Exchanges by kind."""
    seconds: float


def step() -> Step:
    """Return the observations of a rank in a step of a model of two layers."""
    job = parse(raw_job("qwen3", MESHES[0], uneven("qwen3")))
    mesh = mesh_of(job)
    sharded = build_sharded(job, mesh)
    objective, tokens = build_token_loss(sharded, job, plan_of(job)), set[int]()
    norms = [one for one in sharded.anatomy.norms if one.get_parameter("weight").shape[0] == job_width(job)]
    for one in (*sharded.anatomy.layers[1:], *norms):
        one.register_forward_pre_hook(lambda _, inputs: tokens.add(inputs[0].shape[1]))
    assert mesh.tp is not None
    waits = Waits(mesh.tp.get_group().group_name, sharded.timer)
    rows = my_share(random_rows(2 * mesh.plan.dp, LENGTH, vocab=VOCAB, packed=False), mesh)
    with waits:
        accumulate_plainly(objective, micro_batches(rows, 2, sharded.anatomy, mesh), 1, mesh)
    assert all(waits.computed), "the timer stops too long"
    return Step(tokens, waits.stopped, waits.kinds, sharded.timer.take())


def job_width(job: JobSpec) -> int:
    assert job.model.config is not None
    width: int = job.model.config["hidden_size"]
    return width


def plan_of(job: JobSpec) -> Any:
    shape, problems = check_model(job, may_read())
    assert problems == []
    assert shape is not None
    return plan_job(job, shape)


class Bytes(NamedTuple):
    """The bytes of activations by the plan, and those of a rank at the peak of a step."""

    planned: int
    peak: int


def bytes_of(checkpointing: str, *others: Field) -> Bytes:
    """Return the bytes of a model whose activations are larger than its weights."""
    config: dict[str, Any] = {"num_hidden_layers": LAYERS, "layer_types": ["full_attention"] * LAYERS}
    config |= {"num_key_value_heads": 4, "max_position_embeddings": TOKENS}
    more = (
        ("model", "config", config),
        ("data", "sequence_length", TOKENS),
        ("model", "gradient_checkpointing", checkpointing),
        *others,
    )
    job = parse(raw_job("qwen3", Case("", 4, tp_size=4, others=more), NONE))
    mesh, plan = mesh_of(job), plan_of(job)
    sharded = build_sharded(job, mesh)
    state, objective = build_state(sharded.anatomy, job, mesh, steps=2), build_token_loss(sharded, job, plan)
    batch = my_share(random_rows(2, TOKENS, vocab=VOCAB, packed=False), mesh)
    found = measure_memory(
        state, objective, lambda: micro_batches(batch, 2, sharded.anatomy, mesh), divisor(batch, mesh), mesh
    )
    planned = sum(term.bytes for term in plan.memory if term.name == "activations")
    return Bytes(planned, found.peak)


def bf16() -> list[float]:
    """Return the losses of a step in bf16 and fp32."""
    found = []
    for dtype in ("bf16", "fp32"):
        model, loss, mesh = build(
            parse(raw_job("qwen3", replace(MESHES[0], others=(SPLIT, ("model", "dtype", dtype))), NONE))
        )
        assert isinstance(model, nn.Module)
        batch = my_share(random_rows(8, LENGTH, vocab=VOCAB, packed=False), mesh)
        mean = accumulate_plainly(loss, micro_batches(batch, 2, loss.anatomy, mesh), divisor(batch, mesh), mesh)
        found.append(mean.item())
    return found


def everything() -> dict[str, Any]:
    torch.set_num_threads(1)
    forget_meshes()
    return {
        # The first, because torch remembers meshes: later sums may use the group of an equal one, which is not counted.
        "step": step(),
        "differences": differences(),
        "without sum": without_sum(),
        "without exchange": without_exchange(),
        "bf16": bf16(),
        "bytes": {way: (bytes_of(way), bytes_of(way, SPLIT)) for way in ("none", "full")},
        # Each comparison forgets the meshes of those before.
        "routed": {name: compare(case) for name, case in ROUTED.items()},
    }


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return on_ranks(4, everything)


@pytest.mark.parametrize(("family", "mesh"), [(family, case.mesh) for family, case in CASES])
def test_loss_and_gradients_are_those_of_one_rank(found: list[dict[str, Any]], family: str, mesh: str) -> None:
    assert found[0]["differences"][family, mesh] < 1e-5


@pytest.mark.parametrize("name", ROUTED)
def test_losses_of_routers_are_those_of_one_rank(found: list[dict[str, Any]], name: str) -> None:
    routed: Found = found[0]["routed"][name]
    assert routed.error < 1e-5
    assert routed.named_error < 1e-5
    assert {sum(layer) for layer in routed.loads} == {routed.expected_tokens}


def test_a_gradient_of_a_norm_that_is_not_summed_is_found(found: list[dict[str, Any]]) -> None:
    assert found[0]["without sum"] > 0.1


def test_ranks_that_do_not_split_the_tokens_are_an_error(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert f"has states of {LENGTH} tokens instead of a part of {LENGTH}" in rank["without exchange"]


def test_layers_and_norms_see_a_part_of_the_tokens(found: list[dict[str, Any]]) -> None:
    assert [rank["step"].tokens for rank in found] == [{LENGTH // 2}] * 4


def test_ranks_exchange_what_the_formula_says_and_their_timers_stop(found: list[dict[str, Any]]) -> None:
    for rank in found:
        # Attention and MLP of two layers gather and scatter, forward and backward, and gather their input again. The
        # end of the layers gathers, and so does backward of their start.
        assert rank["step"].exchanges["all_gather_into_tensor"] == 2 * 2 * 3 + 2
        assert rank["step"].exchanges["reduce_scatter_tensor"] == 2 * 2 * 2
        # The embeddings are summed, and the gradients of four norms of heads and five of states.
        assert rank["step"].exchanges["all_reduce"] == 1 + 4 + 5
        # FSDP2 sums those of its root, here of the final norm, after the backward pass, while the timer runs.
        assert all(rank["step"].waits[:-1])
        assert rank["step"].seconds > 0


def test_bf16_trains_near_fp32(found: list[dict[str, Any]]) -> None:
    bf16, fp32 = found[0]["bf16"]
    assert 0 < abs(bf16 - fp32) < 0.01 * fp32


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_memory_is_saved_as_planned(found: list[dict[str, Any]], checkpointing: str) -> None:
    whole, split = found[0]["bytes"][checkpointing]
    planned, saved = whole.planned - split.planned, whole.peak - split.peak
    assert planned > 0.4 * whole.planned
    # The formula leaves out what norms keep between their input and output.
    assert 0.6 * planned < saved < 2 * planned
