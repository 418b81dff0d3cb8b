"""Columns of Parquet files for users' own models: numbers, arrays, lists, bytes and text, read unchanged."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pyarrow import types

from train_loop.data.columns import SAMPLE, Column
from train_loop.data.dataset import Part, ShardFile
from train_loop.data.files import open_file, report_damage
from train_loop.data.prepare.columns import (
    check_names,
    extension_of,
    is_binary,
    is_list,
    is_number,
    plain_table,
    plain_type,
    shown,
    tensor_shape,
)
from train_loop.data.prepare.sources import SourceFile
from train_loop.errors import DataError

AS_IT_IS_BYTES = 64 * 2**20
"""Maximum uncompressed bytes of a source that ranks keep in memory; larger ones are prepared."""
_READ_AHEAD = 2**20
_IMAGE = "bytes"
"""Field with the content of an image in Hugging Face datasets, whose images are structs of bytes and path."""


def own_part(source: str, files: Sequence[SourceFile], names: Sequence[str], *, fingerprint: str) -> tuple[Part, int]:
    """Return the samples of a source of own columns: its rows, and their uncompressed bytes. Raises DataError."""
    columns, size, rows = own_columns(files, names), 0, dict[SourceFile, int]()
    for file in files:
        with report_damage(file.uri, file.format), open_file(file, buffer=0) as opened:
            footer = pq.ParquetFile(opened).metadata
        size += sum(footer.row_group(number).total_byte_size for number in range(footer.num_row_groups))
        rows[file] = footer.num_rows
    if not sum(rows.values()):
        raise DataError(f"{source} holds no rows; an empty dataset cannot be trained on")
    part = Part(
        fingerprint=fingerprint,
        files=tuple(ShardFile(path=file.uri, rows=count, size=file.size) for file, count in rows.items() if count),
        input_ids=None,
        own=columns,
        tokens=0,
        rows=sum(rows.values()),
    )
    return part, size


def first_rows(files: Sequence[SourceFile], columns: Sequence[Column], count: int) -> dict[str, Any]:
    """Return at most `count` first rows by column, without reading others. Raises DataError for null."""
    cells: dict[str, list[Any]] = {column.name: [] for column in columns}
    for file in files:
        with report_damage(file.uri, file.format), open_file(file, buffer=0) as opened:
            opened_file = pq.ParquetFile(opened, pre_buffer=False, buffer_size=_READ_AHEAD)
            batch = next(opened_file.iter_batches(count, columns=[*cells]), None)
        if batch is None:
            continue
        table = plain_table(pa.Table.from_batches([batch]))
        for column in columns:
            for row, cell in enumerate(table[column.name]):
                try:
                    cells[column.name].append(read_own(cell, column))
                except ValueError as error:
                    raise DataError(f"{file.uri}, row {row} {error}") from error
        break
    return {one.name: cells[one.name] if one.kind == "ragged" else _stacked(one, cells[one.name]) for one in columns}


def _stacked(column: Column, cells: list[Any]) -> NDArray[Any]:
    return np.array(cells, column.dtype).reshape(len(cells), *column.shape)


def own_columns(files: Sequence[SourceFile], names: Sequence[str]) -> tuple[Column, ...]:
    """Return the columns with these names, which all files must have with the same type. Raises DataError."""
    found: dict[tuple[Column, ...], str] = {}
    for file in files:
        if file.format != "parquet":
            raise DataError(f"{file.uri} is not a Parquet file, and own columns are read from Parquet; convert it")
        with report_damage(file.uri, file.format), open_file(file, buffer=0) as opened:
            parquet = pq.ParquetFile(opened)
            schema = parquet.schema_arrow
            footer = parquet.metadata
        check_names(file.uri, schema.names, names)
        _check_footer(file.uri, footer, names)
        columns = tuple(own_column(file.uri, schema.field(name)) for name in names)
        found.setdefault(columns, file.uri)
    (first, uri), *others = found.items()
    for columns, other in others:
        name = next(mine.name for mine, theirs in zip(first, columns, strict=True) if mine != theirs)
        raise DataError(f"column {name!r} has one type in {uri} and another in {other}; write both with the same type")
    return first


def _check_footer(uri: str, footer: pq.FileMetaData, names: Sequence[str]) -> None:
    """Raise DataError for a column with null, if the file's statistics count it. Lists count empty ones, too."""
    leaves = {leaf: name for name in names for leaf in (name, f"{name}.{_IMAGE}")}
    for group in range(footer.num_row_groups):
        for number in range(footer.num_columns):
            chunk = footer.row_group(group).column(number)
            if chunk.path_in_schema in leaves and chunk.statistics is not None and chunk.statistics.null_count:
                raise DataError(
                    f"{uri}: column {leaves[chunk.path_in_schema]!r} has null in {chunk.statistics.null_count} rows of "
                    f"row group {group}; fill them, or remove the rows"
                )


