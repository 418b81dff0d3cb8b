"""Preflight checks of data: location, existence, columns and emptiness."""

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.builders.folders import write_model, write_tokenizer
from tests.support.builders.specs import TINY, may_read, raw_spec
from train_loop.model.folder import model_shape
from train_loop.preflight.checks import check_data
from train_loop.preflight.model import check_model
from train_loop.spec import JobSpec, SpecError, parse


def problems(root: Path, **data: Any) -> dict[str, str]:
    """Return pointer and message of each problem of a data block."""
    spec = parse(raw_spec(data=data))
    return {problem.pointer: problem.message for problem in check_data(spec, may_read(f"file://{root}"))}


@pytest.fixture
def parquet(tmp_path: Path) -> Path:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"ids": [[1, 2]], "note": ["x"]}), path)
    return path


def test_valid_data_has_no_problems(tmp_path: Path, parquet: Path) -> None:
    assert problems(tmp_path, train={"path": f"file://{parquet}"}, columns={"input_ids": "ids"}) == {}
    assert problems(tmp_path, train={"path": "stdlib://*.py"}) == {}


def test_eval_data_is_checked_like_training_data(tmp_path: Path, parquet: Path) -> None:
    train, columns = {"path": str(parquet)}, {"input_ids": "ids"}
    raw = raw_spec(
        data={"train": train, "columns": columns, "eval": {"path": "/etc/*.conf"}}, training={"eval_steps": 1}
    )
    (problem,) = check_data(parse(raw), may_read(f"file://{tmp_path}"))
    assert problem.pointer == "/data/eval/path"
    assert "lies outside the allowed storage roots" in problem.message


def test_missing_path_is_rejected(tmp_path: Path) -> None:
    assert problems(tmp_path, train={"path": f"{tmp_path}/none.parquet"}) == {
        "/data/train/path": f"{tmp_path}/none.parquet matches no file; check the path, "
        "which must be visible from service and workers"
    }


@pytest.mark.parametrize("path", ["/etc/*.conf", "file:///etc/hostname"])
def test_path_outside_the_allowed_roots_is_rejected(tmp_path: Path, path: str) -> None:
    message = problems(tmp_path, train={"path": path})["/data/train/path"]
    assert message.startswith(f"{path} lies outside the allowed storage roots (")
    assert message.endswith("or have the operator add its folder to TRAINSHED_STORAGE_ROOTS")


def test_impossible_path_is_rejected(tmp_path: Path) -> None:
    assert "null byte" in problems(tmp_path, train={"path": f"{tmp_path}/\0x"})["/data/train/path"]


@pytest.mark.parametrize("path", ["stdlib://../../../../../etc/hostname", "file:///tmp/../etc/hostname"])
def test_path_with_parent_segments_is_rejected(tmp_path: Path, path: str) -> None:
    assert "contains '..'" in problems(tmp_path, train={"path": path})["/data/train/path"]


def test_link_to_outside_the_allowed_roots_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "link.txt").symlink_to("/etc/hostname")
    message = problems(tmp_path, train={"path": f"{tmp_path}/*.txt"})["/data/train/path"]
    assert message.startswith(f"{tmp_path}/link.txt is a link to a place that jobs of project 'default' may not read")


def test_remote_storage_outside_the_allowed_roots_is_rejected(tmp_path: Path) -> None:
    message = problems(tmp_path, train={"path": "s3://bucket/x.parquet"})["/data/train/path"]
    assert message.startswith("s3://bucket/x.parquet lies outside the allowed storage roots (")


def test_column_missing_from_the_file_is_rejected(tmp_path: Path, parquet: Path) -> None:
    assert problems(tmp_path, train={"path": str(parquet)}, columns={"input_ids": "tokens"}) == {
        "/data/columns": f"{parquet} has no column 'tokens'; it has ids, note; correct data.columns"
    }


def test_column_missing_from_the_first_json_line_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('\n{"body": "x"}\n')
    assert (
        "rows.jsonl, line 2: no column 'text'; it has body; correct the row, or data.columns"
        in problems(tmp_path, train={"path": str(path)})["/data/columns"]
    )


def test_empty_dataset_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"ids": pa.array([], pa.list_(pa.int32()))}), path)
    assert problems(tmp_path, train={"path": str(path)}, columns={"input_ids": "ids"}) == {
        "/data/train/path": f"{path} holds no rows; an empty dataset cannot be trained on"
    }


