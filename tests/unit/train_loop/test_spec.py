"""The spec: what it accepts, what it refuses, and what it says then."""

from typing import Any

import pytest
from pydantic import BaseModel

from tests.support.specs import TINY, raw_spec
from train_loop.spec import JobSpec, SpecError, dump, parse, parse_text

MINIMAL = """
name: a
model: {config: {model_type: qwen3}}
data: {train: {path: stdlib://*.py}}
training: {learning_rate: 1e-6}
"""


def problems(raw: Any) -> dict[str, str]:
    """Pointer and message of everything wrong with a spec."""
    with pytest.raises(SpecError) as caught:
        parse(raw)
    return {problem.pointer: problem.message for problem in caught.value.problems}


def test_defaults_fill_a_minimal_spec_and_survive_a_round_trip() -> None:
    spec = parse_text(MINIMAL)
    assert spec.training.learning_rate == 1e-6
    assert spec.data.sequence_length == 4096
    assert parse_text(dump(spec)) == spec


@pytest.mark.parametrize("text", ["- a", "3", "null", "'text'"])
def test_a_body_that_is_no_mapping_is_refused(text: str) -> None:
    with pytest.raises(SpecError, match="a job spec is a mapping of fields"):
        parse_text(text)


def test_a_body_that_is_no_yaml_is_refused() -> None:
    with pytest.raises(SpecError, match="neither YAML nor JSON"):
        parse_text("{a: [")


def test_aliases_are_refused_because_they_multiply() -> None:
    with pytest.raises(SpecError, match="aliases"):
        parse_text("a: &x [1]\nb: *x")


def test_every_problem_is_named_at_once_with_its_pointer() -> None:
    found = problems({"name": "A", "foo": 1, "data": {"train": {"path": "x", "forma": "text"}}})
    assert set(found) == {"/name", "/foo", "/data/train/forma", "/model", "/training"}
    assert found["/foo"] == "no such field; check its spelling against GET /openapi.json, or remove it"
    assert found["/model"] == "this field is required"


def test_types_are_strict() -> None:
    found = problems(raw_spec(strategy={"fsdp_size": "4"}, training={"max_steps": True}, data={"packing": "yes"}))
    assert found["/strategy/fsdp_size"] == 'input should be a valid integer; the value is "4"'
    assert set(found) == {"/strategy/fsdp_size", "/training/max_steps", "/data/packing"}


def test_exactly_one_of_model_path_and_config() -> None:
    both = problems(raw_spec(model={"path": "file:///m"}))
    assert both == {"/model": "exactly one of model.path and model.config is needed, and both are given; remove one"}
    neither = problems(raw_spec() | {"model": {}})
    assert neither == {"/model": "exactly one of model.path and model.config is needed, and neither is given; add one"}


def test_columns_name_one_shape_of_row() -> None:
    found = problems(raw_spec(data={"columns": {"text": "t", "input_ids": "i"}}))
    assert found == {
        "/data/columns": "columns name exactly one of text and input_ids, for example columns: {text: text}"
    }


def test_profiled_steps_are_steps_of_the_run() -> None:
    assert parse(raw_spec(training={"profile_steps": [4]})).training.profile_steps == (4,)
    assert set(problems(raw_spec(training={"profile_steps": [0], "max_consecutive_skips": 0}))) == {
        "/training/profile_steps/0",
        "/training/max_consecutive_skips",
    }
    assert problems(raw_spec(training={"profile_steps": [2, 5]})) == {
        "/training": "profile_steps=[2, 5] has a step beyond max_steps=4, which would never be profiled; "
        "choose earlier ones"
    }


def test_two_names_for_one_quantity_are_refused() -> None:
    batch = problems(raw_spec(training={"global_batch_size": 8, "gradient_accumulation_steps": 2}))
    assert "two names for one quantity" in batch["/training"]
    ends = problems(raw_spec(training={"num_train_epochs": 1.0}))
    assert "both say when to end" in ends["/training"]


