"""FSDP2 units for a strategy's settings: their parameters, gathers, resharding and offloading."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule

from tests.support.builders.specs import TINY, spec
from tests.support.ranks.gradients import build, my_share, random_rows
from tests.support.ranks.ranks import on_ranks
from train_loop.conformance.measure import accumulate_plainly
from train_loop.loop.batch import MicroBatch, micro_batches

LAYERS = [f"model.layers.{n}" for n in range(2)]
HALVES = [f"{layer}.{half}" for layer in LAYERS for half in ("self_attn", "mlp")]
NORMS = [
    f"{layer}{norm}"
    for layer in LAYERS
    for norm in ("", ".self_attn.q_norm", ".self_attn.k_norm", ".input_layernorm", ".post_attention_layernorm")
]
EMBEDDINGS, HEAD = "model.embed_tokens", "lm_head"
FINER = {"transformer_layer_cls_to_wrap": ["Qwen3Attention", "Qwen3MLP"]}
NORM = "Qwen3RMSNorm"
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "prefetch": {"forward_prefetch": 2, "backward_prefetch": 2},
    "prefetch finer": {"forward_prefetch": 2, "backward_prefetch": 2, "wrap_policy": FINER},
    "reshard true": {"reshard_after_forward": True},
    "reshard false": {"reshard_after_forward": False},
    "reshard to 2": {"reshard_after_forward": 2},
    "norms": {"norm_dtype": "fp32", "wrap_policy": {"transformer_layer_cls_to_wrap": ["Qwen3DecoderLayer", NORM]}},
    "offload": {"offload_policy": True},
    "embeddings": {"wrap_policy": {"wrap_lm_output": False}},
    "head": {"wrap_policy": {"wrap_embeddings": False}},
    "layers": {"wrap_policy": {"wrap_embeddings": False, "wrap_lm_output": False}},
    "uncast inputs": {"cast_forward_inputs": False},
}


def describe(strategy: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return every unit by name with its FSDP2 settings, which have no public getters."""
    config = TINY | {"tie_word_embeddings": False}
    model, *_ = build(spec(model={"config": config}, strategy=strategy, scaling={"num_workers": dist.get_world_size()}))
    states = {n: m._get_fsdp_state() for n, m in model.named_modules() if isinstance(m, FSDPModule)}
    names = {state: name for name, state in states.items()}
    found = {}
    for name, state in states.items():
        if (group := state._fsdp_param_group) is None:
            # The other units have all parameters of the model.
            assert name == ""
            continue
        kept = group.post_forward_mesh_info
        found[name] = {
            "forward": [names[s] for s in state._states_to_forward_prefetch],
            "backward": [names[s] for s in state._states_to_backward_prefetch],
            "spread after forward over": None if kept is None else kept.shard_mesh_size,
            "offloaded": isinstance(group.offload_policy, CPUOffloadPolicy),
            "gradients divided by": group.gradient_divide_factor,
            "casts inputs": group.mp_policy.cast_forward_inputs,
            "gathered in backward": group.unshard_in_backward,
        }
    return found


def all_cases() -> dict[str, dict[str, dict[str, Any]]]:
    return {name: describe(strategy) for name, strategy in CASES.items()}


def step_of_two(strategy: dict[str, Any]) -> tuple[list[list[str]], list[bool]]:
    """Return what is true when a step requests each of two micro-batches, and after it.

    These are the units whose gathers run, and whether there are reduced gradients.
    """
    model, loss, mesh = build(spec(strategy=strategy, scaling={"num_workers": dist.get_world_size()}))
    batch = my_share(random_rows(4, 32, vocab=TINY["vocab_size"], packed=True), mesh)
    units = {name: module for name, module in model.named_modules() if isinstance(module, FSDPModule)}
    gathers, reduced = list[list[str]](), list[bool]()

    def note() -> None:
        groups = {name: unit._get_fsdp_state()._fsdp_param_group for name, unit in units.items()}
        gathers.append([name for name, group in groups.items() if group and group._all_gather_result])
        reduced.append(any(parameter.grad is not None for parameter in model.parameters()))

    def watched() -> Iterator[MicroBatch]:
        for one in micro_batches(batch, 1, loss.anatomy, mesh):
            note()
            yield one

    accumulate_plainly(loss, watched(), 1, mesh, once=strategy.get("gradient_sync") == "last")
    note()
    return gathers, reduced


