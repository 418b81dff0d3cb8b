"""The content of a chat message: text, or a list of text parts, as in `[{"type": "text", "text": "…"}]`."""

from collections.abc import Sequence
from typing import Any

Content = str | list[dict[str, Any]] | None


def texts_of(content: Content) -> list[str]:
    """Return the texts of a content's parts; of text, the text alone."""
    return [part["text"] for part in content] if isinstance(content, list) else [content or ""]


def with_texts(content: Content, texts: Sequence[str]) -> Content:
    """Return a content whose parts have other texts."""
    if not isinstance(content, list):
        return "".join(texts)
    return [{**part, "text": text} for part, text in zip(content, texts, strict=True)]


def replaced(content: Content, text: str) -> Content:
    """Return a content of the same form with one other text."""
    return [{"type": "text", "text": text}] if isinstance(content, list) else text


def problem_of(content: Any) -> str | None:
    """Return the fault of a content; None if it is text or a list of text parts."""
    if isinstance(content, str):
        return None
    if not isinstance(content, list):
        return f"must have text as content, not {content!r:.60}"
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind is not None and kind != "text":
            return f"has a content part of type {kind!r:.60}, but only text can be trained; remove the part or the row"
        if kind is None or not isinstance(part.get("text"), str):
            return f'has a content part {part!r:.60}; expected {{"type": "text", "text": "…"}}'
    return None if content else "has a list without parts as content; give it a part with text"
