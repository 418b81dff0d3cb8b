"""The job spec: accepted values, rejected values, and their messages."""

from typing import Any

import pytest
from pydantic import BaseModel

from tests.support.builders.specs import TINY, raw_spec
from train_loop.spec import JobSpec, SpecError, dump, merged, parse, parse_text

MINIMAL = """
name: a
model: {config: {model_type: qwen3}}
data: {train: {path: stdlib://*.py}}
training: {learning_rate: 1e-6}
"""


def problems(raw: Any) -> dict[str, str]:
    """Return pointer and message of each problem of a spec."""
    with pytest.raises(SpecError) as caught:
        parse(raw)
    return {problem.pointer: problem.message for problem in caught.value.problems}


def test_defaults_fill_a_minimal_spec_and_survive_a_round_trip() -> None:
    spec = parse_text(MINIMAL)
    assert spec.training.learning_rate == 1e-6
    assert spec.data.sequence_length == 4096
    assert parse_text(dump(spec)) == spec


@pytest.mark.parametrize(
    ("text", "given"),
    [("- a", "fields, not a list"), ("3", "not the value 3"), ("'text'", "not text"), ("null", "empty"), ("", "empty")],
)
def test_text_that_is_not_a_mapping_is_rejected(text: str, given: str) -> None:
    with pytest.raises(SpecError, match=rf"^(a|the) job spec is .*{given}; write "):
        parse_text(text)


def test_number_as_a_key_is_an_unknown_field() -> None:
    assert problems(raw_spec() | {5: "a"})["/5"].startswith("no such field; check its spelling")
    assert problems(merged(raw_spec(), {"training": {5: 2}}))["/training/5"].startswith("no such field; check")


def test_misspelt_value_is_not_one_to_come() -> None:
    assert (
        problems(raw_spec() | {"kind": "trian"})["/kind"]
        == "input should be 'train'; the value is \"trian\"; did you mean train?"
    )


def test_body_that_is_not_yaml_is_rejected() -> None:
    with pytest.raises(SpecError, match="neither YAML nor JSON"):
        parse_text("{a: [")


def test_yaml_aliases_are_rejected() -> None:
    with pytest.raises(SpecError, match="aliases"):
        parse_text("a: &x [1]\nb: *x")


def test_all_problems_are_reported_with_their_pointers() -> None:
    found = problems({"name": "A", "foo": 1, "data": {"train": {"path": "x", "forma": "text"}}})
    assert set(found) == {"/name", "/foo", "/data/train/path", "/data/train/forma", "/model", "/training"}
    assert found["/foo"] == "no such field; check its spelling against GET /openapi.json, or remove it"
    assert found["/model"].startswith("exactly one of model.path, model.config and code is needed, and none is given")
    assert found["/training"] == "this field is required"


@pytest.mark.parametrize("sources", [lambda one: one, lambda one: [one], lambda one: [{"path": "/a"}, one]])
def test_dataset_of_the_hub_and_its_split_are_both_reported(sources: Any) -> None:
    given = sources({"path": "tatsu-lab/alpaca", "split": "train"})
    found = problems(raw_spec(data={"train": given}))
    (path, split) = found
    assert (path.endswith("/path"), split.endswith("/split")) == (True, True)
    assert found[path] == (
        "tatsu-lab/alpaca is a relative path, but service and workers have different folders; use an absolute path, or "
        "run `hf download tatsu-lab/alpaca --repo-type dataset --local-dir /data/alpaca` below a storage root, and "
        "write file:///data/alpaca"
    )
    assert found[split].startswith("no such field; the path of a source names files, such as those of one split")
    relative = problems(raw_spec(data={"train": {"path": ["/a", "data/x.parquet"]}}))["/data/train/path"]
    assert relative.startswith("data/x.parquet is a relative path")
    assert relative.endswith("use an absolute path")


def test_types_are_strict() -> None:
    sizes = {"fsdp_size": 4.5, "ulysses_size": "four"}
    found = problems(raw_spec(strategy=sizes, training={"max_steps": True}, data={"packing": "yes"}))
    assert found["/strategy/fsdp_size"] == "invalid fsdp_size=4.5; expected a number of workers, or node"
    assert found["/strategy/ulysses_size"] == 'input should be a valid integer; the value is "four"'
    assert set(found) == {"/strategy/fsdp_size", "/strategy/ulysses_size", "/training/max_steps", "/data/packing"}


