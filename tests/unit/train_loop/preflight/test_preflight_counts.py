"""Counts of data that preflight makes before a job runs."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.builders.folders import write_model, write_tokenizer
from tests.support.builders.specs import infer_spec, may_read, raw_spec
from tests.support.tokenizers import chats
from train_loop.data.text.tokenizer import load_tokenizer
from train_loop.preflight.checks import answer


def test_preview_counts_the_first_rows_and_names_omitted_ones(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "t")
    (tmp_path / "t" / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    long = [*talk, {"role": "assistant", "content": "x" * 99}]
    rows = [{"m": json.dumps(talk)}, {"m": long, "tools": [{}]}, {"m": talk[:1]}, {"m": "?"}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = {"train": {"path": f"{tmp_path}/a.jsonl"}, "columns": {"messages": "m"}, "on_bad_rows": "skip"}
    raw = raw_spec(data=data, model={"tokenizer": str(tmp_path / "t")})

    def preview(**data: Any) -> dict[str, Any]:
        question = {
            "spec": raw | {"data": raw["data"] | data},
            "read_policy": may_read(f"file://{tmp_path}").model_dump(),
            "parent": None,
        }
        found = answer(question)
        assert found["problems"] == []
        (only,) = found["preview"]
        return dict(only)

    found = preview()
    assert {name: found[name] for name in ("rows", "bad_rows", "long_rows", "untrained_rows", "on_long_rows")} == {
        "rows": 4,
        "bad_rows": 1,
        "long_rows": 1,
        "untrained_rows": 1,
        "on_long_rows": "drop",
    }
    assert [note.partition(": ")[2].split(" rows ", 1)[-1][:40] for note in found["notes"]][:3] == [
        "cannot be trained on and are skipped, th",
        "are longer than sequence_length=32 and a",
        "have no token that is trained and are dr",
    ]
    assert f"the first because {tmp_path}/a.jsonl, line 4: messages must be" in found["notes"][0]
    assert "the column 'tools' is not used" in found["notes"][3]
    assert found["notes"][4].endswith("1 of the first 4 rows have messages as JSON text; they are read as lists")
    assert (
        "does not use the tools of column 'tools'" in preview(columns={"messages": "m", "tools": "tools"})["notes"][3]
    )


def test_tokenised_rows_need_no_tokenizer_in_the_folder_of_their_model(tmp_path: Path) -> None:
    pq.write_table(pa.table({"ids": [[1, 2], [3]]}), tmp_path / "a.parquet")
    folder = write_model(tmp_path / "m")
    raw = raw_spec(
        model={"config": None, "path": folder.as_uri()},
        data={"train": {"path": f"{tmp_path}/a.parquet"}, "columns": {"input_ids": "ids"}, "packing": False},
    )
    found = answer({"spec": raw, "read_policy": may_read(f"file://{tmp_path}").model_dump(), "parent": None})
    assert (found["problems"], [source["rows"] for source in found["preview"]]) == ([], [2])


@pytest.mark.parametrize(
    ("rule", "packing", "samples", "exact"),
    [(None, False, 5, True), ("truncate", False, 3, True), ("drop", False, 2, True), (None, True, 5, False)],
)
def test_tokenised_rows_are_counted_by_their_lengths(
    tmp_path: Path, rule: str | None, packing: bool, samples: int, exact: bool
) -> None:
    pq.write_table(pa.table({"ids": [[1] * 32, [1] * 70, [1], []]}), tmp_path / "a.parquet")
    data = {"train": {"path": f"{tmp_path}/a.parquet"}, "columns": {"input_ids": "ids"}}
    raw = raw_spec(data=data | {"on_long_rows": rule, "packing": packing})
    assert answer({"spec": raw, "read_policy": may_read(f"file://{tmp_path}").model_dump(), "parent": None})[
        "count"
    ] == {
        "samples": samples,
        "exact": exact,
    }


CHAT = "{% for m in messages %}{{ m.content }}{% endfor %}"


def ask(tmp_path: Path, data: dict[str, Any], *, tokenizer: bool = True) -> dict[str, Any]:
    """Return preflight's answer for data below a folder, with a tokenizer of 300 tokens in its folder `t`."""
    model = {"tokenizer": str(tmp_path / "t")} if tokenizer else {}
    raw = raw_spec(data=data, model=model)
    found = answer({"spec": raw, "read_policy": may_read(f"file://{tmp_path}").model_dump(), "parent": None})
    # Its process answers in JSON, which has none of numpy's types.
    read: dict[str, Any] = json.loads(json.dumps(found))
    return read


