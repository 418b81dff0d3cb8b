"""Markdown tables and cells."""

from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; each row has one cell per column."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(cell, line))} |" for line in lines) + "\n"


def cell(text: str) -> str:
    """Return a text for one table cell: a single line, with its bars escaped."""
    return " ".join(text.split()).replace("|", "\\|")


def code(text: str) -> str:
    """Return a text as inline code; an empty text stays empty."""
    return f"`{text}`" if text else ""


def sentence(text: str) -> str:
    """Return a text with a full stop and a capital first letter, unless its first word is a name or a value."""
    text = text.strip()
    first = text.partition(" ")[0]
    is_value = first.endswith(":") or any(sign in first.rstrip(".,;") for sign in "._/=`")
    return text and (text if is_value else text[0].upper() + text[1:]) + ("" if text.endswith((".", ":")) else ".")
