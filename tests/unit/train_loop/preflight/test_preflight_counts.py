"""Counts of data that preflight makes before a job runs."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.builders.folders import write_tokenizer
from tests.support.builders.specs import may_read, raw_spec
from train_loop.preflight.checks import answer


def test_preview_counts_the_first_rows_and_names_omitted_ones(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "t")
    (tmp_path / "t" / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    long = [*talk, {"role": "assistant", "content": "x" * 99}]
    rows = [{"m": talk}, {"m": long, "tools": [{}]}, {"m": talk[:1]}, {"m": "?"}]
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
    assert [note.partition(": ")[2].split(" rows ")[-1][:40] for note in found["notes"]][:3] == [
        "cannot be trained on, the first because ",
        "are longer than sequence_length=32 and a",
        "have no token that is trained and are dr",
    ]
    assert "the column 'tools' is not used" in found["notes"][3]
    assert (
        "does not use the tools of column 'tools'" in preview(columns={"messages": "m", "tools": "tools"})["notes"][-1]
    )


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