def test_exactly_one_of_model_path_and_config() -> None:
    both = problems(raw_spec(model={"path": "file:///m"}))
    assert both == {"/model": "exactly one of model.path and model.config is needed, and both are given; remove one"}
    neither = problems(raw_spec() | {"model": {}})
    rule = "exactly one of model.path, model.config and code is needed, and none is given; add one of them"
    assert neither == {"/model": rule}


def test_columns_select_one_row_format() -> None:
    found = problems(raw_spec(data={"columns": {"text": "t", "input_ids": "i"}}))
    assert found == {
        "/data/columns": "columns name exactly one of text, input_ids, messages, prompt with response, chosen with "
        "rejected, anchor with positive, and own, for example columns: {text: text}"
    }


def test_profiled_steps_must_be_steps_of_the_run() -> None:
    assert parse(raw_spec(training={"profile_steps": [4]})).training.profile_steps == (4,)
    assert set(problems(raw_spec(training={"profile_steps": [0], "max_consecutive_skips": 0}))) == {
        "/training/profile_steps/0",
        "/training/max_consecutive_skips",
    }
    assert problems(raw_spec(training={"profile_steps": [2, 5]})) == {
        "/training": "profile_steps=[2, 5] has a step beyond max_steps=4, which would never be profiled; "
        "choose earlier ones"
    }


def test_two_fields_for_one_quantity_are_rejected() -> None:
    batch = problems(raw_spec(training={"global_batch_size": 8, "gradient_accumulation_steps": 2}))
    assert "two names for one quantity" in batch["/training"]
    ends = problems(raw_spec(training={"max_tokens": 10}))
    assert ends["/training"] == "max_steps and max_tokens each set the end of the run; keep one"


def test_evaluation_needs_data_and_an_interval() -> None:
    nothing = problems(raw_spec(training={"eval_steps": 5}))
    assert nothing["/training"] == "eval_steps=5 needs eval data; add data.eval, or remove eval_steps"
    never = problems(raw_spec(data={"eval": {"path": "stdlib://*.py"}}))
    assert never["/training"] == ("data.eval is set, but eval_steps is not; add eval_steps, or remove data.eval")
    whole = parse(raw_spec(data={"eval": {"path": "stdlib://*.py"}}, training={"eval_steps": 5}))
    assert whole.data.eval is not None


def test_compute_dtype_must_be_equal_in_both_fields() -> None:
    config = {"config": TINY}
    assert parse(raw_spec() | {"model": config, "strategy": {"param_dtype": "fp32"}}).model.dtype == "fp32"
    assert parse(raw_spec() | {"model": config | {"dtype": "fp32"}}).strategy.param_dtype == "fp32"
    found = problems(raw_spec(strategy={"param_dtype": "bf16"}))
    assert found["/strategy"].startswith("param_dtype=bf16 contradicts model.dtype=fp32")


def test_fp16_output_needs_the_gradient_scaler() -> None:
    found = problems(raw_spec(strategy={"output_dtype": "fp16"}))
    assert found["/strategy"] == (
        "output_dtype=fp16 needs the gradient scaler of model.dtype=fp16, and model.dtype is fp32; choose output_dtype "
        "bf16 or fp32"
    )
    assert parse(raw_spec(model={"dtype": "fp16"}, strategy={"output_dtype": "fp16"})).strategy.output_dtype == "fp16"


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (
            {"strategy": {"gradient_sync": "last", "reduce_dtype": "bf16"}},
            "gradient_sync=last sums micro-batches in reduce_dtype, and bf16 would lose small gradients; choose "
            "reduce_dtype: fp32, or gradient_sync: every",
        ),
        (
            {
                "strategy": {"gradient_sync": "last"},
                "training": {"reproducible": "any_size", "global_batch_size": 4},
            },
            "gradient_sync=last is not proven to give the same bits at every size; change it, or choose "
            "training.reproducible=same_size",
        ),
    ],
)
def test_gradients_that_are_exchanged_once_need_exact_sums_in_any_order(parts: dict[str, Any], message: str) -> None:
    assert problems(raw_spec(**parts)) == {"/strategy": message}


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"offload_policy": "params"}, "invalid offload_policy=params; expected true, false or optimizer"),
        (
            {"pin_memory": False},
            "pin_memory=false has no effect without offload_policy and model.gradient_checkpointing: offload; "
            "remove it",
        ),
        ({"offload_policy": "optimizer", "pin_memory": False}, None),
    ],
)
def test_offloading_is_chosen_by_what_is_offloaded(parts: dict[str, Any], message: str | None) -> None:
    if message is None:
        assert parse(raw_spec(strategy=parts)).strategy.offload_policy == "optimizer"
    else:
        assert list(problems(raw_spec(strategy=parts)).values()) == [message]