def test_the_compute_dtype_has_one_value_in_its_two_homes() -> None:
    config = {"config": TINY}
    assert parse(raw_spec() | {"model": config, "strategy": {"param_dtype": "fp32"}}).model.dtype == "fp32"
    assert parse(raw_spec() | {"model": config | {"dtype": "fp32"}}).strategy.param_dtype == "fp32"
    found = problems(raw_spec(strategy={"param_dtype": "bf16"}))
    assert found["/strategy"].startswith("param_dtype=bf16 contradicts model.dtype=fp32")


@pytest.mark.parametrize(
    ("pointer", "value"),
    [
        ("/kind", "infer"),
        ("/model/lora", {"r": 8, "alpha": 16, "target_modules": ["q_proj"]}),
        ("/model/compile", True),
        ("/model/dtype", "fp16"),
        ("/model/gradient_checkpointing", "offload"),
        ("/model/attn_implementation", "flash_attention_2"),
        ("/model/freeze_module_prefix", ["model.embed"]),
        ("/data/eval", {"path": "x"}),
        ("/training/optimizer", "muon"),
        ("/training/lr_scheduler_type", "wsd"),
        ("/training/max_tokens", 10),
        ("/training/eval_steps", 10),
        ("/strategy/reshard_after_forward", 2),
        ("/strategy/offload_policy", True),
        ("/strategy/apply_tiled_mlp", True),
        ("/strategy/tiled_num_shards", 8),
        ("/strategy/forward_prefetch", 2),
        ("/strategy/wrap_policy/wrap_embeddings", True),
        ("/checkpoint/every_seconds", 60.0),
        ("/checkpoint/keep_best", {"metric": "loss", "mode": "min"}),
        ("/scaling/num_workers", {"min": 1, "max": 4}),
    ],
)
def test_what_no_code_honours_yet_is_refused_and_not_ignored(pointer: str, value: Any) -> None:
    raw = raw_spec()
    place = raw
    *parents, last = pointer.split("/")[1:]
    for parent in parents:
        place = place.setdefault(parent, {})
    place[last] = value
    if pointer == "/model/dtype":
        raw["strategy"] = {"param_dtype": "fp16"}
    assert "is not supported yet; choose" in problems(raw)[pointer]


def test_a_model_path_is_not_supported_yet() -> None:
    assert "not supported yet" in problems(raw_spec() | {"model": {"path": "file:///m"}})["/model"]


def test_the_spec_has_a_json_schema_that_forbids_unknown_fields() -> None:
    schema = JobSpec.model_json_schema()
    assert schema["additionalProperties"] is False
    assert all(part.get("additionalProperties", False) is False for part in schema["$defs"].values() if "type" in part)


def test_every_part_is_frozen() -> None:
    parts: list[type[BaseModel]] = [JobSpec]
    for part in parts:
        assert part.model_config.get("frozen"), part
        fields = [field.annotation for field in part.model_fields.values()]
        parts += [f for f in fields if isinstance(f, type) and issubclass(f, BaseModel) and f not in parts]
    assert len(parts) > 8


def test_repeated_keys_are_refused_because_one_would_be_lost() -> None:
    with pytest.raises(SpecError, match="training is given twice in one mapping; remove one"):
        parse_text(MINIMAL + "training: {learning_rate: 1.0}")


def test_a_body_too_deep_to_read_is_refused() -> None:
    with pytest.raises(SpecError, match="neither YAML nor JSON"):
        parse_text("[" * 5000)


def test_settings_that_would_do_nothing_are_refused() -> None:
    warmup = problems(raw_spec(training={"lr_scheduler_type": "constant", "warmup_steps": 5}))
    assert "choose constant_with_warmup, or remove warmup_steps" in warmup["/training"]
    tokenizer = problems(raw_spec(model={"tokenizer": "/t"}, data={"columns": {"input_ids": "ids"}}))
    assert "model.tokenizer would do nothing" in tokenizer[""]
