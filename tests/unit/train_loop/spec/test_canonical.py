"""Spellings of other tools become the canonical form, and what contradicts is rejected by name."""

import hashlib
import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from tests.support.builders.specs import raw_spec
from train_loop.spec import (
    BudgetSpec,
    Checkpointing,
    EverySpec,
    SpecError,
    dump,
    job_schema,
    load,
    override,
    parse,
    parse_text,
    spellings,
)
from train_loop.spec.names.spellings import DTYPES, SHARDING

VALID = Draft202012Validator(job_schema())
ACCELERATE = {1: "FULL_SHARD", 2: "SHARD_GRAD_OP", 3: "NO_SHARD", 4: "HYBRID_SHARD", 5: "_HYBRID_SHARD_ZERO2"}
"""Accelerate's numbers, which are those of torch's enumeration."""


def refused(**parts: Any) -> dict[str, str]:
    with pytest.raises(SpecError) as raised:
        parse(raw_spec(**parts))
    return {problem.pointer: problem.message for problem in raised.value.problems}


@pytest.mark.parametrize(
    ("written", "dtype"),
    [
        ("bfloat16", "bf16"),
        ("torch.bfloat16", "bf16"),
        ("float16", "fp16"),
        ("torch.half", "fp16"),
        ("half", "fp16"),
        ("float32", "fp32"),
        ("torch.float32", "fp32"),
        ("float", "fp32"),
    ],
)
def test_dtypes_are_accepted_wherever_a_dtype_stands(written: str, dtype: str) -> None:
    raw = raw_spec(model={"dtype": written}, strategy={"reduce_dtype": written})
    found = parse(raw)
    assert (found.model.dtype, found.strategy.param_dtype, found.strategy.reduce_dtype) == (dtype, dtype, dtype)
    assert {one.field: (one.written, dict(one.became)) for one in spellings(raw)} == {
        "model.dtype": (written, {"model.dtype": dtype}),
        "strategy.reduce_dtype": (written, {"strategy.reduce_dtype": dtype}),
    }
    assert VALID.is_valid(raw)


def test_fields_of_one_dtype_take_its_spellings_only() -> None:
    raw = raw_spec(model={"router_dtype": "float32"}, strategy={"output_dtype": "torch.float32", "norm_dtype": "float"})
    found = parse(raw)
    assert (found.model.router_dtype, found.strategy.output_dtype, found.strategy.norm_dtype) == ("fp32",) * 3
    assert VALID.is_valid(raw)
    assert 'the value is "bfloat16"' in refused(strategy={"norm_dtype": "bfloat16"})["/strategy/norm_dtype"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("FULL_SHARD", ("FULL_SHARD", None, 0)),
        ("SHARD_GRAD_OP", ("FULL_SHARD", False, 0)),
        ("HYBRID_SHARD", ("FULL_SHARD", None, "node")),
        ("_HYBRID_SHARD_ZERO2", ("FULL_SHARD", False, "node")),
        ("NO_SHARD", ("NO_SHARD", None, 0)),
    ],
)
def test_strategies_of_fsdp1_become_fields_of_fsdp2(name: str, expected: tuple[Any, ...]) -> None:
    (number,) = (number for number, known in ACCELERATE.items() if known == name)
    plain = name.lstrip("_")
    for written in (name, name.lower(), plain, f"ShardingStrategy.{name}", number, str(number)):
        found = parse(raw_spec(strategy={"sharding_strategy": written})).strategy
        assert (found.sharding_strategy, found.reshard_after_forward, found.fsdp_size) == expected, written
    assert VALID.is_valid(raw_spec(strategy={"sharding_strategy": plain.lower()}))


def test_hybrid_strategies_keep_a_given_size() -> None:
    for name in ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"):
        assert parse(raw_spec(strategy={"sharding_strategy": name, "fsdp_size": 4})).strategy.fsdp_size == 4