@pytest.mark.parametrize("optimizer", ["adafactor", "adamw_8bit"])
def test_small_optimizer_states_are_not_offloaded_alone(optimizer: str) -> None:
    raw = raw_spec(strategy={"offload_policy": "optimizer"}, training={"optimizer": optimizer})
    assert problems(raw) == {
        "/strategy": f"offload_policy=optimizer is not supported with optimizer={optimizer}, whose state is small; "
        "choose offload_policy true or false, or another optimizer"
    }


def test_compiled_layers_reject_separate_norm_units() -> None:
    found = problems(raw_spec(model={"compile": True}, strategy={"norm_dtype": "fp32"}))
    assert found["/strategy"].endswith("so model.compile has no effect; remove one of the two")


@pytest.mark.parametrize(
    ("pointer", "value"),
    [
        ("/model/lora/init", "pissa"),
        ("/data/columns/image", "photo"),
    ],
)
def test_unsupported_settings_are_rejected(pointer: str, value: Any) -> None:
    raw = raw_spec()
    place = raw
    *parents, last = pointer.split("/")[1:]
    for parent in parents:
        place = place.setdefault(parent, {})
    place[last] = value
    assert "is not supported yet; choose" in problems(raw)[pointer]


def test_json_schema_of_the_spec_forbids_unknown_fields() -> None:
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


def test_repeated_keys_are_rejected() -> None:
    with pytest.raises(SpecError, match="training is given twice in one mapping; remove one"):
        parse_text(MINIMAL + "training: {learning_rate: 1.0}")


def test_too_deep_body_is_rejected() -> None:
    with pytest.raises(SpecError, match="nested"):
        parse_text("[" * 5000)


def test_settings_without_effect_are_rejected() -> None:
    warmup = problems(raw_spec(training={"lr_scheduler_type": "constant", "warmup_steps": 5}))
    assert "choose constant_with_warmup, or remove warmup_steps" in warmup["/training"]
    tokenizer = problems(raw_spec(model={"tokenizer": "/t"}, data={"columns": {"input_ids": "ids"}}))
    assert "model.tokenizer has no effect" in tokenizer[""]


@pytest.mark.parametrize(
    ("parts", "pointer", "message"),
    [
        ({"model": {"master_dtype": "fp16"}}, "/model/master_dtype", "choose fp32 or bf16"),
        ({"model": {"attn_implementation": "flash_attention_2"}}, "/model/attn_implementation", "choose sdpa"),
        ({"strategy": {"sharding_strategy": "NO_SHARD", "fsdp_size": 2}}, "/strategy", "requests shards; remove one"),
        ({"data": {"columns": {"messages": "m"}}}, "", "name a tokenizer in model.tokenizer"),
        (
            {"data": {"train": [{"path": "/a.parquet", "columns": {"input_ids": "ids"}}, {"path": "/b.txt"}]}},
            "",
            "would get another tokenizer; name the tokenizer of these rows in model.tokenizer",
        ),
        (
            {
                "data": {"train": {"path": "/a.parquet", "columns": {"input_ids": "i"}}, "eval": {"path": "/b.txt"}},
                "training": {"eval_steps": 1},
            },
            "",
            "would get another tokenizer; name the tokenizer of these rows in model.tokenizer",
        ),
    ],
)
def test_contradictory_settings_are_rejected(parts: dict[str, Any], pointer: str, message: str) -> None:
    assert message in problems(raw_spec(**parts))[pointer]