@pytest.mark.parametrize(
    ("columns", "rows", "reason"),
    [
        ({"text": "c"}, [{"c": "x"}, {"c": 1}], "line 2: column 'c' holds 1 where text is needed"),
        ({"text": "c"}, [{"c": "x"}, "oops"], "line 2: not a JSON object"),
        ({"text": "c"}, [{"c": "x"}] * 40 + [{"d": 1}], "line 41: no column 'c'; it has d"),
        (
            {"prompt": "p", "response": "c"},
            [{"p": "x", "c": "x"}, {"p": "x", "c": None}],
            "line 2: column 'c' holds null",
        ),
        (
            {"messages": "c"},
            [{"c": [{"role": "assistant", "content": "x"}]}, {"c": []}],
            "line 2: messages must be a non-e",
        ),
        ({"input_ids": "c"}, [{"c": [1]}, {"c": [1, 384]}], "line 2: column 'c' holds 384 at position 1, which is not"),
        ({"input_ids": "c"}, [{"c": [1]}, {"c": [1.5]}], "line 2: column 'c' holds 1.5 at position 0, where a whole"),
        ({"text": "c", "weight": "w"}, [{"c": "x", "w": 1}, {"c": "x", "w": -1}], "line 2: column 'w' holds -1 where"),
    ],
)
def test_bad_row_among_the_first_is_a_problem_or_with_skip_a_warning(
    tmp_path: Path, columns: dict[str, str], rows: list[Any], reason: str
) -> None:
    write_tokenizer(tmp_path / "t")
    (tmp_path / "t" / "chat_template.jinja").write_text(CHAT)
    file = tmp_path / "a.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    data = {"train": {"path": str(file)}, "columns": columns}
    reads_text = "input_ids" not in columns
    (problem,) = ask(tmp_path, data, tokenizer=reads_text)["problems"]
    assert problem["pointer"] == "/data/train/path"
    assert problem["message"].startswith(f"{file}, {reason}")
    assert problem["message"].endswith("; correct the row, or set on_bad_rows: skip")
    found = ask(tmp_path, data | {"on_bad_rows": "skip"}, tokenizer=reads_text)
    assert found["problems"] == []
    assert any(f"are skipped, the first because {file}, {reason}" in note for note in found["preview"][0]["notes"])


def test_bad_row_of_eval_data_is_a_problem_of_its_source(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"c": [1]}')
    (tmp_path / "b.jsonl").write_text('{"c": [1]}\n{"c": null}')
    sources = [{"path": f"{tmp_path}/{name}.jsonl"} for name in "ab"]
    raw = raw_spec(
        data={"train": sources[0], "eval": sources, "columns": {"input_ids": "c"}}, training={"eval_steps": 1}
    )
    found = answer({"spec": raw, "read_policy": may_read(f"file://{tmp_path}").model_dump(), "parent": None})
    assert [problem["pointer"] for problem in found["problems"]] == ["/data/eval/1/path"]


def test_rows_are_judged_before_a_tokenizer_is_trained_on_them(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"c": "x", "w": 1}\n{"c": "y", "w": -1}\n{"c": 7}\n{"d": 1}')
    data = {"train": {"path": f"{tmp_path}/a.jsonl"}, "columns": {"text": "c"}}
    (problem,) = ask(tmp_path, data, tokenizer=False)["problems"]
    assert "a.jsonl, line 3: column 'c' holds 7 where text is needed; correct the row" in problem["message"]
    (problem,) = ask(tmp_path, data | {"columns": {"text": "c", "weight": "w"}}, tokenizer=False)["problems"]
    assert "a.jsonl, line 2: column 'w' holds -1 where a weight of 0 or more is needed" in problem["message"]
    found = ask(tmp_path, data | {"on_bad_rows": "skip"}, tokenizer=False)
    assert found["problems"] == []
    assert "2 of the first 4 rows cannot be trained on and are skipped" in found["preview"][0]["notes"][0]


def test_row_that_on_long_rows_refuses_is_a_problem(tmp_path: Path) -> None:
    pq.write_table(pa.table({"c": [[1], [1] * 33]}), tmp_path / "a.parquet")
    data = {"train": {"path": f"{tmp_path}/a.parquet"}, "columns": {"input_ids": "c"}, "on_long_rows": "fail"}
    (problem,) = ask(tmp_path, data, tokenizer=False)["problems"]
    assert (
        "a.parquet, row 1 has 33 tokens, more than sequence_length=32, and on_long_rows is fail" in problem["message"]
    )


@pytest.mark.parametrize(
    ("rule", "begins", "ends"), [("truncate", True, False), ("truncate_left", True, True), ("split", True, True)]
)
def test_preview_describes_the_documents_after_the_rule_for_long_rows(
    tmp_path: Path, rule: str, begins: bool, ends: bool
) -> None:
    chats.write_tokenizer(tmp_path / "t", template="{{ bos_token }}" + chats.CHATML, bos="<s>", eos="<|im_end|>")
    (tmp_path / "a.jsonl").write_text(json.dumps({"m": [chats.user("q"), chats.assistant("a" * 50)]}))
    data = {"train": {"path": f"{tmp_path}/a.jsonl"}, "columns": {"messages": "m"}, "on_long_rows": rule}
    found = ask(tmp_path, data)
    assert found["problems"] == []
    (only,) = found["preview"]
    assert only["begins_with_bos"] == begins
    warnings = [note for note in only["notes"] if "no end token of any turn is trained" in note]
    assert len(warnings) == (0 if ends else 1)
    assert all(note.endswith("; on_long_rows: truncate cuts the ends of 1 rows") for note in warnings)