@pytest.mark.parametrize(
    ("strategy", "fields"),
    [
        ({"sharding_strategy": "SHARD_GRAD_OP", "reshard_after_forward": True}, ("reshard_after_forward=true",)),
        ({"sharding_strategy": "_HYBRID_SHARD_ZERO2", "reshard_after_forward": 2}, ("reshard_after_forward=2",)),
        ({"sharding_strategy": "HYBRID_SHARD", "reshard_after_forward": False}, ("reshard_after_forward=false",)),
        ({"sharding_strategy": "HYBRID_SHARD", "fsdp_size": 0}, ("fsdp_size=0",)),
        ({"sharding_strategy": "NO_SHARD", "fsdp_size": 4}, ("fsdp_size=4",)),
        ({"sharding_strategy": "NO_SHARD", "fsdp_size": "node"}, ("fsdp_size=node",)),
    ],
)
def test_contradictions_name_both_fields(strategy: dict[str, Any], fields: tuple[str, ...]) -> None:
    (message,) = refused(strategy=strategy).values()
    for field in (f"sharding_strategy={strategy['sharding_strategy']}", *fields, "remove one"):
        assert field in message


def test_misspelt_strategy_lists_all_names() -> None:
    assert refused(strategy={"sharding_strategy": "HYBRID_SHRD"}) == {
        "/strategy/sharding_strategy": 'invalid sharding_strategy "HYBRID_SHRD"; expected FULL_SHARD, SHARD_GRAD_OP, '
        "NO_SHARD, HYBRID_SHARD or _HYBRID_SHARD_ZERO2; did you mean HYBRID_SHARD?"
    }
    for number in (0, 6, True):
        assert "/strategy/sharding_strategy" in refused(strategy={"sharding_strategy": number})


def test_warmup_ratio_becomes_warmup_steps() -> None:
    for written, steps in ((0.03, 0.03), ("3e-2", 0.03), (0, 0), (0.0, 0), (None, 0)):
        raw = raw_spec(training={"warmup_ratio": written, "max_steps": 100})
        assert parse(raw).training.warmup_steps == steps
        assert [one.field for one in spellings(raw)] == ([] if written is None else ["training.warmup_ratio"])
    assert VALID.is_valid(raw_spec(training={"warmup_ratio": 0.03}))


@pytest.mark.parametrize(
    ("training", "message"),
    [
        ({"warmup_ratio": 0.1, "warmup_steps": 2}, "warmup_ratio=0.1 and warmup_steps=2 each set the warm-up"),
        ({"warmup_ratio": 1}, "warmup_ratio=1 is not a fraction of the run; choose one from 0 to below 1"),
        ({"warmup_ratio": -0.1}, "warmup_ratio=-0.1 is not a fraction"),
        ({"warmup_ratio": "much"}, 'warmup_ratio="much" is not a fraction'),
        ({"warmup_steps": 1.5}, "invalid warmup_steps=1.5; expected a number of optimizer steps, or a fraction of"),
        ({"warmup_steps": -1}, "invalid warmup_steps=-1; expected"),
        ({"warmup_steps": True}, "invalid warmup_steps=True; expected"),
    ],
)
def test_invalid_warmup_has_one_error(training: dict[str, Any], message: str) -> None:
    ((pointer, found),) = refused(training=training).items()
    assert found.startswith(message)
    assert pointer.startswith("/training/warmup_")


@given(st.integers(1, 10_000), st.floats(0, 1, exclude_min=True, exclude_max=True))
def test_fraction_of_warmup_is_that_of_transformers(steps: int, fraction: float) -> None:
    training = parse(raw_spec(training={"warmup_steps": fraction, "max_steps": None})).training
    assert training.warmup_of(steps) == math.ceil(steps * fraction)
    assert parse(raw_spec(training={"warmup_steps": 3.0})).training.warmup_of(steps) == 3


