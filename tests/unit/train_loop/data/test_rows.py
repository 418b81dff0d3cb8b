"""Reads of raw files: every row once for any cut, and errors with the file's line numbers."""

import gzip
import json
from codecs import BOM_UTF8
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from train_loop.data.prepare.rows import Row, check_columns, cut, is_empty, locate, read_piece
from train_loop.data.prepare.sources import SourceFile, list_files
from train_loop.errors import DataError
from train_loop.spec import ColumnsSpec, SourceSpec

TEXT = ColumnsSpec(text="text")
lines = st.lists(st.one_of(st.text(max_size=30).map(lambda text: json.dumps({"text": text})), st.just("")), max_size=20)


def one_file(path: Path) -> SourceFile:
    (file,) = list_files(SourceSpec(path=str(path)))
    return file


def rows(path: Path, columns: ColumnsSpec = TEXT, *, size: int = 2**20) -> list[Row]:
    return [row for piece in cut([one_file(path)], size) for chunk in read_piece(piece, columns) for row in chunk.rows]


def zstd(content: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(content)
    packed: bytes = sink.getvalue().to_pybytes()
    return packed


PACKINGS: list[tuple[str, Any]] = [("", bytes), (".gz", gzip.compress), (".zst", zstd)]


@given(lines=lines, size=st.integers(1, 60), data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_line_is_read_once_for_any_cut_and_packing(
    tmp_path: Path, lines: list[str], size: int, data: st.DataObject
) -> None:
    def choose(values: list[Any]) -> Any:
        return data.draw(st.sampled_from(values))

    end, mark, (ending, pack) = choose(["\n", "\r\n"]), choose([b"", BOM_UTF8]), choose(PACKINGS)
    content = end.join(lines) + (end if lines and choose([True, False]) else "")
    written = mark * bool(lines and lines[0]) + content.encode()
    # A packed file may consist of several packed files, cut anywhere.
    part = choose(list(range(len(written) + 1)))
    packed = pack(written[:part]) + pack(written[part:])
    (tmp_path / f"a.jsonl{ending}").write_bytes(packed)
    found = rows(tmp_path / f"a.jsonl{ending}", size=size)
    assert [row.values for row in found] == [json.loads(line) for line in lines if line]
    assert all(json.loads(written[row.place :].split(b"\n")[0]) == row.values for row in found)


@pytest.mark.parametrize(("ending", "pack"), PACKINGS)
def test_invalid_line_is_reported_with_its_number(tmp_path: Path, ending: str, pack: Any) -> None:
    content = b'{"text": "a"}\n\nnot json\n[1]\n{"body": 1}\n{"text": "\xff"}\n{"text": "z"}'
    path = tmp_path / f"a.jsonl{ending}"
    path.write_bytes(pack(content))
    found = rows(path, size=10)
    bad = [row for row in found if row.wrong]
    places = locate([(one_file(path), row.place) for row in bad])
    messages = [f"{place}: {row.wrong}" for place, row in zip(places, bad, strict=True)]
    assert [line.removeprefix(f"{path}, ").split(";")[0].split(":")[0:2] for line in messages] == [
        ["line 3", " invalid JSON"],
        ["line 4", " not a JSON object"],
        ["line 5", " no column 'text'"],
        ["line 6", " invalid JSON"],
    ]
    assert [row.values for row in found if not row.wrong] == [{"text": "a"}, {"text": "z"}]


def test_compressed_text_is_one_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"one\ntwo"))
    assert [row.values for row in rows(tmp_path / "a.txt.gz")] == [{"text": "one\ntwo"}]
    (tmp_path / "b.txt.zst").write_bytes(zstd(BOM_UTF8 + b"three"))
    assert [row.values for row in rows(tmp_path / "b.txt.zst")] == [{"text": "three"}]


