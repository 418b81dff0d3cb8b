"""The columns of Parquet files: the Arrow types that a spec's columns may have, and their cells as Python values.

Text in any Arrow layout is text, and maps are objects at any depth. Any other type is refused by name before a row is
read: a wrong reading would train on wrong tokens.
"""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyarrow import types

from train_loop.data.strict_json import finite, unique_keys
from train_loop.errors import DataError
from train_loop.spec import ColumnsSpec

_NAME, _METADATA = b"ARROW:extension:name", b"ARROW:extension:metadata"
"""Metadata of a field whose extension type is not registered in this process."""
_TENSORS = ("arrow.fixed_shape_tensor", "ray.data.arrow_tensor", "ray.data.arrow_tensor_v2")
_NUMBER = "a number (integer or float)"
_SHOWN = 200
"""Maximum characters of a type in a message."""

Read = Callable[[Any], Any]


@dataclass(frozen=True)
class BadCell:
    """A cell that cannot be read, with the reason."""

    reason: str


class _UnreadableType(ValueError):
    """A type, or a type inside it, that has no Python value to train on."""


def check_schema(uri: str, schema: pa.Schema, columns: ColumnsSpec) -> None:
    """Raise DataError if a file's schema lacks a column of a spec, has it twice, or has it with another type."""
    check_names(uri, schema.names, columns.names)
    for field in schema:
        # With Ray, whose tasks read the file, even its other columns could not be read.
        name, parameters = extension_of(field) or ("", b"")
        if name.startswith("ray.data.") and "tensor" in name and _read_json(parameters) is None:
            raise DataError(
                f"{uri}: column {field.name!r} was written by Ray 2.49 to 2.54; write it again with a newer Ray"
            )
    for name, expected, accepts in _roles(columns):
        field = schema.field(name)
        try:
            kind, inner = _storage_of(field), ""
            # A column of nulls has bad rows, and not a wrong type: other files may have its values.
            if types.is_null(kind) or accepts(kind):
                _check_inner(kind)
                continue
        except _UnreadableType as error:
            inner = f" ({error})"
        raise DataError(
            f"{uri}: column {name!r} has type {shown(field)}{inner}; expected {expected}; convert the column, or "
            "correct data.columns"
        )


def check_names(uri: str, present: list[str], names: Sequence[str]) -> None:
    """Raise DataError unless each of the names is present once. They are case-sensitive."""
    counts = Counter(present)
    for name in names:
        if counts[name] > 1:
            raise DataError(
                f"{uri} has {counts[name]} columns {name!r}, of which only one can be meant; rename the others"
            )
        near = [other for other in counts if other != name and other.casefold() == name.casefold()]
        if counts[name] and near:
            raise DataError(
                f"{uri} has the columns {name!r} and {near[0]!r}, whose names differ only in case; rename one of them"
            )
        if not counts[name]:
            hint = f"; names are case-sensitive: did you mean {near[0]!r}?" if near else "; correct data.columns"
            raise DataError(f"{uri} has no column {name!r}; it has {', '.join(present)}{hint}")


def read_cells(column: pa.Array) -> list[Any]:
    """Return the cells of a checked column; a BadCell for a cell that cannot be read.

    Lists of integers are arrays: a Python int per token would cost more than all other steps. Structs have no keys of
    null values: Parquet gives all rows the keys of any row.
    """
    array = plain_array(column)
    if is_list(array.type) and types.is_integer(array.type.value_type):
        return [_tokens(cell) for cell in array]
    read = _reader(array.type)
    try:
        return [read(value) for value in array.to_pylist()]
    except (ValueError, KeyError, ArithmeticError):
        return [_read_cell(cell, read) for cell in array]


def plain_array(array: pa.Array) -> pa.Array:
    """Return an array without its extension type."""
    return array.storage if isinstance(array, pa.ExtensionArray) else array


def plain_table(table: pa.Table) -> pa.Table:
    """Return a table without the extension types of its columns, in one chunk."""
    columns = table.combine_chunks().columns
    plain = [pa.chunked_array(map(plain_array, one.chunks), plain_type(one.type)) for one in columns]
    return pa.Table.from_arrays(plain, table.column_names)