@pytest.mark.parametrize(
    ("model", "became"),
    [
        ({"disable_gradient_checkpointing": True}, "none"),
        ({"disable_gradient_checkpointing": False}, "full"),
        ({"disable_gradient_checkpointing": None}, "full"),
        ({"disable_gradient_checkpointing": False, "gradient_checkpointing": "offload"}, "offload"),
        ({"gradient_checkpointing": True}, "full"),
        ({"gradient_checkpointing": False}, "none"),
        ({"gradient_checkpointing": False, "disable_gradient_checkpointing": True}, "none"),
        ({"gradient_checkpointing": "selective", "disable_gradient_checkpointing": False}, "selective"),
        ({"gradient_checkpointing": {"every": "2"}}, EverySpec(every=2)),
        ({"gradient_checkpointing": {"budget": ".5"}, "compile": True}, BudgetSpec(budget=0.5)),
    ],
)
def test_checkpointing_is_named_as_in_roll_and_transformers(model: dict[str, Any], became: Checkpointing) -> None:
    job = parse(raw_spec(model=model))
    assert job.model.gradient_checkpointing == became
    assert load(dump(job)) == job


@pytest.mark.parametrize("written", [True, False, "full", "selective", {"every": 1}, {"budget": 0}])
def test_schema_has_each_kind_of_checkpointing(written: Any) -> None:
    assert VALID.is_valid(raw_spec(model={"gradient_checkpointing": written}))


@pytest.mark.parametrize(
    ("written", "message"),
    [
        *(
            (
                value,
                f"invalid gradient_checkpointing {shown}; expected none, full, offload, selective, {{every: n}} or "
                "{budget: 0..1}",
            )
            for value, shown in (({}, "{}"), (2, "2"), (None, "null"), ({"evry": 2}, '{"evry": 2}'))
        ),
        (
            "selectiv",
            "input should be 'none', 'full', 'offload' or 'selective'; the value is \"selectiv\"; did you mean "
            "selective?",
        ),
        ({"every": 0}, "input should be greater than or equal to 1; the value is 0"),
        ({"budget": 1.5}, "input should be less than or equal to 1; the value is 1.5"),
        (
            {"budget": 0.5},
            "gradient_checkpointing={budget: 0.5} is a memory budget of torch.compile, and compile is false; set "
            "compile: true, or choose selective or {every: 2}",
        ),
    ],
)
def test_invalid_checkpointing_names_rule_and_remedy(written: Any, message: str) -> None:
    assert [*refused(model={"gradient_checkpointing": written}).values()] == [message]
    assert VALID.is_valid(raw_spec(model={"gradient_checkpointing": written})) is (written == {"budget": 0.5})


def test_number_of_checkpointing_replaces_another_one() -> None:
    job = parse(raw_spec(model={"gradient_checkpointing": {"every": 2}}))
    changed = override(job, {"model": {"gradient_checkpointing": {"budget": 0.5}, "compile": True}})
    assert changed.model.gradient_checkpointing == BudgetSpec(budget=0.5)
    assert override(changed, {"model": {"compile": True}}) == changed


def test_contradicting_checkpointing_names_both_fields() -> None:
    assert refused(model={"disable_gradient_checkpointing": True, "gradient_checkpointing": "full"}) == {
        "/model/disable_gradient_checkpointing": "disable_gradient_checkpointing=true contradicts "
        "gradient_checkpointing=full; remove one"
    }


def test_backward_prefetch_of_fsdp1_is_fsdp2s_own_order() -> None:
    assert parse(raw_spec(strategy={"backward_prefetch": "BACKWARD_PRE"})).strategy.backward_prefetch == 1
    (message,) = refused(strategy={"backward_prefetch": "BackwardPrefetch.BACKWARD_POST"}).values()
    assert message.startswith("FSDP2 has no backward_prefetch=BACKWARD_POST")