def test_file_with_a_wrong_suffix_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    path.write_bytes(b"not parquet at all")
    found = problems(tmp_path, train={"path": str(path)}, columns={"input_ids": "ids"})
    assert found["/data/train/path"].startswith(f"{path} is not a readable Parquet file")


def test_file_with_an_unknown_suffix_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("a,b")
    message = problems(tmp_path, train={"path": str(tmp_path)})["/data/train/path"]
    assert message.startswith(f"{tmp_path}/rows.csv has an unknown ending; expected one of .parquet, ")
    assert "; convert it to Parquet, as the guide of data shows, or set its format field, or select" in message
    assert problems(tmp_path, train={"path": str(tmp_path), "format": "text"}) == {}


def test_json_file_is_rejected_with_the_command_that_converts_it(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text('[{"text": "a"}]')
    message = problems(tmp_path, train={"path": str(tmp_path)})["/data/train/path"]
    assert (
        "set format: jsonl if each line is an object, else write each row as one object in one line, as `jq" in message
    )


def test_mixed_file_formats_are_rejected(tmp_path: Path, parquet: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    assert "several formats (parquet, text)" in problems(tmp_path, train={"path": str(tmp_path)})["/data/train/path"]


def test_invalid_tokenizer_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    spec = parse(raw_spec(model={"tokenizer": str(tmp_path)}))
    _, (problem,) = check_model(spec, may_read(f"file://{tmp_path}"))
    assert problem.pointer == "/model/tokenizer"
    assert "tokenizer.json not found" in problem.message


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"hiden_size": 64}, "Qwen3Config has no field hiden_size; did you mean hidden_size?"),
        ({"model_type": "qwen33"}, "does not support model_type=qwen33; did you mean qwen3?"),
        ({"hidden_size": 33, "model_type": "llama", "head_dim": None}, "is not a valid causal language model"),
    ],
)
def test_model_that_cannot_be_built_is_rejected(config: dict[str, Any], message: str) -> None:
    _, (problem,) = check_model(parse(raw_spec(model={"config": TINY | config})), may_read())
    assert problem.pointer == "/model/config"
    assert message in problem.message


def test_buildable_model_has_no_problems() -> None:
    spec = parse(raw_spec(model={"config": TINY | {"rope_theta": 1e6, "attention_dropout": 0.1}}))
    shape, found = check_model(spec, may_read())
    assert shape is not None
    built = replace(shape, counts=None, tiles=None, built=None, rotated=None)
    assert (built, found) == (model_shape(spec.model), [])
    assert shape.counts is not None
    assert shape.parameters == shape.trained == model_shape(spec.model).parameters
    assert shape.layer_parameters == model_shape(spec.model).layer_parameters


def on_folder(folder: Path, *, tokenizer: str | None = None, columns: str = "text") -> JobSpec:
    model = {"config": None, "path": folder.as_uri(), "tokenizer": tokenizer}
    return parse(raw_spec(model=model, data={"columns": {columns: "x"}}))


def folder_problems(spec: JobSpec, root: Path) -> dict[str, str]:
    return {problem.pointer: problem.message for problem in check_model(spec, may_read(root.as_uri()))[1]}


def test_valid_model_folder_has_no_problems_and_gives_the_sizes(tmp_path: Path) -> None:
    write_tokenizer(write_model(tmp_path, num_attention_heads=8, file_size="20KB"))
    shape, found = check_model(on_folder(tmp_path), may_read(tmp_path.as_uri()))
    assert found == []
    assert shape is not None
    assert (shape.heads, shape.known) == (8, True)


