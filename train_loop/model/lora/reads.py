"""Weights that the code of a model uses without a call of their module, so that an adapter would have no effect."""

import ast
import inspect
import operator
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from typing import Any

from torch import nn

_FACTS = ("dtype", "device", "shape")
"""Attributes of a weight that do not depend on its values."""
_COMPARED: Mapping[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}


class _UnknownError(Exception):
    """A condition that depends on more than numbers and constants of a module."""


def reads_weight(model: nn.Module, name: str) -> bool:
    """Return whether the code around a module may use its weight without a call, as fused kernels do.

    Branches that the settings of the model rule out do not count, such as BLOOM's for `slow_but_exact`.
    """
    holder, _, leaf = name.rpartition(".")
    around = model.get_submodule(holder)
    kind: Any = type(around)
    return leaf in _read(_code(kind), around)


@cache
def _code(kind: Any) -> ast.AST:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(kind)))
    except (OSError, TypeError, SyntaxError):
        return ast.Module([], [])


def _read(node: ast.AST, around: nn.Module) -> Iterator[str]:
    """Yield the names of the modules whose weights code uses."""
    parts: Iterable[ast.AST] = ast.iter_child_nodes(node)
    if isinstance(node, ast.If):
        with suppress(_UnknownError):
            parts = node.body if _value(node.test, around) else node.orelse
    if isinstance(node, ast.Attribute):
        if node.attr in _FACTS and isinstance(node.value, ast.Attribute) and node.value.attr == "weight":
            return
        if node.attr == "weight" and isinstance(node.value, ast.Attribute) and _is_self(node.value.value):
            yield node.value.attr
    for part in parts:
        yield from _read(part, around)


def _value(test: ast.expr, around: nn.Module) -> Any:
    """Return the value of a condition. Raises _UnknownError."""
    match test:
        case ast.Constant(value=value):
            return value
        case ast.Attribute(value=of, attr=name) if _is_self(of):
            value = getattr(around, name, None)
            if isinstance(value, bool | int | float | str):
                return value
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return not _value(operand, around)
        case ast.BoolOp(op=op, values=values):
            # One known value may decide, whatever the others are.
            known = [*_known(values, around)]
            decisive = isinstance(op, ast.Or)
            if decisive in map(bool, known):
                return decisive
            if len(known) == len(values):
                return not decisive
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _COMPARED:
            return _COMPARED[type(op)](_value(left, around), _value(right, around))
    raise _UnknownError


def _known(values: list[ast.expr], around: nn.Module) -> Iterator[Any]:
    for one in values:
        try:
            yield _value(one, around)
        except _UnknownError:
            continue


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"
