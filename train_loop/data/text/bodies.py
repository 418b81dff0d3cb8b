"""The texts of all answers of a conversation at once, from two renderings with marks.

Rendering variants for each answer takes time in proportion to the square of a conversation's length.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from train_loop.data.text.chat_template import REFUSED, ChatTemplate, Span, unseen
from train_loop.data.text.messages import THOUGHTS, Message, with_content


@dataclass(frozen=True)
class Bodies:
    """The places of messages in a text, by their indices."""

    answers: dict[int, Span]
    """Text that changes with an answer's content and calls."""
    ends: dict[int, int]
    """Ends of the contents of other messages, without white space."""
    texts: dict[int, str]
    """Texts between each answer and the next content."""


def find_bodies(
    template: ChatTemplate, messages: list[Message], text: str, numbers: Sequence[int], *, with_thoughts: bool
) -> Bodies | None:
    """Return the places of messages in their text; None if only variants of single messages can tell.

    `numbers`: indices of the answers, in order. `with_thoughts`: whether an answer's reasoning is part of it. One
    rendering marks the ends of all other contents; another one has a mark in place of each answer as well. Between
    answers, the text has to be that of the second one.
    """
    marks = dict(zip(range(len(messages)), unseen(text), strict=False))
    others = {n: mark for n, mark in marks.items() if n not in set(numbers) and messages[n]["content"] is not None}
    ended = [_ended(message, others.get(n, "")) for n, message in enumerate(messages)]
    kept = frozenset() if with_thoughts else THOUGHTS
    asked = [with_content(m, marks[n], kept) if n in set(numbers) else ended[n] for n, m in enumerate(messages)]
    try:
        plain, ends = _without(others, template.text(ended))
        frame, places = _without(others | {n: marks[n] for n in numbers}, template.text(asked))
    except REFUSED:
        return None
    if plain != text or len(ends) < len(others) or len(places) < len(others) + len(numbers):
        return None
    answers = _between(text, frame, places, ends, numbers)
    if answers is None:
        return None
    starts = {n: end - len(messages[n]["content"].rstrip()) for n, end in ends.items()}
    texts = {n: text[stop : starts.get(n + 1)] for n, (_, stop) in answers.items()}
    return Bodies(answers, ends, texts)


def _ended(message: Message, mark: str) -> Message:
    """Return a message with a mark after its content, before white space, which a template may remove."""
    length = len((message["content"] or "").rstrip())
    return {**message, "content": message["content"][:length] + mark + message["content"][length:]} if mark else message


def _without(marks: Mapping[int, str], text: str) -> tuple[str, dict[int, int]]:
    """Return a text without marks, and the places of the marks in it; none if one is repeated or not in order."""
    numbers = {mark: number for number, mark in marks.items()}
    found = list(re.finditer(f"[{''.join(numbers)}]", text)) if numbers else []
    order = [numbers[match.group()] for match in found]
    places = {number: match.start() - before for before, (number, match) in enumerate(zip(order, found, strict=True))}
    is_ordered = order == sorted(set(order))
    return "".join(re.split(f"[{''.join(numbers)}]", text)) if numbers else text, places if is_ordered else {}


def _between(
    text: str, frame: str, places: dict[int, int], ends: dict[int, int], numbers: Sequence[int]
) -> dict[int, Span] | None:
    """Return the spans of answers in `text`, whose places in `frame` are known; None if the texts differ elsewhere."""
    starts, stops = {numbers[0]: places[numbers[0]]}, {}
    for one, two in pairwise(numbers):
        anchor = next((number for number in range(one + 1, two) if number in ends), None)
        if anchor is None:
            return None
        stops[one] = ends[anchor] - (places[anchor] - places[one])
        starts[two] = stops[one] + places[two] - places[one]
        if text[stops[one] : starts[two]] != frame[places[one] : places[two]]:
            return None
    rest = frame[places[numbers[-1]] :]
    stops[numbers[-1]] = len(text) - len(rest)
    is_same = text.startswith(frame[: places[numbers[0]]]) and text.endswith(rest)
    if not is_same or any(starts[number] > stops[number] for number in numbers):
        return None
    return {number: (starts[number], stops[number]) for number in numbers}
