"""Parquet columns of every Arrow layout: read as pyarrow's own values, or refused by name before a row is read."""

import random
import re
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.builders.searches import seeds
from train_loop.data.prepare.columns import check_schema
from train_loop.data.prepare.rows import Row, check_columns, cut, is_empty, read_piece
from train_loop.data.prepare.sources import list_files
from train_loop.data.stream.local import _whole
from train_loop.errors import DataError
from train_loop.preflight.sample_count import _samples
from train_loop.spec import ColumnsSpec, DataSpec, SourceSpec

TEXT = ColumnsSpec(text="c")
Make = Callable[[], Any]


class Layouts:
    """Random Arrow types, each with a function that makes values as a row should have them."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def text(self, *others: pa.DataType) -> tuple[pa.DataType, Make]:
        width = self.random.randint(1, 6)
        fixed, plain = pa.binary(width), [pa.string(), pa.large_string(), pa.binary(), pa.large_binary()]
        packed = pa.dictionary(
            self.random.choice([pa.int8(), pa.uint16(), pa.int64()]), self.random.choice([*plain, fixed])
        )
        kind = self.random.choice([*plain, fixed, packed, *others])
        is_fixed = kind == fixed or (kind == packed and packed.value_type == fixed)
        letters = "abc" if is_fixed else "aü漢🙂 \0"
        return kind, lambda: "".join(self.random.choices(letters, k=width if is_fixed else self._length()))

    def integer(self) -> tuple[pa.DataType, Make]:
        kind, most = self.random.choice(
            [
                (pa.int8(), 127),
                (pa.uint8(), 255),
                (pa.int16(), 2**15 - 1),
                (pa.uint32(), 2**32 - 1),
                (pa.int64(), 2**60),
            ]
        )
        return kind, lambda: self.random.randint(0, most)

    def scalar(self) -> tuple[pa.DataType, Make]:
        others: list[tuple[pa.DataType, Make]] = [
            (pa.bool_(), lambda: self.random.random() < 0.5),
            (pa.float64(), self.random.random),
            (pa.float16(), lambda: self.random.choice([0.5, -2.0])),
            (pa.null(), lambda: None),
        ]
        texts = [self.text() for _ in range(3)]
        return self.random.choice([*texts, self.integer(), self.random.choice(others)])

    def listed(self, item: tuple[pa.DataType, Make]) -> tuple[pa.DataType, Make]:
        kind, make = item
        size = self.random.randint(1, 3)
        makers = [pa.list_, pa.large_list, pa.list_view, pa.large_list_view, lambda of: pa.list_(of, size)]
        number = self.random.randrange(len(makers))
        # Null tokens make a row bad.
        one = make if pa.types.is_integer(kind) else lambda: self._maybe(make)
        return makers[number](kind), lambda: [one() for _ in range(size if number == 4 else self._length())]

    def struct(self, depth: int) -> tuple[pa.DataType, Make]:
        fields = {name: self.any(depth - 1) for name in self.random.sample(["role", "content", "a.b", "A", "a"], 3)}

        def make() -> dict[str, Any]:
            made = {name: of() for name, (_, of) in fields.items() if self.random.random() < 0.7}
            return {name: value for name, value in made.items() if value is not None}

        return pa.struct([(name, kind) for name, (kind, _) in fields.items()]), make

    def beside(self, kind: pa.DataType) -> pa.DataType:
        """Return a struct with a field of this type among others."""
        fields = [("u", self.scalar()[0]), ("v", kind), ("w", self.any(2)[0])]
        self.random.shuffle(fields)
        return pa.struct(fields)

    def map(self, depth: int) -> tuple[pa.DataType, Make]:
        (keys, key), (kind, item) = self.text(), self.any(depth - 1)
        return pa.map_(keys, kind), lambda: {key(): self._maybe(item) for _ in range(self._length())}

    def any(self, depth: int) -> tuple[pa.DataType, Make]:
        if depth <= 0:
            return self.scalar()
        shape = self.random.choice(["scalar", "list", "struct", "map"])
        if shape == "list":
            return self.listed(self.any(depth - 1))
        return self.scalar() if shape == "scalar" else self.struct(depth) if shape == "struct" else self.map(depth)

    def column(self) -> tuple[ColumnsSpec, pa.DataType, Make]:
        """Return a spec that names the column c, its type, and its values."""
        role = self.random.choice(["text", "tokens", "messages", "messages", "messages"])
        if role == "text":
            # pyarrow writes views only outside structs.
            return TEXT, *self.text(pa.string_view(), pa.binary_view())
        if role == "tokens":
            return ColumnsSpec(input_ids="c"), *self.listed(self.integer())
        return ColumnsSpec(messages="c"), *self.listed(self.struct(3) if self.random.random() < 0.5 else self.map(3))

    def write(self, folder: Path, array: pa.Array) -> None:
        """Write an array as column c of two files with other columns in any order, and a third file without rows.

        Nothing is read from the columns of a file without rows: they may be of any type, or missing.
        """
        numbers, blobs = pa.array(range(len(array))), pa.array([uuid.uuid4().bytes] * len(array), pa.binary(16))
        stop = self.random.randint(1, len(array) - 1)
        empty = self.random.choice([{}, {"c": pa.array([], self.random.choice([array.type, *REFUSED[:4]]))}])
        self.write_file(folder / "empty.parquet", pa.table(empty))
        for name, part in (("a", slice(0, stop)), ("b", slice(stop, None))):
            columns = [("c", array), ("d", numbers), ("d", blobs), ("c.d", numbers)]
            self.random.shuffle(columns)
            arrays = [column[part] for _, column in columns]
            self.write_file(folder / f"{name}.parquet", pa.Table.from_arrays(arrays, names=[n for n, _ in columns]))

    def write_file(self, path: Path, table: pa.Table) -> None:
        pq.write_table(
            table,
            path,
            row_group_size=self.random.randint(1, 9),
            store_schema=self.random.random() < 0.8,
            use_dictionary=self.random.random() < 0.5,
            data_page_version=self.random.choice(["1.0", "2.0"]),
        )

    def _length(self) -> int:
        return self.random.randint(0, 3)

    def _maybe(self, make: Make) -> Any:
        return None if self.random.random() < 0.2 else make()


def stored(value: Any, kind: pa.DataType) -> Any:
    """Return a value as pyarrow's builders take it: binary as bytes, and maps as pairs."""
    if value is None:
        return None
    if pa.types.is_dictionary(kind):
        return stored(value, kind.value_type)
    if pa.types.is_map(kind):
        return [(stored(key, kind.key_type), stored(item, kind.item_type)) for key, item in value.items()]
    if pa.types.is_struct(kind):
        return {field.name: stored(value.get(field.name), field.type) for field in kind}
    if isinstance(value, list):
        return [stored(item, kind.value_type) for item in value]
    return value.encode() if isinstance(value, str) and "binary" in str(kind) else value


