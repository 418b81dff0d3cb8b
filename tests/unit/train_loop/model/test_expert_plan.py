"""Expert parallelism: its mesh, its memory, and the jobs that it is refused for, each with a remedy."""

from typing import Any

import pytest

from tests.support.builders.specs import TINY, may_read, raw_spec, spec
from tests.support.families.families import small
from train_loop.plan import Plan, groups_across_hosts, lay_out, plan_job, plan_mesh, why_split
from train_loop.preflight.model import check_model
from train_loop.spec import JobSpec, ScalingSpec, SpecError, StrategySpec, parse


@pytest.mark.parametrize(
    ("part", "setting", "field", "found"),
    [
        (
            "training",
            {"reproducible": "any_size", "global_batch_size": 8},
            "reproducible",
            "training.reproducible=any_size",
        ),
        ("training", {"optimizer": "adamw_8bit"}, "optimizer", "training.optimizer=adamw_8bit"),
        ("strategy", {"wrap_policy": {"min_num_params": 100}}, "wrap_policy/min_num_params", "min_num_params=100"),
        ("strategy", {"reshard_after_forward": 2}, "reshard_after_forward", "reshard_after_forward=2"),
        ("strategy", {"sharding_strategy": "NO_SHARD"}, "sharding_strategy", "sharding_strategy: NO_SHARD"),
    ],
)
def test_unproven_settings_are_refused_at_their_field(
    part: str, setting: dict[str, Any], field: str, found: str
) -> None:
    raw = raw_spec(strategy={"ep_size": 2}, scaling={"num_workers": 4})
    raw[part] = raw.get(part, {}) | setting
    with pytest.raises(SpecError) as error:
        parse(raw)
    assert [(one.pointer, one.message) for one in error.value.problems] == [
        (f"/{part}/{field}", f"{found} is not proven with ep_size=2; change it, or choose ep_size=1")
    ]


def test_each_unproven_setting_is_listed() -> None:
    raw = raw_spec(strategy={"ep_size": 2, "tp_size": 2, "reshard_after_forward": 2}, scaling={"num_workers": 4})
    raw["training"] |= {"optimizer": "adamw_8bit"}
    with pytest.raises(SpecError) as error:
        parse(raw)
    fields = ["/strategy/reshard_after_forward", "/training/optimizer"]
    assert [one.pointer for one in error.value.problems] == 2 * fields


def test_mesh_of_experts_has_the_ranks_that_share_them_innermost() -> None:
    mesh = plan_mesh(world=16, fsdp_size=4, ulysses_size=2, tp_size=2, ep_size=4)
    assert mesh.axes == {"ddp": 2, "fsdp": 4, "tp": 2, "sp": 2, "efsdp": 2, "ep": 4}
    assert [(axis.name, axis.size, axis.stride) for axis in mesh.experts] == [
        ("ddp", 2, 8),
        ("efsdp", 2, 4),
        ("ep", 4, 1),
    ]
    assert groups_across_hosts(mesh, [*"aaaaaabbbbbbbbbb"], "expert") == {range(4, 8): ("a", "b")}
    assert groups_across_hosts(plan_mesh(world=4, fsdp_size=0, ulysses_size=1), [*"abab"], "expert") == {}


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (
            {"ep_size": 3},
            "ep_size=3 must divide the workers of a copy of the model, fsdp x tp = 8; choose 1, 2, 4 or 8, or another "
            "number of workers",
        ),
        (
            {"ep_size": 2, "tp_size": 4},
            "ep_size=2 must divide the workers of a copy of the model, fsdp x tp = 8, and be a multiple of tp_size=4; "
            "choose 4 or 8, or another number of workers",
        ),
        (
            {"ep_size": 4, "efsdp_size": 4},
            "efsdp_size=4 contradicts ep_size=4: the 8 workers that hold a copy of the model are efsdp x ep, so efsdp "
            "is 2; remove efsdp_size, or change ep_size",
        ),
        (
            {"ep_size": 8, "fsdp_size": 4},
            "ep_size=8 must divide the workers of a copy of the model, fsdp x tp = 4; choose 1, 2 or 4, or another "
            "number of workers",
        ),
    ],
)
def test_sizes_that_do_not_fit_are_refused(strategy: dict[str, int], message: str) -> None:
    with pytest.raises(SpecError) as error:
        plan(strategy)
    assert [(one.pointer, one.message) for one in error.value.problems] == [
        (f"/strategy/{message.partition('=')[0]}", message)
    ]