def test_model_folder_outside_the_allowed_roots_is_not_opened(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("no JSON, as whoever opens it will say")
    message = folder_problems(on_folder(tmp_path), tmp_path / "models")["/model/path"]
    assert message.startswith(f"{tmp_path.as_uri()} lies outside the allowed storage roots (")


def test_model_file_linked_to_the_outside_is_not_opened(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "models" / "m")
    (folder / "config.json").rename(tmp_path / "config.json")
    (folder / "config.json").symlink_to(tmp_path / "config.json")
    assert "config.json is a link to a place" in folder_problems(on_folder(folder), tmp_path / "models")["/model/path"]


def test_model_path_must_be_one_folder(tmp_path: Path) -> None:
    write_model(tmp_path / "m")
    spec = parse(raw_spec(model={"config": None, "path": f"{tmp_path.as_uri()}/*"}))
    assert "is not a plain folder; give the file:// URI of one folder" in folder_problems(spec, tmp_path)["/model/path"]


def test_missing_or_mismatched_model_folder_is_rejected(tmp_path: Path) -> None:
    assert "matches no file; check the path" in folder_problems(on_folder(tmp_path / "m"), tmp_path)["/model/path"]
    config = (write_model(tmp_path / "small", hidden_size=16) / "config.json").read_bytes()
    (write_model(tmp_path / "m") / "config.json").write_bytes(config)
    message = folder_problems(on_folder(tmp_path / "m"), tmp_path)["/model/path"]
    assert "wrong shape: model.embed_tokens.weight is [384, 32], expected [384, 16], " in message


def test_text_needs_a_tokenizer_in_the_model_folder_or_a_path(tmp_path: Path) -> None:
    folder, other = write_model(tmp_path / "m"), tmp_path / "tokenizer"
    assert folder_problems(on_folder(folder), tmp_path) == {
        "/model/tokenizer": f"tokenizer.json not found in {folder.as_uri()}; set model.tokenizer to a folder with one, "
        "or give tokenised rows with columns.input_ids"
    }
    assert folder_problems(on_folder(folder, columns="input_ids"), tmp_path) == {}
    write_tokenizer(other)
    assert folder_problems(on_folder(folder, tokenizer=other.as_uri()), tmp_path) == {}


def test_tokenizer_larger_than_the_vocabulary_is_rejected(tmp_path: Path) -> None:
    write_tokenizer(write_model(tmp_path), words=400)
    assert folder_problems(on_folder(tmp_path), tmp_path) == {
        "/model/tokenizer": "the tokenizer's base vocabulary has token id 399, and the model has vocab_size=384; "
        "raise vocab_size to 400, or give the model's own tokenizer"
    }


def test_broken_tokenizer_is_rejected(tmp_path: Path) -> None:
    write_model(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    message = folder_problems(on_folder(tmp_path), tmp_path)["/model/tokenizer"]
    assert message.startswith(f"the tokenizer in {tmp_path} cannot be read: ")
    assert message.endswith("; save it again with transformers")


@pytest.mark.parametrize(
    ("written", "rule"),
    [
        ({"num_hidden_layers": 20_000}, "invalid num_hidden_layers=20000; expected at most 1024"),
        ({"num_labels": 3_000_000}, "invalid num_labels=3000000; expected at most 10000"),
        ({"vocab_size": 1 << 33}, "invalid vocab_size=8589934592; expected at most 16777216"),
        ({"rope_scaling": {"factor": 1 << 62}}, "invalid factor=4611686018427387904; expected at most 1099511627776"),
        (
            {"num_hidden_layers": 1_024, "hidden_size": 1 << 20, "intermediate_size": 1 << 20},
            "the config describes a model of 3,",
        ),
    ],
)
def test_oversized_model_is_rejected_before_it_is_built(written: dict[str, Any], rule: str) -> None:
    shape, (problem,) = check_model(parse(raw_spec(model={"config": TINY | written})), may_read())
    assert shape is None
    assert problem.pointer.startswith("/model/config")
    assert problem.message.startswith(rule)


def test_circular_links_are_a_problem_of_their_field(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    uri, policy = f"file://{tmp_path}/loop", may_read(tmp_path.as_uri())
    spec = parse(raw_spec(model={"config": None, "path": uri}, data={"train": {"path": uri}}))
    tokenizer = parse(raw_spec(model={"tokenizer": uri}, data={"train": {"path": "stdlib://"}}))
    found = [*check_model(spec, policy)[1], *check_data(spec, policy), *check_model(tokenizer, policy)[1]]
    assert [problem.pointer for problem in found] == ["/model/path", "/data/train/path", "/model/tokenizer"]
    assert all("symbolic links form a loop" in problem.message for problem in found)


@pytest.mark.timeout(20)
def test_fifo_in_a_model_folder_is_a_problem_of_its_field(tmp_path: Path) -> None:
    write_tokenizer(write_model(tmp_path / "m"))
    for name, pointer in (("config.json", "/model/path"), ("tokenizer.json", "/model/path")):
        folder = tmp_path / name / "m"
        shutil.copytree(tmp_path / "m", folder)
        (folder / name).unlink()
        os.mkfifo(folder / name)
        assert folder_problems(on_folder(folder), tmp_path)[pointer].startswith(f"{folder}/{name} is a FIFO, and only")


@pytest.mark.parametrize(
    ("file", "text", "pointer", "rule"),
    [
        ("config.json", "[" * 100_000, "/model/path", "config.json is nested too deeply"),
        ("config.json", "[]", "/model/path", "model_type not found"),
        ("tokenizer_config.json", "[" * 100_000, "/model/tokenizer", "tokenizer_config.json is nested too deeply"),
        ("tokenizer_config.json", "[]", "/model/tokenizer", "holds a JSON list, not an object"),
        ("tokenizer_config.json", '{"eos_token": {"lstrip": false}}', "/model/tokenizer", "eos_token has to be"),
        ("tokenizer_config.json", '{"gguf_file": "/etc/passwd"}', "/model/tokenizer", "sets gguf_file"),
        (
            "tokenizer_config.json",
            '{"fast_tokenizer_files": ["../a"]}',
            "/model/tokenizer",
            "sets fast_",
        ),
        ("tokenizer_config.json", '{"eos_token": [1]}', "/model/tokenizer", "eos_token has to be"),
        ("special_tokens_map.json", "[]", "/model/tokenizer", "holds a JSON list, not an object"),
        ("chat_template.jinja", "{% if a %}" * 3000 + "{% endif %}" * 3000, "/model/tokenizer", "nested too deeply"),
        ("chat_template.jinja", "{{ messages[0].none.none }}", "/model/tokenizer", None),
        ("chat_template.jinja", "{{ 1 // 0 }}", "/model/tokenizer", "division"),
        ("chat_template.jinja", "{{ 'a' * 20000000 }}", "/model/tokenizer", "makes 20000000 characters of 2 messages"),
    ],
)
def test_damaged_model_file_is_a_problem_of_its_field(
    tmp_path: Path, file: str, text: str, pointer: str, rule: str | None
) -> None:
    write_tokenizer(write_model(tmp_path))
    if file != "chat_template.jinja":
        (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    (tmp_path / file).write_text(text)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"messages": []}')
    data = {"train": {"path": str(rows)}, "columns": {"messages": "messages"}}
    spec = parse(raw_spec(model={"config": None, "path": tmp_path.as_uri()}, data=data))
    found = check_model(spec, may_read(tmp_path.as_uri()))[1]
    if rule is None:
        assert found == []
    else:
        ((at, message),) = [(problem.pointer, problem.message) for problem in found]
        assert at == pointer
        assert rule in message


@pytest.mark.parametrize(
    ("template", "rule"),
    [
        ("s3://bucket/a.jinja", "cannot be read as a chat template; give the file:// URI"),
        ("stdlib://a.jinja", "cannot be read as a chat template"),
        ("templates/a.jinja", "cannot be read as a chat template"),
        ("file://host/a.jinja", "names a host or a relative path"),
        ("{root}/*.jinja", "is not a plain file; give the file:// URI of one file, without wildcards"),
        ("{root}/none.jinja", "matches no file"),
        ("{root}", "cannot be read"),
        ("/etc/hostname", "lies outside the allowed storage roots"),
        ("a.jinja", "has no chat template named 'a.jinja'; it has none"),
    ],
)
def test_chat_template_that_is_not_one_readable_file_is_a_problem_of_its_field(
    tmp_path: Path, template: str, rule: str
) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "a.jinja").write_text("{{ messages[0].content }}")
    data = {"train": {"path": str(tmp_path)}, "columns": {"messages": "m"}}
    raw = raw_spec(
        model={"tokenizer": tmp_path.as_uri()}, data=data | {"chat_template": template.format(root=tmp_path)}
    )
    try:
        found = check_model(parse(raw), may_read(tmp_path.as_uri()))[1]
    except SpecError as error:
        found = error.problems
    ((at, message),) = [(problem.pointer, problem.message) for problem in found]
    assert at == "/data/chat_template"
    assert rule in message
