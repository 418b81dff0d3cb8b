"""The turns of the assistant in a rendered conversation: the text that the model has to write."""

import re
from bisect import bisect_left
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jinja2 import TemplateError

from train_loop.data.text.chat_template import REFUSED, ChatTemplate, Span, other_calls, unseen
from train_loop.data.text.content import texts_of, with_texts
from train_loop.data.text.messages import THOUGHTS, Message
from train_loop.data.text.turn import Turn, TurnFinder
from train_loop.data.text.values import START, Region, Values


def find_turns(values: Values, untrained: Collection[int] = ()) -> list[Turn]:
    """Return what the model writes in a conversation, in order. Raises TemplateError or TypeError.

    `untrained`: indices of assistant messages that are not trained.
    """
    template, messages = values.template, values.messages
    finder = TurnFinder(template, messages, values.text)
    trained = [n for n, message in enumerate(messages) if message["role"] == "assistant" and n not in untrained]
    if not template.marks_answers:
        repeated = _Repeated(finder, values)
        turns = [repeated.turn(number) for number in trained]
        _check_echoes(values, dict(zip(trained, turns, strict=True)))
        return turns
    spans = _marked_spans(template, messages, untrained)
    # Turns end as the last one does: one is enough, and each takes time.
    return [
        *(Turn(start, stop, stop) for start, stop in spans[:-1]),
        *(finder.marked(span, trained[-1:]) for span in spans[-1:]),
    ]


def _check_echoes(values: Values, turns: dict[int, Turn]) -> None:
    """Raise TemplateError if a turn reaches to where a later message quotes it: it would hold that one's header."""
    contents = ("content", START)
    echoes = [place for place, value in values.places if value.message < 0 and value.key in contents]
    for number, turn in turns.items():
        if any(turn.start < place <= turn.end for place in echoes):
            raise TemplateError(f"the content of messages[{number}] occurs again after it")


def _marked_spans(template: ChatTemplate, messages: list[Message], untrained: Collection[int]) -> list[Span]:
    """Return the spans that the template marks, without those of messages that are not trained."""
    text, spans = template.marked_text(messages)
    if not untrained:
        return spans
    marks = dict(zip(unseen(text), range(len(messages)), strict=False))
    # A template may write another turn with content than without, so that a mark in empty content changes it.
    for in_empty in (True, False):
        marked = [_everywhere(messages[number], mark, in_empty=in_empty) for mark, number in marks.items()]
        with suppress(*REFUSED):
            other, others = template.marked_text(marked)
            if len(others) == len(spans):
                writers = _writers(messages, marks, other, others)
                return [span for span, one in zip(spans, writers, strict=True) if not one & set(untrained)]
    raise TemplateError("the spans of {% generation %} change with the contents of messages")


def _writers(messages: list[Message], marks: dict[str, int], text: str, spans: list[Span]) -> Iterator[set[int]]:
    """Yield the assistant messages that each span may belong to: those with marks in it, or else around it.

    A span can hold the end of a turn alone.
    """
    found = [(match.start(), marks[match.group()]) for match in re.finditer(f"[{''.join(marks)}]", text)]
    for start, stop in spans:
        first, after = bisect_left(found, (start,)), bisect_left(found, (stop,))
        own = {number for _, number in found[first:after]}
        before = found[first - 1][1] if first else -1
        if not own and before >= 0 and messages[before]["role"] == "assistant":
            own = {before}
        rest = range(before + 1, found[after][1] + 1 if after < len(found) else len(messages))
        yield own or {number for number in rest if messages[number]["role"] == "assistant"}


def _everywhere(message: Message, mark: str, *, in_empty: bool) -> Message:
    """Return a message with marks around an answer's texts and in its tool calls, or within a question's texts.

    A template may look at the beginning and the end of questions. `in_empty`: whether empty content gets a mark.
    """
    calls, texts = message.get("tool_calls"), texts_of(message.get("content"))
    if message["role"] != "assistant":
        return message | {"content": with_texts(message["content"], [_within(text, mark) for text in texts])}
    new = message | ({"tool_calls": other_calls(calls, mark)} if calls else {})
    new |= {key: mark + message[key] + mark for key in THOUGHTS & message.keys() if isinstance(message[key], str)}
    if not any(texts) and (calls or not in_empty):
        return new
    return new | {"content": with_texts(message["content"], [mark + text + mark for text in texts])}


def _within(text: str, mark: str) -> str:
    middle = len(text) // 2
    return text[:middle] + mark + text[middle:]


class _Known(NamedTuple):
    """A turn that was found by rendering variants: the texts around it, up to the values of other messages."""

    before: str
    end: str
    after: str

    def at(self, region: Region, text: str) -> Turn | None:
        """Return the turn with the same texts around it in another region; None if these differ."""
        start, stop = region.span
        turn = Turn(start + len(self.before), stop - len(self.end + self.after), stop - len(self.after))
        is_same = text.startswith(self.before, start) and text[turn.end : stop] == self.end + self.after
        return turn if is_same and _fits(turn, region) else None


@dataclass(frozen=True)
class _Repeated:
    """A search for turns that are like earlier ones, which takes no rendering."""

    finder: TurnFinder
    values: Values
    known: dict[Any, list[_Known]] = field(default_factory=dict)
    """Turns by their kind."""

    def turn(self, number: int) -> Turn:
        """Return what the model writes of an assistant message. Raises TemplateError or TypeError."""
        region, text = self.values.regions.get(number), self.finder.text
        if region is None:
            return self.finder.answer(number)
        known = self.known.setdefault(self._kind(number, region), [])
        found = next((turn for one in known if (turn := one.at(region, text)) is not None), None)
        if found is not None:
            return found
        turn, (start, stop) = self.finder.answer(number), region.span
        if start <= turn.start and turn.stop <= stop and _fits(turn, region):
            known.append(_Known(text[start : turn.start], text[turn.end : turn.stop], text[turn.stop : stop]))
        return turn

    def _kind(self, number: int, region: Region) -> Any:
        """Return what must be equal for turns to be alike: shapes of neighbours, and text between values."""
        return str([_shape(one) for one in self.finder.messages[max(0, number - 1) : number + 2]]), region.gaps


def _fits(turn: Turn, region: Region) -> bool:
    """Return whether a turn holds all values of its region."""
    return turn.start <= region.values[0] and region.values[1] <= turn.end


def _shape(message: Message) -> tuple[str, list[str]]:
    return message["role"], sorted(key for key, value in message.items() if value)