@pytest.mark.parametrize(
    ("columns", "row", "options", "reason"),
    [
        ({"input_ids": "c"}, {"c": []}, {}, "all rows are empty"),
        (
            {"input_ids": "c"},
            {"c": [1] * 40},
            {"on_long_rows": "drop"},
            "longer than sequence_length=32 and are dropped",
        ),
        ({"messages": "c"}, {"c": [chats.user("q")]}, {}, "have no token that is trained and are dropped"),
        ({"text": "c"}, {"c": 1}, {"on_bad_rows": "skip"}, "cannot be trained on and are skipped"),
    ],
)
def test_source_of_which_no_row_is_left_is_a_problem(
    tmp_path: Path, columns: dict[str, str], row: dict[str, Any], options: dict[str, str], reason: str
) -> None:
    write_tokenizer(tmp_path / "t")
    (tmp_path / "t" / "chat_template.jinja").write_text(CHAT)
    (tmp_path / "a.jsonl").write_text("\n".join([json.dumps(row)] * 64))
    data = {"train": {"path": f"{tmp_path}/a.jsonl"}, "columns": columns} | options
    (problem,) = ask(tmp_path, data, tokenizer="input_ids" not in columns)["problems"]
    assert problem["pointer"] == "/data/train/path"
    assert problem["message"].startswith(f"{tmp_path}/a.jsonl holds no tokens: ")
    assert reason in problem["message"]
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write("\n" + json.dumps(row))
    # More rows than the preview has seen: others may be good, unless these train nothing.
    found = ask(tmp_path, data, tokenizer="input_ids" not in columns)["problems"]
    assert [reason in problem["message"] for problem in found] == [True] * ("messages" in columns)


def test_very_long_rows_are_not_previewed(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "t")
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"c": text}) for text in ("x", "y" * 5 * 2**20, "z")))
    (only,) = ask(tmp_path, {"train": {"path": f"{tmp_path}/a.jsonl"}, "columns": {"text": "c"}})["preview"]
    assert only["rows"] == 1


def test_tokenizer_with_an_id_beyond_the_vocabulary_is_found_in_the_first_rows(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "t")
    content = json.loads((tmp_path / "t" / "tokenizer.json").read_text())
    content["model"]["vocab"]["z"] = 900
    (tmp_path / "t" / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "a.jsonl").write_text('{"c": "x"}\n{"c": "yz"}')
    (problem,) = ask(tmp_path, {"train": {"path": f"{tmp_path}/a.jsonl"}, "columns": {"text": "c"}})["problems"]
    assert "900" in problem["message"]
    assert "raise vocab_size to 901" in problem["message"]


def test_rows_that_end_with_eos_are_reported(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "t")
    eos = str(load_tokenizer(str(tmp_path / "t")).variables["eos_token"])
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in (f"a{eos}", "b")))
    data = {"train": {"path": f"{tmp_path}/a.jsonl"}, "columns": {"text": "text"}}
    raw = raw_spec(data=data, model={"tokenizer": str(tmp_path / "t")})
    policy = may_read(f"file://{tmp_path}").model_dump()
    (found,) = answer({"spec": raw, "read_policy": policy, "parent": None})["preview"]
    assert found["notes"][0].endswith("1 of the first 2 rows end with EOS already and get no second one")


@pytest.mark.parametrize("kind", ["text", "prompt", "anchor", "generate"])
def test_rows_that_begin_with_bos_are_reported(tmp_path: Path, kind: str) -> None:
    folder = chats.write_surrounding(tmp_path / "t", "<s> $A")
    rows = [{"t": "<s>a", "r": "b"}, {"t": "a", "r": "<s>b"}, {"t": "a", "r": "b"}]
    columns = {"prompt": {"prompt": "t", "response": "r"}, "anchor": {"anchor": "t", "positive": "r"}}
    # A column that no role names would be told.
    written = rows if kind in columns else [{"t": row["t"]} for row in rows]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, written)))
    data = {"train": {"path": f"{tmp_path}/a.jsonl"}, "columns": columns.get(kind, {"text": "t"}), "packing": False}
    model: dict[str, Any] = {"tokenizer": folder}
    if kind == "anchor":
        raw = raw_spec(data=data, model=model | {"head": {"embedding": {"group": 1}}})
    elif kind == "generate":
        raw = infer_spec(data=data, model=model, infer={"output": "generate"})
    else:
        raw = raw_spec(data=data, model=model)
    policy = may_read(f"file://{tmp_path}").model_dump()
    found = answer({"spec": raw, "read_policy": policy, "parent": None})
    count = 2 if kind == "anchor" else 1
    notes = [note for (only,) in [found["preview"]] for note in only["notes"]]
    assert [note.rpartition(": ")[2] for note in notes] == [
        f"{count} of the first 3 rows begin with BOS already and get no second one"
    ]