def steps_of_two() -> list[tuple[list[list[str]], list[bool]]]:
    return [step_of_two({}), step_of_two(CASES["layers"] | {"gradient_sync": "last"})]


def test_each_micro_batch_finds_its_first_units_gathered_and_gradients_are_reduced_as_chosen() -> None:
    every, last = on_ranks(2, steps_of_two)[0]
    assert every == ([["", EMBEDDINGS], ["", EMBEDDINGS], []], [False, True, True])
    assert last == ([[""], [""], []], [False, False, True])


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, dict[str, Any]]]:
    described: dict[str, dict[str, dict[str, Any]]] = on_ranks(4, all_cases)[0]
    return described


@pytest.mark.parametrize(
    ("case", "units"),
    [
        ("plain", ["", EMBEDDINGS, *LAYERS, HEAD]),
        ("prefetch finer", ["", EMBEDDINGS, *HALVES, HEAD]),
        ("embeddings", ["", EMBEDDINGS, *LAYERS]),
        ("head", ["", *LAYERS, HEAD]),
        ("layers", ["", *LAYERS]),
        ("norms", [EMBEDDINGS, *NORMS, "model.norm", HEAD]),
    ],
)
def test_units_follow_the_wrap_policy(found: Any, case: str, units: list[str]) -> None:
    assert list(found[case]) == units


@pytest.mark.parametrize(("case", "units"), [("prefetch", LAYERS), ("prefetch finer", HALVES)])
def test_each_unit_prefetches_the_next_two(found: Any, case: str, units: list[str]) -> None:
    for place, name in enumerate(units):
        assert found[case][name]["forward"] == units[place + 1 : place + 3]
        assert found[case][name]["backward"] == units[max(place - 2, 0) : place][::-1]


@pytest.mark.parametrize(
    ("case", "ranks"), [("plain", 4), ("reshard true", 4), ("reshard false", None), ("reshard to 2", 2)]
)
def test_layers_stay_gathered_after_forward_on_request(found: Any, case: str, ranks: int | None) -> None:
    assert {found[case][layer]["spread after forward over"] for layer in LAYERS} == {ranks}


@pytest.mark.parametrize(("case", "ranks"), [("plain", None), ("reshard true", 4), ("reshard to 2", 2)])
def test_head_stays_gathered_for_backward_which_begins_with_it(found: Any, case: str, ranks: int | None) -> None:
    assert found[case][HEAD]["spread after forward over"] == ranks


def test_only_embeddings_are_not_gathered_for_backward_which_does_not_read_them(found: Any) -> None:
    assert [name for name, unit in found["plain"].items() if not unit["gathered in backward"]] == [EMBEDDINGS]


@pytest.mark.parametrize(("case", "offloaded"), [("plain", False), ("offload", True)])
def test_all_units_or_none_are_offloaded(found: Any, case: str, offloaded: bool) -> None:
    assert {unit["offloaded"] for unit in found[case].values()} == {offloaded}


@pytest.mark.parametrize(("case", "casts"), [("plain", True), ("uncast inputs", False)])
def test_all_units_or_none_cast_their_inputs(found: Any, case: str, casts: bool) -> None:
    assert {unit["casts inputs"] for unit in found[case].values()} == {casts}


def test_single_rank_does_not_divide_its_gradients(found: Any) -> None:
    # FSDP2 divides them out of place if it reduces nothing and a factor is set.
    assert {unit["gradients divided by"] for unit in on_ranks(1, describe, {})[0].values()} == {None}
    assert {unit["gradients divided by"] for unit in found["plain"].values()} == {1.0}