def test_parquet_rows_keep_their_number_across_row_groups(tmp_path: Path) -> None:
    table = pa.table({"text": [f"row {n}" for n in range(25)], "other": list(range(25))})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=10)
    found = rows(tmp_path / "a.parquet")
    assert len(cut([one_file(tmp_path / "a.parquet")], 1)) == 3
    assert [(row.place, row.values) for row in found] == [(n, {"text": f"row {n}"}) for n in range(25)]
    assert locate([(one_file(tmp_path / "a.parquet"), 17)]) == [f"{tmp_path}/a.parquet, row 17"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.parquet", b"not parquet", "is not a readable Parquet file"),
        ("a.jsonl.gz", b"not gzip", "is not a readable JSON lines file: .*incorrect header"),
        (
            "a.jsonl.gz",
            gzip.compress(b'{"text": "a"}' * 99, mtime=0)[:-9],
            "is not a readable JSON lines file: Truncated",
        ),
        ("a.txt.zst", zstd(b"some text" * 99)[:-3], "is not a readable text file: Truncated"),
    ],
)
def test_damaged_file_is_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=f"{name} {message}"):
        rows(tmp_path / name)


def test_file_without_a_column_is_named(tmp_path: Path) -> None:
    pq.write_table(pa.table({"body": ["x"]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a.parquet has no column 'text'; it has body; correct data.columns"):
        rows(tmp_path / "a.parquet")


def test_parquet_damage_is_found_by_checksums(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    plain = {"compression": "none", "use_dictionary": False, "write_statistics": False}
    pq.write_table(pa.table({"text": ["abc" * 500]}), path, write_page_checksum=True, **plain)
    content = bytearray(path.read_bytes())
    content[800:810] = b"x" * 10
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"is not a readable Parquet file: .*CRC checksum"):
        rows(path)


def test_invalid_utf8_makes_only_its_row_invalid(tmp_path: Path) -> None:
    column = pa.array([b"good", b"\xff\xfe", b"fine"]).view(pa.string())
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    found = rows(tmp_path / "a.parquet")
    assert [row.values.get("text") for row in found] == ["good", None, "fine"]
    assert [row.wrong for row in found] == [None, "column 'text' holds bytes that are not UTF-8", None]


def test_conversation_with_invalid_utf8_is_an_invalid_row(tmp_path: Path) -> None:
    contents = pa.array([b"good", b"\xff\xfe"]).view(pa.string())
    turns = pa.StructArray.from_arrays([pa.array(["user", "user"]), contents], ["role", "content"])
    pq.write_table(pa.table({"talk": pa.ListArray.from_arrays([0, 1, 2], turns)}), tmp_path / "a.parquet")
    good, bad = rows(tmp_path / "a.parquet", ColumnsSpec(messages="talk"))
    assert good.values["talk"] == [{"role": "user", "content": "good"}]
    assert bad.wrong == "column 'talk' holds bytes that are not UTF-8"


def test_null_keys_added_by_parquet_are_dropped(tmp_path: Path) -> None:
    calls = [{"name": "sum", "arguments": {"a": 1}}, {"name": "max", "arguments": {"b": 2}}]
    talks = [[{"role": "assistant", "tool_calls": [call]}] for call in calls]
    pq.write_table(pa.table({"talk": talks}), tmp_path / "a.parquet")
    assert [row.values["talk"] for row in rows(tmp_path / "a.parquet", ColumnsSpec(messages="talk"))] == talks


def test_long_parquet_rows_are_yielded_in_small_chunks(tmp_path: Path) -> None:
    texts = [str(n % 10) * 2**20 for n in range(20)]
    pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet")
    (piece,) = cut([one_file(tmp_path / "a.parquet")], 1)
    chunks = list(read_piece(piece, TEXT))
    assert max(len(chunk.rows) for chunk in chunks) <= 4
    assert [(row.place, row.values["text"]) for chunk in chunks for row in chunk.rows] == list(enumerate(texts))


def test_too_deep_json_is_an_invalid_row(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": ' + "[" * 100_000 + "\n" + '{"text": "a"}')
    first, second = rows(tmp_path / "a.jsonl")
    assert str(first.wrong).startswith("invalid JSON")
    assert second.values == {"text": "a"}


def test_bytes_read_of_a_piece_grow_to_its_size(tmp_path: Path) -> None:
    lines = b"".join(json.dumps({"text": "x" * 1000, "n": n}).encode() + b"\n" for n in range(12_000))
    (tmp_path / "a.jsonl").write_bytes(lines)
    (tmp_path / "b.jsonl.zst").write_bytes(zstd(lines))
    pq.write_table(pa.table({"text": ["x"] * 5000}), tmp_path / "c.parquet")
    for path in tmp_path.iterdir():
        (piece,) = cut([one_file(path)], 2**30)
        read = [chunk.read for chunk in read_piece(piece, TEXT)]
        assert len(read) > 2
        assert read == sorted(read)
        assert 0 < read[0] <= read[-1] == piece.bytes


def test_file_is_empty_unless_a_line_has_content(tmp_path: Path) -> None:
    for name, content in {"a.jsonl": b"\n \n", "b.jsonl.gz": gzip.compress(b""), "c.txt": b""}.items():
        (tmp_path / name).write_bytes(content)
        assert is_empty(one_file(tmp_path / name))
    (tmp_path / "d.jsonl").write_bytes(b"\n\nx")
    assert not is_empty(one_file(tmp_path / "d.jsonl"))


def test_empty_files_among_others_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").touch()
    pq.write_table(pa.table({"text": ["x"]}), tmp_path / "b.parquet")
    pieces = cut(list_files(SourceSpec(path=str(tmp_path))), 100)
    assert [piece.file.name for piece in pieces] == ["b.parquet"]


def test_first_row_must_be_valid_unless_invalid_rows_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'\noops\n{"text": "x"}\n'))
    with pytest.raises(DataError, match=r"gz, line 2: invalid JSON: .*; correct the row, or set on_bad_rows: skip$"):
        check_columns([one_file(tmp_path / "a.jsonl.gz")], TEXT)
    check_columns([one_file(tmp_path / "a.jsonl.gz")], TEXT, skip=True)
    with pytest.raises(DataError, match="line 2: invalid JSON"):
        check_columns([one_file(tmp_path / "a.jsonl.gz")], ColumnsSpec(text="body"), skip=True)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"c": "x", "c": "y"}', "invalid JSON: an object has the key 'c' 2 times"),
        ('{"c": "x", "d": [{"e": 1, "e": 1}]}', "invalid JSON: an object has the key 'e' 2 times"),
        ('{"c": "x", "d": NaN}', "invalid JSON: NaN is not a number in JSON; write null"),
        ('{"c": "x", "d": -Infinity}', "invalid JSON: -Infinity is not a number in JSON; write null"),
        ('{"c": "x\t"}', "invalid JSON: Invalid control character at column 9"),
        ('{"c": 1' + "0" * 5000 + "}", "invalid JSON: a number has more than 4300 digits; write it as text"),
        ('{"c": ' + "[" * 100_000, "invalid JSON: it is nested too deeply; write it with fewer levels"),
        (b'{"c": "\xfc"}', "invalid JSON: byte 8 of the line is not UTF-8; save the file as UTF-8"),
        (
            '{"c": "x"}'.encode("utf-16-le"),
            "invalid JSON: the line has null bytes, as UTF-16 has; save the file as UTF-8",
        ),
        (
            "[ ",
            "invalid JSON: Expecting value at column 3; write each row as one object in one line, as `jq -c '.[]'` "
            "writes the objects of a list",
        ),
        ("{\r\n", "invalid JSON: Expecting property name enclosed in double quotes at column 2; write each row as on"),
        ('{"c": "x"\n', "invalid JSON: Expecting ',' delimiter at column 10"),
        (
            '[{"c": "x"}]',
            "not a JSON object; write each row as one object in one line, as `jq -c '.[]'` writes the objects",
        ),
        ("7", "not a JSON object; write each row as one object in one line"),
    ],
)
def test_invalid_json_is_an_invalid_row(tmp_path: Path, line: str | bytes, reason: str) -> None:
    given = line if isinstance(line, bytes) else line.encode()
    (tmp_path / "a.jsonl").write_bytes(b'{"c": "fine", "C": 1}\n' + given)
    good, bad = rows(tmp_path / "a.jsonl", ColumnsSpec(text="c"))
    assert good.values["c"] == "fine"
    assert str(bad.wrong).startswith(reason)
