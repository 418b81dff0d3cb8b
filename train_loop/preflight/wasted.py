"""What training makes no use of in the first rows of a source: rows that train nothing, and columns without a role."""

from collections.abc import Iterator, Sequence
from contextlib import suppress

import numpy as np

from train_loop.data.dataset import IGNORE
from train_loop.data.prepare.columns import holds_text
from train_loop.data.prepare.packing import Document
from train_loop.data.prepare.rows import Row, schema_of
from train_loop.data.prepare.sources import SourceFile
from train_loop.data.text.messages import read_conversation
from train_loop.errors import DataError
from train_loop.spec import ColumnsSpec

_SHOWN = 8
"""Maximum number of unused columns in a sentence."""


def trains(document: Document, columns: ColumnsSpec) -> bool:
    """Return whether a document changes a model: equal pairs, weights of 0 and labels that are all ignored do not."""
    if not len(document.input_ids) or document.weight == 0:
        return False
    if columns.chosen is not None:
        chosen, rejected = np.split(document.input_ids, np.cumsum(document.sizes)[:-1])
        return not np.array_equal(chosen, rejected)
    return document.labels is None or bool(np.any(document.labels[1:] != IGNORE))


def why_untrained(row: Row, columns: ColumnsSpec, *, cut: bool) -> str:
    """Return why no token of a good row is trained; `cut` is true for a row of which only a part fits a sample."""
    if columns.weight is not None and not float(row.values[columns.weight]):
        return f"column {columns.weight!r} is 0"
    if columns.chosen is not None:
        return f"its chosen and rejected are equal{' within sequence_length' if cut else ''}"
    if columns.labels is not None:
        return f"column {columns.labels!r} has no label but {IGNORE}"
    if columns.messages is not None and (fault := _fault_of_roles(row, columns.messages)) is not None:
        return fault
    if cut:
        return "the part of it that fits sequence_length has no answer; raise sequence_length, or see on_long_rows"
    return "its answer is empty"


def _fault_of_roles(row: Row, messages: str) -> str | None:
    """Return why the messages of a row have no answer that is trained; None if they have one."""
    with suppress(DataError):
        found = read_conversation(row.values[messages])
        answers = {number for number, one in enumerate(found.messages) if one["role"] == "assistant"}
        if answers:
            off = "its messages of the assistant have weight: 0 or train: false"
            return None if answers - found.untrained else off
        roles = [*dict.fromkeys(one["role"] for one in found.messages)]
        if {"gpt", "human", "bot", "model", "ai"} & {role.casefold() for role in roles}:
            return f"its roles are {', '.join(roles)}, and only assistant is trained; rename them to user and assistant"
        return f"its roles are {', '.join(roles)}, and only messages of the role assistant are trained"
    return None


def unused_columns(files: Sequence[SourceFile], columns: ColumnsSpec, rows: Sequence[Row]) -> Iterator[str]:
    """Yield a sentence about columns with text, lists or objects that no role names."""
    known = {*columns.names, *(["tools"] if columns.messages else [])}
    found = [name for name in _texts(files, rows) if name not in known]
    if found:
        more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        join = "; join a column that belongs to the prompt to it" if columns.prompt else ""
        names = f"{', '.join(map(repr, found[:_SHOWN]))}{more}"
        which, it = (f"columns {names} are", "them") if len(found) > 1 else (f"column {names} is", "it")
        yield f"the {which} not used, because no role in data.columns names {it}{join}"


def _texts(files: Sequence[SourceFile], rows: Sequence[Row]) -> list[str]:
    """Return the columns that hold text, lists or objects, in the order of the file."""
    if files[0].format == "parquet":
        return [field.name for field in schema_of(files[0]) if holds_text(field)]
    held = ((name, value) for row in rows for name, value in row.values.items())
    return [*dict.fromkeys(name for name, value in held if isinstance(value, str | list | dict) and value)]