def plain_type(kind: pa.DataType) -> pa.DataType:
    """Return a type, or the storage type of an extension type."""
    return kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind


def _read_cell(cell: pa.Scalar, read: Read) -> Any:
    try:
        return read(cell.as_py())
    except UnicodeDecodeError:
        return BadCell("holds bytes that are not UTF-8")
    except (ValueError, KeyError, ArithmeticError) as error:
        return BadCell(f"holds a value that cannot be read: {error}")


def _tokens(cell: pa.Scalar) -> Any:
    if not cell.is_valid:
        return None
    if cell.values.null_count:
        return BadCell("holds a list of tokens with null among them")
    return cell.values.to_numpy(zero_copy_only=False)


def _reader(kind: pa.DataType) -> Read:
    """Return the function that makes our value of pyarrow's value of a type."""
    kind = plain_type(kind)
    if types.is_dictionary(kind):
        return _reader(kind.value_type)
    if is_binary(kind):
        return _if_present(bytes.decode)
    if is_list(kind):
        item = _inner_reader(kind.value_type)
        return _if_present(lambda value: [item(one) for one in value])
    if types.is_map(kind):
        key, item = _reader(kind.key_type), _inner_reader(kind.item_type)
        return _if_present(lambda value: unique_keys([(key(name), item(one)) for name, one in value]))
    if types.is_struct(kind):
        of = {field.name: _inner_reader(field.type) for field in kind}
        return _if_present(lambda value: {name: of[name](one) for name, one in value.items() if one is not None})
    return lambda value: value


def _inner_reader(kind: pa.DataType) -> Read:
    """Return the function for a value inside a list, map or struct, all of which become JSON."""
    value = kind.value_type if types.is_dictionary(kind) else kind
    return _if_present(finite) if types.is_floating(value) else _reader(kind)


def _if_present(read: Read) -> Read:
    return lambda value: None if value is None else read(value)


def _roles(columns: ColumnsSpec) -> list[tuple[str, str, Callable[[pa.DataType], bool]]]:
    """Return each column of a spec, the types that it may have in words, and the test of a type."""
    tokens, hint = ("lists of integers", _is_tokens), "; for lists of token ids set columns.token_ids: true"
    text = (f"text (string or binary){hint if columns.sequences else ''}", _is_text)
    if columns.chosen is not None:
        text = (f"text (string or binary), or lists of messages{hint}", _is_json)
    roles: list[tuple[str | None, str, Callable[[pa.DataType], bool]]] = [
        *((name, *(tokens if columns.token_ids else text)) for name in columns.texts),
        (columns.input_ids, *tokens),
        (columns.labels, "lists of integers, or of names of classes", _is_tags),
        (columns.messages, "lists of objects (structs or maps), or their JSON as text", _is_json),
        (columns.tools, "lists of objects, or their JSON as text", _is_json),
        (columns.label, f"{_NUMBER}, or the name of a class", lambda kind: is_number(kind) or _is_text(kind)),
        *((name, _NUMBER, is_number) for name in (columns.margin, columns.weight)),
    ]
    return [(name, expected, accepts) for name, expected, accepts in roles if name is not None]


def _is_text(kind: pa.DataType) -> bool:
    if types.is_dictionary(kind):
        return _is_text(kind.value_type)
    return types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind) or is_binary(kind)


def is_binary(kind: pa.DataType) -> bool:
    """Return whether a type is byte strings in any layout."""
    views = types.is_binary_view(kind) or types.is_fixed_size_binary(kind)
    return bool(views or types.is_binary(kind) or types.is_large_binary(kind))


def holds_text(field: pa.Field) -> bool:
    """Return whether a column has text, lists or objects."""
    kind = plain_type(field.type)
    return _is_text(kind) or _is_nested(kind)