def own_column(uri: str, field: pa.Field) -> Column:
    """Return the declaration of a file's column. Raises DataError for a type without a form in a batch."""
    column = None if field.name == SAMPLE.name else _declared(field)
    if column is None:
        raise DataError(
            f"{uri}: column {field.name!r} has type {shown(field)}; expected numbers, lists of numbers, arrays of one "
            "shape (fixed_size_list or fixed_shape_tensor), bytes, text, or images of Hugging Face datasets; convert "
            "the column"
        )
    return column


def _declared(field: pa.Field) -> Column | None:
    kind, shape = plain_type(field.type), tensor_shape(field)
    if shape is not None:
        kind = kind.value_type
    elif extension_of(field) is None:
        kind, shape = _item(kind)
    if shape is None or not math.prod(shape):
        return None
    if _is_value(kind):
        return Column(field.name, _numpy_name(kind), "sample", shape)
    if shape:
        return None
    if is_list(kind) and _is_value(kind.value_type):
        return Column(field.name, _numpy_name(kind.value_type), "ragged")
    text = types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)
    name = "str" if text else "bytes" if is_binary(kind) else None
    return None if name is None else Column(field.name, name, "ragged")


def _item(kind: pa.DataType) -> tuple[pa.DataType, tuple[int, ...]]:
    """Return the type of a cell's values, and the shape of nested lists of fixed sizes."""
    if types.is_fixed_size_list(kind):
        inner, shape = _item(kind.value_type)
        return inner, (kind.list_size, *shape)
    if types.is_struct(kind) and kind.get_field_index(_IMAGE) >= 0 and is_binary(kind.field(_IMAGE).type):
        return kind.field(_IMAGE).type, ()
    return (kind.value_type if types.is_dictionary(kind) else kind), ()


def _is_value(kind: pa.DataType) -> bool:
    return is_number(kind) or bool(types.is_boolean(kind))


def _numpy_name(kind: pa.DataType) -> str:
    return str(np.dtype(kind.to_pandas_dtype()))


def has_null(values: pa.Array) -> bool:
    """Return whether a column has a row with null, or with null among its values."""
    if values.null_count:
        return True
    if types.is_struct(values.type):
        return bool(values.field(_IMAGE).null_count)
    return is_list(values.type) and has_null(values.flatten())


def read_own(cell: pa.Scalar, column: Column) -> Any:
    """Return a cell of a column. Raises ValueError for null, and for an array of another shape."""
    if column.dtype in ("bytes", "str") or (column.kind == "sample" and not column.shape):
        value = cell.as_py()
        value = value[_IMAGE] if isinstance(value, dict) else value
    else:
        value = _array(cell.values) if cell.is_valid else None
    if value is None:
        raise ValueError(f"has null in column {column.name!r}")
    if column.shape and value.size != math.prod(column.shape):
        raise ValueError(f"has {value.size} values in column {column.name!r}, whose shape is {list(column.shape)}")
    return value.reshape(column.shape) if column.shape else value


def _array(values: pa.Array) -> NDArray[Any] | None:
    """Return the values of lists without their nesting; None if there is null among them."""
    while not values.null_count and types.is_fixed_size_list(values.type):
        values = values.flatten()
    if values.null_count:
        return None
    found: NDArray[Any] = values.to_numpy(zero_copy_only=False)
    return found
