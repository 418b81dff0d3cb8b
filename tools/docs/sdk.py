"""The reference of the Python client: signatures and docstrings of the public names of `trainshed`."""

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from enum import StrEnum
from typing import Any

import trainshed

_FIRST = ("Client", "Job", "AsyncClient", "AsyncJob")
"""The classes at the top of the page; the other public names follow."""
_WIDTH = 100
"""Maximum length of a signature in one line."""


def page() -> str:
    """Return the Markdown of the page."""
    names = [*_FIRST, *(name for name in trainshed.__all__ if name not in _FIRST)]
    parts = "\n".join(f"## trainshed.{name}\n\n{_entry(name, getattr(trainshed, name))}" for name in names)
    return f"# Python SDK\n\n[The Python client](../guides/client.md) has tested examples.\n\n{parts}"


def _entry(name: str, value: Any) -> str:
    """Return the text of a public name: a class with its members, or an alias of a type."""
    if not inspect.isclass(value):
        return f"```python\n{name} = {value}\n```\n".replace("typing.", "")
    init = vars(value).get("__init__")
    head = [f"```python\n{_signature(name, init)}\n```\n"] if inspect.isfunction(init) else []
    members = [
        f"### {member}\n\n{_block(member, found)}\n{inspect.getdoc(found)}\n" for member, found in _members(value)
    ]
    values = [f"`{', '.join(value)}`\n"] if issubclass(value, StrEnum) else []
    return "\n".join([*head, f"{inspect.getdoc(value)}\n", *values, *members])


def _members(owner: type) -> Iterator[tuple[str, Any]]:
    """Yield the documented public methods and properties of a class and its bases, in the order of the source."""
    seen = set[str]()
    for base in owner.__mro__:
        for name, found in vars(base).items() if base.__module__.startswith("trainshed") else ():
            described = isinstance(found, property) or inspect.isfunction(found)
            if described and found.__doc__ and not name.startswith("_") and name not in seen:
                seen.add(name)
                yield name, found


def _block(name: str, found: Any) -> str:
    if isinstance(found, property):
        return f"```python\n{name}: {_returned(found.fget)}\n```\n"
    return f"```python\n{_signature(name, found)}\n```\n"


def _parsed(function: Any) -> ast.FunctionDef | ast.AsyncFunctionDef:
    node = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function)))).body[0]
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    return node


def _returned(function: Callable[..., Any] | None) -> str:
    annotation = _parsed(function).returns
    return ast.unparse(annotation) if annotation else "None"


def _signature(name: str, function: Any) -> str:
    """Return a signature as in the source, without `self`; a long one has a line per parameter."""
    node = _parsed(function)
    node.args.args = node.args.args[1:]
    node.args.defaults = [_constant(one, function) for one in node.args.defaults]
    node.args.kw_defaults = [one and _constant(one, function) for one in node.args.kw_defaults]
    start = "async " if isinstance(node, ast.AsyncFunctionDef) else ""
    end = "" if name[0].isupper() else f" -> {_returned(function)}"
    line = f"{start}{name}({ast.unparse(node.args)}){end}"
    if len(line) <= _WIDTH:
        return line
    # Commas of nested types are inside of brackets.
    parts = _split(ast.unparse(node.args))
    return f"{start}{name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){end}"


def _constant(default: ast.expr, function: Any) -> ast.expr:
    """Return the value of a default that is a constant's name."""
    return ast.Constant(function.__globals__[default.id]) if isinstance(default, ast.Name) else default


def _split(arguments: str) -> list[str]:
    """Split parameters at the commas that are outside of brackets."""
    depth, parts = 0, [""]
    for letter in arguments:
        depth += (letter in "[(") - (letter in "])")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]
