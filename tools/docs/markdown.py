"""Markdown tables and cells."""

import re
from collections.abc import Iterable, Sequence

_ITEM = re.compile(r"\s*([-*]|\d+\.) ")


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


def separate_blocks(text: str) -> str:
    """Return a page with an empty line before each list and table that directly follows a paragraph.

    GitHub's Markdown starts a list or a table there; Python-Markdown needs the empty line.
    """
    lines = list[str]()
    in_code, in_list = False, False
    for line in text.split("\n"):
        is_item, is_row = _ITEM.match(line) is not None, line.startswith("|")
        before = lines[-1] if lines else ""
        if not in_code and before.strip() and not before.startswith("#"):
            starts_list = is_item and not in_list
            starts_table = is_row and not before.startswith("|")
            if starts_list or starts_table:
                lines.append("")
        lines.append(line)
        in_code ^= line.lstrip().startswith("```")
        in_list = is_item or (in_list and line.startswith(" "))
    return "\n".join(lines)