def same(found: Any) -> Any:
    return found.tolist() if isinstance(found, np.ndarray) else found


def read(path: Path, columns: ColumnsSpec) -> list[Row]:
    files = list_files(SourceSpec(path=str(path)))
    check_columns(files, columns)
    return [row for piece in cut(files, 2**20) for chunk in read_piece(piece, columns) for row in chunk.rows]


def test_rows_of_any_layout_have_the_values_that_were_written(tmp_path: Path) -> None:
    tried = seeds(80, more=5_000)
    written = 0
    for seed in range(tried):
        layouts = Layouts(seed)
        columns, kind, make = layouts.column()
        values = [layouts._maybe(make) for _ in range(7)]
        try:
            layouts.write(tmp_path, pa.array([stored(value, kind) for value in values], kind))
        except pa.ArrowIndexError:
            # pyarrow cannot write a nested dictionary without values.
            continue
        rows = read(tmp_path, columns)
        assert [row.wrong for row in rows] == [None] * 7, (seed, kind)
        assert [same(row.values["c"]) for row in rows] == values, (seed, kind)
        if columns.tokenised:
            files = list_files(SourceSpec(path=str(tmp_path)))
            cells = [cell for file in files if not is_empty(file) for cell in _whole(file, ("c",))["c"]]
            assert [cell.values.to_pylist() if cell.is_valid else None for cell in cells] == values, (seed, kind)
            data = DataSpec(train=SourceSpec(path="/x"), sequence_length=3)
            assert sum(_samples(file, columns, data) for file in files) == sum(map(bool, values)), (seed, kind)
        written += 1
    assert written > 0.9 * tried


REFUSED = [
    *(pa.decimal128(9, 2), pa.date32(), pa.time64("us"), pa.timestamp("s"), pa.duration("ms"), pa.uuid()),
    *(pa.map_(pa.int64(), pa.string()), pa.struct([("x", pa.string()), ("x", pa.int8())])),
    *(pa.dictionary(pa.int8(), pa.timestamp("s")), pa.dense_union([pa.field("x", pa.int8())])),
    *(pa.fixed_shape_tensor(pa.int8(), [2]), pa.month_day_nano_interval(), pa.list_(pa.string(), 0)),
    pa.run_end_encoded(pa.int32(), pa.string()),
]


