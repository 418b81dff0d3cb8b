"""Lines and columns of the problems of YAML specs."""

import json
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.builders.specs import raw_spec
from train_loop import run
from train_loop.prepare import command as prepare
from train_loop.spec import Problem, SpecError, add_positions, parse_text, read_positions
from train_loop.spec.text import MAX_DEPTH, MAX_NODES, MAX_YAML_BYTES

TEXT = """\
# a comment
name: tiny
model:
    config: {model_type: qwen3, "a/b": 1}
data:
    train:
        - path: /a.jsonl
        - path: /b.jsonl
training:
    learning_rate: high
    steps: 3
"""


def problems_of(text: str) -> list[Problem]:
    with pytest.raises(SpecError) as refused:
        parse_text(text)
    return add_positions(refused.value.problems, text)


def test_read_positions_returns_keys_and_list_items() -> None:
    found = read_positions(TEXT)
    assert found[""] == found["/name"] == (2, 1)
    assert found["/model/config"] == (4, 5)
    assert found["/model/config/a~1b"] == (4, 33)
    assert found["/data/train/1"] == found["/data/train/1/path"] == (8, 11)
    assert found["/training/steps"] == (11, 5)


def test_rule_violations_name_the_line_and_column_of_their_keys() -> None:
    found = {one.pointer: (one.line, one.column) for one in problems_of(TEXT)}
    assert found == {"/training/learning_rate": (10, 5), "/training/steps": (11, 5)}


@pytest.mark.parametrize(
    ("pointer", "position"),
    [
        ("/training/max_steps", (9, 1)),
        ("/data/train/7/path", (6, 5)),
        ("/scaling/num_workers", (2, 1)),
        ("", (2, 1)),
        ("/model/config/model_type/x", (4, 14)),
    ],
)
def test_missing_field_gets_the_position_of_its_nearest_parent(pointer: str, position: tuple[int, int]) -> None:
    (found,) = add_positions([Problem(pointer, "wrong")], TEXT)
    assert found == Problem(pointer, "wrong", *position)


@pytest.mark.parametrize(
    ("text", "position", "message"),
    [
        ("a: 1\nb: *a\n", (2, 4), "line 2, column 4: aliases (*name) are not allowed"),
        ("a: 1\na: 2\n", (2, 1), "line 2, column 1: a is given twice"),
        ("a: 1\n---\nb: 2\n", (2, 1), "line 2, column 1: a second document begins"),
        ("a: [1\n", (2, 1), "the text is neither YAML nor JSON: while parsing a flow sequence"),
        ("ä: {b: !x 1}\n", (1, 8), "line 1, column 8: !x is not a tag"),
    ],
)
def test_syntax_errors_keep_their_message_and_have_a_position(
    text: str, position: tuple[int, int], message: str
) -> None:
    (problem,) = problems_of(text)
    assert (problem.line, problem.column) == position
    assert problem.message.startswith(message)


def test_json_of_one_line_has_no_positions() -> None:
    text = json.dumps(raw_spec(training={"steps": 3}))
    assert read_positions(text) == read_positions(f"{text}\n".encode()) == {}
    assert [one.line for one in problems_of(text)] == [None]


def test_json_of_several_lines_has_positions_of_its_keys() -> None:
    found = read_positions('{\n  "name":"a",\n\t"data": {"train": [\n    {"path": "\\u00e4\\/b"}]}\n}')
    assert (found["/name"], found["/data/train/0/path"]) == ((2, 3), (4, 6))


def test_positions_keep_the_limits_of_yaml() -> None:
    assert read_positions("a: " + "x" * MAX_YAML_BYTES) == {}
    assert len(read_positions("a:\n" + "- 1\n" * (2 * MAX_NODES))) <= MAX_NODES
    assert len(read_positions("x: " + "[" * 1000)) <= MAX_DEPTH + 2
    assert read_positions("a: 1\nb: &b 2\nc: [*b, 3]\nd: 1\n").keys() == {"", "/a", "/b", "/c", "/c/0", "/c/1", "/d"}


@pytest.mark.parametrize("text", [b"", b"\xff\xfe", b"\x00", b"# only a comment", "\ud800"])
def test_text_without_fields_has_no_positions(text: str | bytes) -> None:
    assert read_positions(text) == {}


def test_utf16_positions_count_characters() -> None:
    assert read_positions("ä: {b: 1}\n".encode("utf-16"))["/ä/b"] == (1, 5)


@pytest.mark.parametrize("entry_point", [run, prepare], ids=["run", "prepare"])
def test_entry_points_name_line_and_column_of_every_problem(
    entry_point: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("name: Upper\nmodel: {path: file:///m}\ntraining:\n  learning_rat: 1.0e-3\n")
    monkeypatch.setattr(
        "sys.argv", ["program", str(file), "--run-dir", str(tmp_path / "run")][: 4 if entry_point is run else 2]
    )
    with pytest.raises(SystemExit) as exited:
        entry_point.main()
    lines = str(exited.value.code).splitlines()
    assert f"{file}:4:3: training.learning_rat: no such field" in "\n".join(lines)
    assert [line for line in lines if not line.startswith(f"{file}:")] == []
    assert len(lines) > 1