def job_of(config: dict[str, Any], **strategy: int) -> JobSpec:
    return spec(
        model={"config": config, "gradient_checkpointing": "full"},
        strategy=strategy,
        scaling={"num_workers": 8},
        training={"global_batch_size": 8},
    )


def plan(strategy: dict[str, int]) -> Plan:
    job = job_of(small("qwen3_moe"), **strategy)
    shape = check_model(job.model_copy(update={"strategy": spec().strategy}), may_read())[0]
    assert shape is not None
    return plan_job(job, shape)


def test_a_worker_gathers_its_experts_only() -> None:
    alone, shared = ({term.name: term for term in plan({"ep_size": ep}).memory} for ep in (1, 4))
    for name in ("parameters", "gradients", "optimizer"):
        assert shared[name].bytes == alone[name].bytes
    assert shared["gathered_parameters"].bytes < alone["gathered_parameters"].bytes
    assert shared["gathered_parameters"].formula.endswith("; experts are those of a worker: / ep")
    assert shared["activations"].formula.endswith("; as if the experts of all workers got equal numbers of tokens")


@pytest.mark.parametrize(
    ("config", "strategy", "message"),
    [
        (TINY, {"ep_size": 2}, "ep_size=2 has no effect on Qwen3ForCausalLM, which has no experts; remove ep_size"),
        (
            small("qwen3_moe") | {"num_experts": 6},
            {"ep_size": 4},
            "ep_size=4 does not divide the 6 experts of each layer of Qwen3MoeForCausalLM; choose 1 or 2, or "
            "another number of workers",
        ),
        (
            small("qwen3_moe"),
            {"tp_size": 2},
            "tp_size=2 shares the experts of Qwen3MoeForCausalLM by ep_size, which must be a multiple of tp_size; "
            "set ep_size: 2",
        ),
    ],
)
def test_models_whose_experts_cannot_be_shared_are_refused(
    config: dict[str, Any], strategy: dict[str, int], message: str
) -> None:
    _, problems = check_model(job_of(config, **strategy), may_read())
    assert [one.message for one in problems] == [message]


@pytest.mark.parametrize(
    ("workers", "places", "why"),
    [
        (4, (3.0, 1.0), "1 of 1 expert parallel groups cross nodes, where their all-to-all is slow: nodes with places"),
        (8, (5.0, 5.0), "workers are placed as 5 + 3, because only those with the same samples are kept together"),
        (8, (4.0, 4.0), None),
    ],
)
def test_groups_that_cross_nodes_get_a_warning(workers: int, places: tuple[float, ...], why: str | None) -> None:
    nodes = [{"CPU": count} for count in places]
    reason = why_split(ScalingSpec(num_workers=workers), nodes, group=4, name="ep_size", peers=1)
    assert (reason is None) == (why is None)
    assert (why or "") in (reason or "")


@pytest.mark.parametrize(
    ("strategy", "placed"),
    [({}, [5, 3]), ({"ep_size": 4}, [4, 4]), ({"ep_size": 4, "ulysses_size": 2}, [4, 4]), ({"fsdp_size": 4}, [4, 4])],
)
def test_ranks_that_share_experts_are_placed_on_one_node(strategy: dict[str, Any], placed: list[int]) -> None:
    chosen = StrategySpec(**strategy)
    ranks = lay_out(
        ScalingSpec(num_workers=8), [{"CPU": 5.0}, {"CPU": 5.0}], group=chosen.peers, whole=chosen.whole_group
    )
    assert ranks is not None
    assert [len(own) for own in ranks.values()] == placed


def test_names_of_other_tools_lead_to_the_field() -> None:
    with pytest.raises(SpecError) as error:
        parse(raw_spec(strategy={"expert_model_parallel_size": 2}))
    assert "strategy.ep_size" in error.value.problems[0].message