def test_type_that_cannot_be_read_is_refused_at_any_depth() -> None:
    for seed in range(seeds(200, more=5_000)):
        layouts = Layouts(seed)
        kind: pa.DataType = layouts.random.choice(REFUSED)
        for _ in range(layouts.random.randint(0, 3)):
            wrap = layouts.random.choice([pa.list_, pa.list_view, layouts.beside, lambda of: pa.map_(pa.string(), of)])
            kind = wrap(kind)
        schema = pa.schema([("c", pa.list_(layouts.beside(kind)))])
        with pytest.raises(DataError, match=r"^a.parquet: column 'c' has type .* \(.*\); expected lists of objects"):
            check_schema("a.parquet", schema, MESSAGES)


def extension(name: str, storage: pa.DataType, parameters: str = "") -> pa.Field:
    """Return a column c of an extension type that this process does not know."""
    return pa.field("c", storage, metadata={"ARROW:extension:name": name, "ARROW:extension:metadata": parameters})


TURN = pa.struct([("role", pa.string()), ("content", pa.string())])
MESSAGES = ColumnsSpec(messages="c")
IDS = ColumnsSpec(input_ids="c")
WEIGHT = ColumnsSpec(text="t", weight="c")


@pytest.mark.parametrize(
    ("columns", "kind", "message"),
    [
        (TEXT, pa.int64(), "int64; expected text (string or binary)"),
        (TEXT, pa.decimal128(5, 2), "decimal128(5, 2); expected text"),
        (TEXT, pa.timestamp("us", "UTC"), "timestamp[us, tz=UTC]; expected text"),
        (TEXT, pa.duration("s"), "duration[s]; expected text"),
        (TEXT, pa.list_(pa.string()), "list<element: string>; expected text"),
        (
            TEXT,
            pa.uuid(),
            "extension<arrow.uuid> (values of the extension type arrow.uuid cannot be read); expected text",
        ),
        (TEXT, extension("some.uuid", pa.binary(16)), "some.uuid (values of the extension type some.uuid cannot"),
        (IDS, pa.list_(pa.float32()), "expected lists of integers"),
        (IDS, pa.list_(pa.bool_()), "expected lists of integers"),
        (IDS, pa.list_(pa.list_(pa.int32())), "expected lists of integers"),
        (IDS, pa.list_(pa.decimal128(5, 0)), "expected lists of integers"),
        (IDS, pa.list_(pa.string()), "expected lists of integers"),
        (IDS, pa.int32(), "int32; expected lists of integers"),
        (
            IDS,
            pa.list_(pa.int32(), 0),
            "(a list in it has the fixed size 0, which pyarrow cannot read); expected lists",
        ),
        (IDS, pa.fixed_shape_tensor(pa.int32(), [2, 2]), "shape=[2,2]]> (values of the extension type arrow.fixed_sh"),
        (IDS, extension("ray.data.arrow_tensor_v2", pa.large_list(pa.int64()), "[2, 2]"), "ray.data.arrow_tensor"),
        (MESSAGES, pa.int32(), "int32; expected lists of objects (structs or maps), or their JSON as text"),
        (MESSAGES, TURN, "expected lists of objects"),
        (MESSAGES, pa.list_(pa.string()), "expected lists of objects"),
        (
            MESSAGES,
            pa.list_(pa.map_(pa.int32(), pa.string())),
            "a map in it has keys of type int32, which are not text",
        ),
        (
            MESSAGES,
            pa.list_(pa.struct([pa.field("u", pa.list_(extension("x.pickled", pa.binary())))])),
            "(values of the extension type x.pickled cannot be read); expected lists of objects",
        ),
        (
            ColumnsSpec(messages="m", tools="c"),
            pa.list_(pa.string()),
            "expected lists of objects, or their JSON as text",
        ),
        (WEIGHT, pa.string(), "string; expected a number (integer or float)"),
        (WEIGHT, pa.decimal128(5, 2), "decimal128(5, 2); expected a number"),
        (WEIGHT, pa.bool_(), "bool; expected a number"),
    ],
)
def test_other_type_is_refused_by_name(
    tmp_path: Path, columns: ColumnsSpec, kind: pa.DataType | pa.Field, message: str
) -> None:
    field = kind if isinstance(kind, pa.Field) else pa.field("c", kind)
    others = [pa.field("t", pa.string()), pa.field("m", pa.list_(TURN))]
    schema = pa.schema([field, *others])
    pq.write_table(schema.empty_table(), tmp_path / "b.parquet")
    table = pa.Table.from_arrays([pa.nulls(1, one.type) for one in schema], schema=schema)
    pq.write_table(table, tmp_path / "a.parquet")
    files = list_files(SourceSpec(path=str(tmp_path)))
    refused = rf"a.parquet: column 'c' has type .*{re.escape(message)}"
    with pytest.raises(DataError, match=refused):
        check_columns(files, columns)
    with pytest.raises(DataError, match=refused):
        list(read_piece(cut(files, 99)[0], columns))