def is_list(kind: pa.DataType) -> bool:
    """Return whether a type is a list in any layout."""
    views = types.is_list_view(kind) or types.is_large_list_view(kind)
    return bool(views or types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _is_nested(kind: pa.DataType) -> bool:
    return bool(is_list(kind) or types.is_struct(kind) or types.is_map(kind))


def _is_tokens(kind: pa.DataType) -> bool:
    return is_list(kind) and bool(types.is_integer(kind.value_type) or types.is_null(kind.value_type))


def _is_tags(kind: pa.DataType) -> bool:
    return _is_tokens(kind) or (is_list(kind) and _is_text(kind.value_type))


def _is_objects(kind: pa.DataType) -> bool:
    if not is_list(kind):
        return False
    item = kind.value_type
    return bool(types.is_struct(item) or types.is_map(item) or types.is_null(item))


def _is_json(kind: pa.DataType) -> bool:
    return _is_objects(kind) or _is_text(kind)


def is_number(kind: pa.DataType) -> bool:
    """Return whether a type is integers or floats."""
    return bool(types.is_integer(kind) or types.is_floating(kind))


def _check_inner(kind: pa.DataType) -> None:
    """Raise _UnreadableType for the first type inside a type that has no value to train on."""
    if types.is_struct(kind):
        twice = next((name for name, count in Counter(one.name for one in kind).items() if count > 1), None)
        if twice is not None:
            raise _UnreadableType(f"a struct in it has two fields {twice!r}")
    if types.is_map(kind) and not _is_text(_storage_of(kind.key_field, inner=True)):
        raise _UnreadableType(f"a map in it has keys of type {shown(kind.key_field)}, which are not text")
    if types.is_fixed_size_list(kind) and not kind.list_size:
        raise _UnreadableType("a list in it has the fixed size 0, which pyarrow cannot read")
    if types.is_dictionary(kind):
        _check_inner(kind.value_type)
    elif not (_is_nested(kind) or _is_text(kind) or is_number(kind) or types.is_boolean(kind) or types.is_null(kind)):
        # Templates would write another text for them: transformers' tojson writes "<Decimal>".
        raise _UnreadableType(f"a value in it has type {kind}, which JSON does not have")
    for number in range(kind.num_fields):
        _check_inner(_storage_of(kind.field(number), inner=True))


def _storage_of(field: pa.Field, *, inner: bool = False) -> pa.DataType:
    """Return the type of a field's values without an extension type. Raises _UnreadableType.

    `inner`: the field lies inside another one.
    """
    kind, extension = field.type, extension_of(field)
    if extension is None:
        return kind
    name, _ = extension
    storage = plain_type(kind)
    if types.is_string(storage) or types.is_large_string(storage) or types.is_string_view(storage):
        return storage
    # The values of a tensor with more dimensions lie flat in its storage, without their shape.
    if not inner and len(tensor_shape(field) or ()) == 1:
        return storage
    raise _UnreadableType(f"values of the extension type {name} cannot be read")


def extension_of(field: pa.Field) -> tuple[str, bytes] | None:
    """Return name and parameters of a field's extension type; a process may not have registered it."""
    if isinstance(field.type, pa.BaseExtensionType):
        written = getattr(field.type, "__arrow_ext_serialize__", bytes)
        return field.type.extension_name, written()
    metadata = field.metadata or {}
    return (metadata[_NAME].decode(), metadata.get(_METADATA, b"")) if _NAME in metadata else None


def tensor_shape(field: pa.Field) -> tuple[int, ...] | None:
    """Return the shape of the values of a tensor type, which lie flat in their storage; None for other types."""
    name, parameters = extension_of(field) or ("", b"")
    if name not in _TENSORS:
        return None
    if isinstance(field.type, pa.FixedShapeTensorType):
        order = field.type.permutation
        return tuple(field.type.shape) if order in (None, sorted(order or ())) else None
    shape = _read_json(parameters)
    return tuple(shape) if isinstance(shape, list) else None


def _read_json(parameters: bytes) -> Any:
    """Return the JSON value of a type's parameters; None if they are not JSON."""
    try:
        return json.loads(parameters)
    except (ValueError, RecursionError):
        return None


def shown(field: pa.Field) -> str:
    """Return a field's type for a message."""
    extension = extension_of(field)
    name = str(field.type) if extension is None or isinstance(field.type, pa.BaseExtensionType) else extension[0]
    return name if len(name) <= _SHOWN else f"{name[:_SHOWN]}…"
