"""The part of the data for which preparation needs most memory, found before the job runs."""

import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.builders.searches import seeds
from tests.support.builders.specs import may_read, raw_spec
from train_loop.data.prepare.largest_read import largest_read
from train_loop.plan import TOKENIZER_TEXT, LargestRead
from train_loop.preflight.checks import answer
from train_loop.spec import parse

KIB = 1024


def found(folder: Path, *names: str, **data: Any) -> LargestRead:
    """Return the largest read of training data in some files of a folder."""
    paths = [f"file://{folder / name}" for name in names]
    raw = raw_spec(data={"train": {"path": paths[0] if len(paths) == 1 else paths}} | data)
    answered = answer({"spec": raw, "read_policy": may_read(f"file://{folder}").model_dump(), "parent": None})
    assert answered["problems"] == []
    return LargestRead(**answered["largest"])


def test_text_file_is_one_row(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a " * 200)
    (tmp_path / "b.md").write_text("b " * 4 * KIB)
    largest = found(tmp_path, "*")
    assert (largest.pointer, largest.file) == ("/data/train/path", str(tmp_path / "b.md"))
    assert (largest.row, largest.row_bytes, largest.group_bytes) == (8 * KIB, 143 * 8 * KIB, 0)


@pytest.mark.parametrize(("column", "factor"), [("text", 143), ("input_ids", 9)])
def test_longest_json_line_is_a_row(tmp_path: Path, column: str, factor: int) -> None:
    rows = [{column: "word " * 9 if column == "text" else [1, 2, 3]}] * 50
    lines = [json.dumps(row) for row in rows]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    (tmp_path / "b.jsonl").write_text("\n".join([json.dumps({column: rows[0][column] * 30}), lines[0]]))
    largest = found(tmp_path, "*.jsonl", columns={column: column})
    length = len((tmp_path / "b.jsonl").read_text().partition("\n")[0]) + 1
    assert (largest.file, largest.row, largest.row_bytes) == (str(tmp_path / "b.jsonl"), length, factor * length)


def test_row_group_is_held_with_a_batch_of_its_rows(tmp_path: Path) -> None:
    """Only the columns that are read count, and the groups of all files."""
    table = pa.table({"ids": [[7] * 64] * 4096, "text": ["x" * 500] * 4096, "other": [["y" * 99]] * 4096})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=512, compression="none", use_dictionary=False)
    pq.write_table(table, tmp_path / "b.parquet", row_group_size=4096, compression="none", use_dictionary=False)
    largest = found(tmp_path, "*.parquet", columns={"text": "text"})
    plain = 4096 * 504
    assert largest.file == str(tmp_path / "b.parquet")
    assert largest.packed == pytest.approx(plain, rel=0.01)
    assert largest.batch == pytest.approx(plain / 4, rel=0.01)
    assert largest.row == pytest.approx(504, rel=0.01)
    assert largest.group_bytes == largest.packed + 4 * largest.batch
    tokens = found(tmp_path, "a.parquet", columns={"input_ids": "ids"})
    assert (tokens.packed, tokens.row_bytes) == (tokens.batch, 0)
    assert tokens.group_bytes == 7 * tokens.batch


def test_long_line_is_found_wherever_it_is(tmp_path: Path) -> None:
    """Small files are read whole, and large ones at some places."""
    path, rng = tmp_path / "a.jsonl", random.Random(0)
    data = parse(raw_spec(data={"train": {"path": str(path)}})).data
    (source,) = data.sources
    short = b"x" * 512 + b"\n"
    for lines in (10, 8_000):
        for _ in range(seeds(20)):
            long = b"y" * (len(short) * lines // 5) + b"\n"
            place = rng.randrange(lines)
            path.write_bytes(short * place + long + short * (lines - place))
            size = path.stat().st_size
            largest = largest_read([("", source, data.columns_of(source))])
            assert largest is not None
            assert (largest.corpus, largest.unseen == 0) == (size, size < 1 << 21)
            assert len(long) - size // 16 <= largest.row <= len(long), (lines, place)
            assert largest.unseen <= size // 15


def test_compressed_lines_are_read_at_their_beginning(tmp_path: Path) -> None:
    line = json.dumps({"text": "word " * KIB}).encode() + b"\n"
    for count, all_seen in ((3, True), (4_000, False)):
        with pa.CompressedOutputStream(str(tmp_path / "a.jsonl.gz"), "gzip") as stream:
            stream.write(line * count)
        largest = found(tmp_path, "a.jsonl.gz")
        assert (largest.row, largest.unseen == 0) == (len(line), all_seen)


def test_text_of_parquet_is_that_of_its_columns_unless_files_are_not_opened(tmp_path: Path) -> None:
    texts = ["".join(random.Random(seed).choices("abcdefgh ", k=500)) for seed in range(200)]
    table = pa.table({"text": texts, "other": [["y" * 99]] * 200})
    for number in range(8):
        pq.write_table(table, tmp_path / f"{number}.parquet")
    columns = {"columns": {"text": "text"}}
    assert found(tmp_path, "*.parquet", **columns).corpus == pytest.approx(8 * 200 * 504, rel=0.05)
    pq.write_table(table, tmp_path / "8.parquet")
    assert found(tmp_path, "*.parquet", **columns).corpus > TOKENIZER_TEXT
