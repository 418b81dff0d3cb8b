"""The values of messages in a rendered conversation: which are absent, and where the others are.

One rendering of the conversation with a mark at each value tells both. Variants for each value would take time in
proportion to the square of a conversation's length.
"""

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby, pairwise
from typing import Any, NamedTuple

from train_loop.data.text.chat_template import REFUSED, ChatTemplate, Span, renamed, unseen
from train_loop.data.text.content import texts_of, with_texts
from train_loop.data.text.messages import THOUGHTS, Message

START = "beginning of the content"
"""Pseudo key of the start of a content: a template may leave out an answer's reasoning."""
_NUMBER = re.compile(r"\d+")


class Value(NamedTuple):
    """A value of a message that the text should show."""

    message: int
    key: str
    place: int = 0
    """Index of a tool call, or of a part of the content; of reasoning, 0 for its start and 1 for its end."""

    @property
    def opens(self) -> bool:
        """Return whether its mark is before the value."""
        return self.key in (START, "tool_calls") or (self.key in THOUGHTS and self.place == 0)


@dataclass(frozen=True)
class Values:
    """The values of a conversation's messages in its text."""

    template: ChatTemplate
    messages: list[Message]
    text: str
    """The rendered messages."""
    marks: dict[str, Value] = field(default_factory=dict)
    """Characters that mark values."""

    @cached_property
    def marked(self) -> list[Message]:
        """The messages with a mark at each value."""
        chars = unseen(self.text)
        return [self._marked(number, message, chars) for number, message in enumerate(self.messages)]

    @cached_property
    def shown(self) -> str | None:
        """The text of the marked messages; None if the template rejects them."""
        marked = self.marked
        with suppress(*REFUSED):
            return self.template.text(marked)
        return None

    @property
    def printed(self) -> int | None:
        """Index of a message whose content parts are in the text in Python's notation; None without one."""
        messages, text = (self.messages, self.text) if self.shown is None else (self.marked, self.shown)
        contents = ((number, message.get("content")) for number, message in enumerate(messages))
        parts = ((number, str(part)) for number, content in contents if isinstance(content, list) for part in content)
        return next((number for number, part in parts if part in text), None)

    def _marked(self, number: int, message: Message, chars: Iterator[str]) -> Message:
        new = dict(message)
        texts = texts_of(message.get("content"))
        parts = [place for place, text in enumerate(texts) if text.strip()]
        for key, place in [*((START, place) for place in parts[:1]), *(("content", place) for place in parts)]:
            mark = self._mark(chars, Value(number, key, place))
            texts[place] = _with_mark(texts[place], mark, at_end=key == "content")
        if parts:
            new["content"] = with_texts(message["content"], texts)
        for key in THOUGHTS & message.keys():
            if isinstance(message[key], str) and message[key].strip():
                for place in (0, 1):
                    new[key] = _with_mark(new[key], self._mark(chars, Value(number, key, place)), at_end=place == 1)
        for place, _ in enumerate(message.get("tool_calls") or []):
            new["tool_calls"] = renamed(new["tool_calls"], self._mark(chars, Value(number, "tool_calls", place)), place)
        return new

    def _mark(self, chars: Iterator[str], value: Value) -> str:
        mark = next(chars)
        self.marks[mark] = value
        return mark

    def unused(self) -> list[Value]:
        """Return the values that the text lacks, in order.

        Reasoning may be absent: templates leave out that of earlier turns.
        """
        shown, last = self.shown, max((n for n, one in enumerate(self.messages) if one["role"] == "user"), default=0)
        absent = [value for mark, value in self.marks.items() if shown is None or mark not in shown]
        strange = [Value(number, key) for number, message in enumerate(self.messages) for key in self._strange(message)]
        suspects = [one for one in absent if one.key not in THOUGHTS and (one.key != START or one.message > last)]
        unused = sorted({*self._unused_of(sorted(suspects)), *self._unused_of(strange)})
        dropped = {value.message for value in unused if value.key == "content"}
        return [value for value in unused if value.key != START or value.message not in dropped]

    def _strange(self, message: Message) -> Iterator[str]:
        """Yield the keys with a value that the template never mentions."""
        for key, value in message.items():
            # A tool's result may name the tool, even if the template does not use the name.
            names_tool = key == "name" and message["role"] not in ("system", "user", "assistant")
            if not self.template.mentions(key) and value not in ("", [], {}, None) and not names_tool:
                yield key
        content = message.get("content")
        parts = content if isinstance(content, list) else []
        names = {name for part in parts for name in part if name != "text" and not self.template.mentions(name)}
        yield from (f"content.{name}" for name in sorted(names - {"type"}))

    def _unused_of(self, suspects: list[Value]) -> list[Value]:
        """Return the values without which the text is the same, by halves: mostly none or all of them are used."""
        if not suspects or self._is_text_without(suspects):
            return suspects
        half = len(suspects) // 2
        return [*self._unused_of(suspects[:half]), *self._unused_of(suspects[half:])] if half else []

    def _is_text_without(self, values: list[Value]) -> bool:
        """Return whether the text is the same without some values."""
        mark, others = next(unseen(self.text)), list(self.messages)
        # From the last one, so that the places of earlier calls stay the same.
        for value in reversed(values):
            others[value.message] = _without(others[value.message], value, mark)
        with suppress(*REFUSED):  # it fails without a value, so it uses the value
            return self.template.text(others) == self.text
        return False

    @cached_property
    def places(self) -> list[tuple[int, Value]]:
        """Places of marks in the text, in order; none if the text differs with marks.

        A mark that occurs again, such as the name of a call in its result, belongs to no message there.
        """
        if self.shown is None or not self.marks:
            return []
        pattern, seen, places = re.compile(f"[{''.join(self.marks)}]"), set[str](), list[tuple[int, Value]]()
        for before, match in enumerate(pattern.finditer(self.shown)):
            value = self.marks[match.group()]
            places.append((match.start() - before, value._replace(message=-1) if match.group() in seen else value))
            seen.add(match.group())
        return places if pattern.sub("", self.shown) == self.text else []

    @cached_property
    def regions(self) -> dict[int, "Region"]:
        """The region of each message that is found."""
        places, regions = [(0, None), *self.places, (len(self.text), None)], dict[int, Region]()
        first = 1
        for owner, own in groupby(value.message for _, value in self.places):
            stop = first + len(list(own))
            regions.setdefault(owner, self._region(places[first - 1 : stop + 1]))
            first = stop
        return regions

    def _region(self, places: list[tuple[int, Value | None]]) -> "Region":
        gaps = tuple(
            None
            if (before and before.opens) or (after and not after.opens)
            else _NUMBER.sub("0", self.text[start:stop])
            for (start, before), (stop, after) in pairwise(places)
        )
        return Region((places[0][0], places[-1][0]), (places[1][0], places[-2][0]), gaps)


class Region(NamedTuple):
    """The text of a message, up to the values of others before and after it."""

    span: Span
    values: Span
    """Places of the first and of the last mark of the message's own values."""
    gaps: tuple[str | None, ...]
    """Texts between marks that no value is part of, with 0 for each number; None for values."""


def _with_mark(text: str, mark: str, *, at_end: bool) -> str:
    """Return a text with a mark at its start or end, within white space, which a template may remove."""
    place = len(text.rstrip()) if at_end else len(text) - len(text.lstrip())
    return text[:place] + mark + text[place:]


def _without(message: Message, value: Value, mark: str) -> Message:
    """Return a message without a value; content is a mark instead."""
    key, old = value.key, message.get(value.key)
    if key in ("content", START):
        texts: list[Any] = texts_of(message["content"])
        texts[value.place] = mark if key == "content" else mark + texts[value.place]
        return {**message, "content": with_texts(message["content"], texts)}
    rest = [call for place, call in enumerate(old) if place != value.place] if key == "tool_calls" and old else []
    return {**message, key: rest} if rest else {name: one for name, one in message.items() if name != key}