def test_tensor_of_an_older_ray_is_refused_in_any_column() -> None:
    schema = pa.schema(
        [pa.field("t", pa.string()), extension("ray.data.arrow_tensor_v2", pa.large_list(pa.int64()), "\0")]
    )
    with pytest.raises(DataError, match=r"a.parquet: column 'c' was written by Ray 2.49 to 2.54; write it again"):
        check_schema("a.parquet", schema, ColumnsSpec(text="t"))


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["c", "d", "c"], r"has 2 columns 'c', of which only one can be meant; rename the others"),
        (["c", "d", "C"], r"has the columns 'c' and 'C', whose names differ only in case; rename one of them"),
        (["C", "d", "e"], r"has no column 'c'; it has C, d, e; names are case-sensitive: did you mean 'C'\?"),
        (["b", "d", "e"], r"has no column 'c'; it has b, d, e; correct data.columns"),
    ],
)
def test_column_that_is_not_there_once_is_refused(tmp_path: Path, names: list[str], message: str) -> None:
    pq.write_table(pa.Table.from_arrays([pa.array(["x"])] * 3, names=names), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=message):
        read(tmp_path / "a.parquet", TEXT)


def test_values_of_extension_types_are_those_of_their_storage(tmp_path: Path) -> None:
    ids = [[1, 2], [3, 4]]
    tensors = {
        "a": pa.ExtensionArray.from_storage(
            pa.fixed_shape_tensor(pa.int32(), [2]), pa.array(ids, pa.list_(pa.int32(), 2))
        ),
        "b": pa.array(ids, pa.large_list(pa.int64())),
    }
    for name, array in tensors.items():
        field = extension("ray.data.arrow_tensor_v2", array.type, "[2]") if name == "b" else pa.field("c", array.type)
        pq.write_table(pa.Table.from_arrays([array], schema=pa.schema([field])), tmp_path / f"{name}.parquet")
        assert [same(row.values["c"]) for row in read(tmp_path / f"{name}.parquet", IDS)] == ids
        (file,) = list_files(SourceSpec(path=str(tmp_path / f"{name}.parquet")))
        assert _whole(file, ("c",))["c"][1].values.to_pylist() == ids[1]
        assert _samples(file, IDS, DataSpec(train=SourceSpec(path="/x"), sequence_length=2)) == 2
    array = pa.ExtensionArray.from_storage(pa.json_(), pa.array(['[{"name": "f"}]', None]))
    pq.write_table(pa.table({"c": array, "m": [[{"role": "user"}]] * 2}), tmp_path / "j.parquet")
    assert [row.values["c"] for row in read(tmp_path / "j.parquet", TEXT)] == ['[{"name": "f"}]', None]
    assert read(tmp_path / "j.parquet", ColumnsSpec(messages="m", tools="c"))[0].values["c"] == '[{"name": "f"}]'


def test_map_with_a_key_twice_makes_only_its_row_invalid(tmp_path: Path) -> None:
    arguments = pa.map_(pa.string(), pa.string())
    calls = pa.array([[("a", "1"), ("a", "2")], [("b", "1")]], arguments)
    turns = pa.ListArray.from_arrays([0, 1, 2], pa.StructArray.from_arrays([calls], ["arguments"]))
    pq.write_table(pa.table({"c": turns}), tmp_path / "a.parquet")
    bad, good = read(tmp_path / "a.parquet", MESSAGES)
    assert bad.wrong == "column 'c' holds a value that cannot be read: an object has the key 'a' 2 times"
    assert good.values["c"] == [{"arguments": {"b": "1"}}]


def test_files_of_one_source_may_have_different_layouts(tmp_path: Path) -> None:
    for number, kind in enumerate(
        (pa.string(), pa.binary(), pa.string_view(), pa.null(), pa.dictionary(pa.int8(), pa.string()))
    ):
        text = pa.nulls(1) if kind == pa.null() else pa.array(["ü".encode() if kind == pa.binary() else "ü"], kind)
        pq.write_table(pa.table({"c": text}), tmp_path / f"{number}.parquet")
    assert [row.values["c"] for row in read(tmp_path, TEXT)] == ["ü", "ü", "ü", None, "ü"]
    pq.write_table(pa.table({"c": [1]}), tmp_path / "5.parquet")
    with pytest.raises(DataError, match=r"5.parquet: column 'c' has type int64; expected text"):
        read(tmp_path, TEXT)