def test_numbers_may_be_text() -> None:
    raw = raw_spec(
        training={"learning_rate": "1e-4", "max_steps": "4", "profile_steps": ["1", "2"], "weight_decay": "0"},
        scaling={"num_workers": {"min": "1", "max": "2"}, "resources_per_worker": {"CPU": "0.5"}},
        strategy={"fsdp_size": "2", "reshard_after_forward": "2"},
    )
    raw["training"]["global_batch_size"] = "4"
    found = parse(raw)
    assert (found.training.learning_rate, found.training.max_steps, found.training.profile_steps) == (1e-4, 4, (1, 2))
    assert (found.scaling.bounds, found.scaling.resources_per_worker) == ((1, 2), {"CPU": 0.5})
    assert (found.strategy.fsdp_size, found.strategy.reshard_after_forward) == (2, 2)
    assert {one.field for one in spellings(raw)} == {
        *("training.learning_rate", "training.max_steps", "training.profile_steps.0", "training.profile_steps.1"),
        *("training.weight_decay", "training.global_batch_size", "scaling.num_workers.min", "scaling.num_workers.max"),
        *("scaling.resources_per_worker.CPU", "strategy.fsdp_size", "strategy.reshard_after_forward"),
    }


def test_text_stays_text_where_a_field_takes_text() -> None:
    raw = raw_spec(model={"config": raw_spec()["model"]["config"] | {"note": "1e-4"}})
    raw |= {"name": "1", "labels": {"run": "0010"}}
    found = parse(raw)
    assert (found.name, found.labels) == ("1", {"run": "0010"})
    assert found.model.config is not None
    assert found.model.config["note"] == "1e-4"
    assert spellings(raw) == ()


@pytest.mark.parametrize("text", ["", "1e999", "nan", ".inf", "0x", "4.5", "yes", "1 2", "١"])
def test_text_that_is_no_number_is_rejected_as_before(text: str) -> None:
    ((pointer, message),) = refused(training={"max_steps": text}).items()
    assert pointer == "/training/max_steps"
    assert "input should be a valid integer" in message


@given(
    st.sampled_from(sorted(SHARDING)),
    st.sampled_from([None, True, False, 2]),
    st.sampled_from([..., 0, 1, 2, "node"]),
    st.sampled_from(sorted(DTYPES)),
)
def test_canonical_form_of_any_spelling_is_stable(name: str, reshard: Any, size: Any, dtype: str) -> None:
    strategy = {"sharding_strategy": name, "reshard_after_forward": reshard, "param_dtype": dtype}
    raw = raw_spec(strategy=strategy if size is ... else strategy | {"fsdp_size": size})
    del raw["model"]["dtype"]
    try:
        spec = parse(raw)
    except SpecError:
        return
    again = json.loads(dump(spec))
    assert load(dump(spec)) == spec
    assert spellings(again) == ()


def test_problems_of_all_kinds_are_listed_at_once() -> None:
    found = refused(training={"warmup_ratio": 2, "max_stepz": 1}, strategy={"sharding_strategy": "SHARD"})
    assert found.keys() == {"/training/warmup_ratio", "/training/max_stepz", "/strategy/sharding_strategy"}


def test_override_with_another_tools_field_replaces_what_it_becomes() -> None:
    spec = parse(raw_spec(training={"warmup_steps": 2}))
    changed = override(spec, {"strategy": {"sharding_strategy": "HYBRID_SHARD"}, "training": {"warmup_ratio": 0.5}})
    assert (changed.strategy.fsdp_size, changed.training.warmup_steps) == ("node", 0.5)
    with pytest.raises(SpecError, match="each set the warm-up"):
        override(spec, {"training": {"warmup_ratio": 0.5, "warmup_steps": 1}})


def test_stored_form_of_a_spec_without_new_names_is_unchanged() -> None:
    assert hashlib.sha256(dump(parse(raw_spec())).encode()).hexdigest() == DIGEST


def test_errors_of_json_over_several_lines_have_positions() -> None:
    text = json.dumps(raw_spec(training={"lr": 1}), indent=2)
    with pytest.raises(SpecError) as raised:
        parse_text(text)
    (problem,) = raised.value.problems
    line = next(number for number, one in enumerate(text.splitlines(), start=1) if '"lr"' in one)
    assert (problem.line, problem.column) == (line, 5)
    assert problem.message == "no such field; use training.learning_rate"


DIGEST = "ce520e789d90dc300bcda427e27eda68528a4da2b579c783a67f98a7f2606a34"
"""SHA-256 of the stored form of the smallest spec, which only another default may change."""
