"""Specs with own code: which fields apply, and which are refused by name."""

from typing import Any

import pytest

from tests.support.builders.specs import code_spec, raw_spec
from train_loop.spec import SpecError, dump, load, parse


def problem(**parts: dict[str, Any]) -> tuple[str, str]:
    with pytest.raises(SpecError) as raised:
        parse(code_spec(**parts))
    (one,) = raised.value.problems
    return one.pointer, one.message


def test_own_code_needs_no_model_and_keeps_the_general_settings() -> None:
    raw = code_spec(training={"ema_decay": 0.9}, strategy={"norm_dtype": "fp32"}, checkpoint={"every_steps": 1})
    raw["model"] |= {"gradient_checkpointing": "none", "freeze_module_prefix": ["a"], "compile": False}
    assert load(dump(parse(raw))) == parse(raw)
    del raw["model"]
    assert parse(raw).model.dtype == "bf16"


@pytest.mark.parametrize(
    ("part", "field", "value"),
    [
        ("model", "path", "/models/a"),
        ("model", "config", {"model_type": "qwen3"}),
        ("model", "tokenizer", "/models/a"),
        ("model", "attn_implementation", "sdpa"),
        ("data", "on_bad_rows", "skip"),
        ("data", "on_long_rows", "drop"),
        ("data", "sequence_length", 32),
        ("data", "packing", False),
        ("training", "max_tokens", 5),
        ("training", "chunked_loss", True),
        ("training", "label_smoothing_factor", 0.1),
        ("training", "z_loss", 0.1),
        ("training", "optimizer", "muon"),
        ("strategy", "ulysses_size", 2),
        ("strategy", "apply_tiled_mlp", True),
        ("strategy", "wrap_policy", {"wrap_embeddings": True}),
        ("strategy", "wrap_policy", {"wrap_lm_output": True}),
        ("checkpoint", "keep_best", {"metric": "eval_perplexity", "mode": "min"}),
    ],
)
def test_settings_of_language_models_are_refused_by_name(part: str, field: str, value: Any) -> None:
    parts = {part: {field: value}}
    if field == "max_tokens":
        parts[part]["max_steps"] = None
    pointer, message = problem(**parts)
    assert pointer == f"/{part}"
    assert message.startswith((field, *value) if isinstance(value, dict) else field)
    assert "remove it" in message or "choose" in message or "name its class" in message


@pytest.mark.parametrize("source", [{"path": "/d", "format": "jsonl"}, {"path": "/d", "columns": {"text": "x"}}])
def test_sources_have_own_columns_of_parquet_files(source: dict[str, Any]) -> None:
    assert problem(data={"train": source})[0] == "/data"
    assert "write, for example, columns: {own: [image, label]}" in problem(data={"columns": {"text": "x"}})[1]


def test_own_columns_need_own_code() -> None:
    raw = raw_spec(data={"columns": {"own": ["x"]}})
    with pytest.raises(SpecError, match=r"columns\.own goes with own code"):
        parse(raw)


@pytest.mark.parametrize("columns", [{"own": []}, {"own": ["x", "x"]}, {"own": ["x"], "weight": "w"}, {"own": [""]}])
def test_own_columns_are_different_names(columns: dict[str, Any]) -> None:
    assert problem(data={"columns": columns})[0].startswith("/data/columns")


@pytest.mark.parametrize("name", ["mymodel", "my-model:build", "mymodel:", ":build", "a:b:c", "a b:c", "a:b()", "1:2"])
def test_entry_points_are_names_of_functions(name: str) -> None:
    assert problem(code={"loss": name}) == (
        "/code/loss",
        f"{name!r} does not name a function; write module:function, for example mymodel:build",
    )


@pytest.mark.parametrize("sums", [["loss"], ["a", "a"], ["A"], ["a b"]])
def test_sums_have_new_names(sums: list[str]) -> None:
    assert problem(code={"sums": sums})[0].startswith("/code/sums")


def test_best_checkpoint_is_chosen_by_a_sum_of_the_code() -> None:
    best = {"keep_best": {"metric": "eval_accuracy", "mode": "max"}}
    parts: dict[str, Any] = {"training": {"eval_steps": 1}, "data": {"eval": {"path": "/d"}}, "checkpoint": best}
    parts["checkpoint"] |= {"every_steps": 1}
    assert parse(code_spec(code={"sums": ["accuracy"]}, **parts)).checkpoint.keep_best is not None
    assert "return the sum accuracy (code.sums)" in problem(**parts)[1]


@pytest.mark.parametrize("package", ["mymodel", "s3://bucket/mymodel", "https://host/a.whl"])
def test_package_is_a_path_on_storage(package: str) -> None:
    assert problem(code={"package": package})[0] == "/code/package"


def test_digest_is_a_sha256() -> None:
    assert parse(code_spec(code={"sha256": "a" * 64})).code.sha256 == "a" * 64  # type: ignore[union-attr]
    assert problem(code={"sha256": "A" * 64})[0] == "/code/sha256"


def test_split_sequences_need_entries_and_are_not_proven_at_any_size() -> None:
    split: dict[str, Any] = {"strategy": {"ulysses_size": 2}, "scaling": {"num_workers": 2}}
    assert "write, for example, code.sequence: {tokens: 1}" in problem(**split)[1]
    assert parse(code_spec(code={"sequence": {"x": 1}}, **split)).strategy.ulysses_size == 2
    training = {"reproducible": "any_size", "global_batch_size": 4, "max_steps": 4, "learning_rate": 1e-3}
    message = problem(code={"sequence": {"x": 1}}, training=training, **split)[1]
    assert message.startswith("ulysses_size=2 with own code (code) is not proven to give the same bits")
