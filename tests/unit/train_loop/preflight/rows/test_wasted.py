"""First rows that train nothing, with their causes, and columns that no role names."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.builders.specs import raw_spec
from tests.support.tokenizers import chats
from tests.support.tokenizers.chats import assistant, user
from train_loop.errors import DataError
from train_loop.preflight.preview import preview_source
from train_loop.spec import parse

OF_MESSAGES = {"messages": "m"}
GOOD: dict[str, Any] = {"m": [user("q"), assistant("a")]}


def notes(folder: Path, rows: list[dict[str, Any]] | pa.Table, columns: dict[str, Any], **parts: Any) -> list[str]:
    """Return the notes about a source, without its name. Raises DataError."""
    if not (folder / "t").exists():
        chats.write_tokenizer(folder / "t", template=chats.CHATML, eos="<|im_end|>")
    file = folder / ("a.parquet" if isinstance(rows, pa.Table) else "a.jsonl")
    if isinstance(rows, pa.Table):
        pq.write_table(rows, file)
    else:
        file.write_text("\n".join(map(json.dumps, rows)))
    data = {"train": {"path": str(file)}, "columns": columns, "sequence_length": 64} | parts.pop("data", {})
    model = ({} if "input_ids" in columns else {"tokenizer": str(folder / "t")}) | parts.pop("model", {})
    job = parse(raw_spec(data=data, model=model, **parts))
    found = preview_source(job, job.data.sources[0])
    return [] if found is None else [note.removeprefix(f"{file}: ") for note in found.notes]


ROLES = [{"role": "human", "content": "q"}, {"role": "gpt", "content": "a"}]
WASTED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "roles": (OF_MESSAGES, {"m": ROLES}, "its roles are human, gpt, and only assistant is trained; rename them"),
    "no answer": (OF_MESSAGES, {"m": [user("q")]}, "its roles are user, and only messages of the role assistant are"),
    "off": (
        OF_MESSAGES,
        {"m": [user("q"), assistant("a") | {"weight": 0}]},
        "its messages of the assistant have weight",
    ),
    "labels": ({"input_ids": "i", "labels": "l"}, {"i": [5, 6], "l": [-100, -100]}, "column 'l' has no label but -100"),
    "weight": (OF_MESSAGES | {"weight": "w"}, GOOD | {"w": 0}, "column 'w' is 0"),
}


@pytest.mark.parametrize("name", WASTED)
def test_rows_that_train_nothing_are_told_with_their_cause(tmp_path: Path, name: str) -> None:
    columns, row, cause = WASTED[name]
    good = {"i": [5, 6], "l": [5, 6]} if "i" in row else GOOD | ({"w": 1} if "w" in row else {})
    found = [note for note in notes(tmp_path, [row, good, row], columns) if "no token that is trained" in note]
    assert found[0].startswith("2 of the first 3 rows have no token that is trained")
    assert f", the first because {cause}" in found[0]


@pytest.mark.parametrize("name", WASTED)
def test_source_whose_first_rows_train_nothing_is_refused_with_the_cause(tmp_path: Path, name: str) -> None:
    columns, row, cause = WASTED[name]
    # More rows than the preview sees.
    with pytest.raises(DataError) as refused:
        notes(tmp_path, [row] * 70, columns)
    assert str(refused.value).startswith(f"none of the first 64 rows of {tmp_path}/a.jsonl trains anything: 64 of the")
    assert cause in str(refused.value)


def test_answers_that_truncation_cuts_off_are_told(tmp_path: Path) -> None:
    long = {"m": [user("q" * 99), assistant("a")]}
    found = notes(tmp_path, [long, GOOD], OF_MESSAGES, data={"on_long_rows": "truncate"})
    assert any("the first because the part of it that fits sequence_length has no answer" in note for note in found)


def test_equal_pairs_are_told(tmp_path: Path) -> None:
    rows = [{"a": "same", "b": "same"}, {"a": "x", "b": "y"}]
    columns = {"chosen": "a", "rejected": "b"}
    head: dict[str, Any] = {"head": {"reward": {}}}
    found = notes(tmp_path, rows, columns, model=head, data={"packing": False})
    assert found == [
        "1 of the first 2 rows have no token that is trained, the first because its chosen and rejected are equal"
    ]


def test_columns_without_a_role_are_told(tmp_path: Path) -> None:
    row = {"instruction": "i", "input": "x", "output": "o", "score": 3, "empty": ""}
    columns = {"prompt": "instruction", "response": "output"}
    expected = (
        "the column 'input' is not used, because no role in data.columns names it; join a column that belongs to the "
        "prompt to it"
    )
    assert notes(tmp_path, [row] * 2, columns) == [expected]
    table = pa.table({"instruction": ["i"], "input": ["x"], "output": ["o"], "score": [3]})
    assert notes(tmp_path, table, columns) == [expected]
    assert notes(tmp_path, [GOOD | {"system": "s", "id": "1"}], OF_MESSAGES) == [
        "the columns 'system', 'id' are not used, because no role in data.columns names them"
    ]


def test_sharegpt_is_refused_without_the_advice_to_skip_all_rows(tmp_path: Path) -> None:
    row = {"m": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}
    with pytest.raises(DataError) as refused:
        notes(tmp_path, [row] * 3, OF_MESSAGES)
    assert str(refused.value).startswith(
        f"{tmp_path}/a.jsonl, line 1: messages[0] has from and value, as in ShareGPT; rename them to role and content, "
        "human to user, and gpt to assistant"
    )
    assert "on_bad_rows" not in str(refused.value)
    skipped = notes(tmp_path, [row] * 70, OF_MESSAGES, data={"on_bad_rows": "skip"})
    assert skipped[0].startswith("64 of the first 64 rows cannot be trained on and are skipped, the first because")