@pytest.mark.parametrize(
    ("training", "pointer", "message"),
    [
        (
            {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"lr_min": 0.1}},
            "/training/lr_scheduler_kwargs",
            "has no option lr_min; choose from min_lr, min_lr_rate, num_cycles",
        ),
        (
            {"lr_scheduler_type": "linear", "lr_scheduler_kwargs": {"power": 2.0}},
            "/training/lr_scheduler_kwargs",
            "lr_scheduler_type=linear has no option power; it has no options, so remove them",
        ),
        (
            {"lr_scheduler_type": "wsd", "lr_scheduler_kwargs": {"decay_type": "square"}},
            "/training/lr_scheduler_kwargs/decay_type",
            "input should be 'linear', 'cosine' or '1-sqrt'; the value is \"square\"",
        ),
        (
            {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-4, "min_lr_rate": 0.1}},
            "/training",
            "min_lr and min_lr_rate are two names for one quantity; remove one",
        ),
        (
            {"lr_scheduler_type": "polynomial", "learning_rate": 1e-8},
            "/training",
            "lr_scheduler_kwargs.lr_end=1e-07 is not below learning_rate=1e-08; set a lower one",
        ),
        ({"warmup_steps": 4}, "/training", "warmup_steps=4 is not less than the 4 steps of the run"),
        ({"ema_decay": 1.0}, "/training/ema_decay", "input should be less than 1; the value is 1.0"),
    ],
)
def test_impossible_schedule_is_rejected(training: dict[str, Any], pointer: str, message: str) -> None:
    assert message in problems(raw_spec(training=training))[pointer]


def test_options_of_optimizer_and_schedule_survive_a_round_trip() -> None:
    training = {"optimizer": "muon", "momentum": 0.9, "adam_beta2": 0.95, "lr_scheduler_type": "wsd"}
    spec = parse(raw_spec(training=training | {"lr_scheduler_kwargs": {"num_decay_steps": 2}}))
    assert parse_text(dump(spec)) == spec
    assert parse_text(dump(parse(raw_spec(training={"optimizer": "sgd"})))).training.optimizer == "sgd"


@pytest.mark.parametrize(
    ("training", "every", "message"),
    [
        ({}, 100, "keep_best.metric=eval_loss needs evaluations; add data.eval and training.eval_steps"),
        ({"eval_steps": 30}, 100, "every_steps=100 is not a multiple of eval_steps=30; choose a multiple"),
        ({"eval_steps": 30}, None, "every_steps=None is not a multiple of eval_steps=30; choose a multiple"),
    ],
)
def test_keep_best_by_an_unmeasured_metric_is_rejected(
    training: dict[str, Any], every: int | None, message: str
) -> None:
    best = {"metric": "eval_loss", "mode": "min"}
    data = {"eval": {"path": "stdlib://*.py"}} if training else {}
    found = problems(raw_spec(data=data, training=training, checkpoint={"keep_best": best, "every_steps": every}))
    assert found["/checkpoint"].endswith(message)


@pytest.mark.parametrize(("given", "mode"), [(True, "thread"), (False, "sync"), ("process", "process")])
def test_save_mode_is_thread_process_or_sync(given: bool | str, mode: str) -> None:
    assert parse(raw_spec(strategy={"async_save_ckpt": given})).strategy.save_mode == mode


def test_invalid_save_mode_is_reported_once() -> None:
    with pytest.raises(SpecError) as caught:
        parse(raw_spec(strategy={"async_save_ckpt": "maybe"}))
    assert [(problem.pointer, problem.message) for problem in caught.value.problems] == [
        (
            "/strategy/async_save_ckpt",
            "invalid async_save_ckpt=maybe; expected true, false, thread, process or sync",
        )
    ]


@pytest.mark.parametrize(
    ("workers", "training", "pointer", "message"),
    [
        ({"min": 4, "max": 2}, {"global_batch_size": 8}, "/scaling/num_workers", "min=4 is more than max=2; swap them"),
        ({"min": 1}, {"global_batch_size": 8}, "/scaling/num_workers/max", "this field is required"),
        ({"min": 1, "max": 2}, {}, "/scaling", "add training.global_batch_size"),
    ],
)
def test_impossible_worker_ranges_are_rejected(
    workers: dict[str, int], training: dict[str, int], pointer: str, message: str
) -> None:
    raw = raw_spec(scaling={"num_workers": workers})
    raw["training"] |= training
    assert message in problems(raw)[pointer]


def test_worker_range_is_elastic_until_a_number_is_chosen() -> None:
    raw = raw_spec(scaling={"num_workers": {"min": 2, "max": 4}})
    raw["training"] |= {"global_batch_size": 8}
    spec = parse(raw)
    assert (spec.scaling.elastic, spec.scaling.bounds) == (True, (2, 4))
    assert (spec.at(3).scaling.elastic, spec.at(3).scaling.world, spec.at(3).scaling.bounds) == (False, 3, (3, 3))
    assert parse_text(dump(spec)) == spec
