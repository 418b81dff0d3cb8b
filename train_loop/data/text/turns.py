"""The turns of the assistant in a rendered conversation: the text that the model has to write."""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jinja2 import TemplateError

from train_loop.data.text.chat_template import ChatTemplate, Span, other_calls, unseen
from train_loop.data.text.content import texts_of, with_texts
from train_loop.data.text.messages import Message
from train_loop.data.text.turn import Turn, TurnFinder
from train_loop.data.text.values import Region, Values


def find_turns(values: Values, untrained: Collection[int] = ()) -> list[Turn]:
    """Return what the model writes in a conversation, in order. Raises TemplateError or TypeError.

    `untrained`: indices of assistant messages that are not trained.
    """
    template, messages = values.template, values.messages
    finder = TurnFinder(template, messages, values.text)
    trained = [n for n, message in enumerate(messages) if message["role"] == "assistant" and n not in untrained]
    if not template.marks_answers:
        repeated = _Repeated(finder, values)
        return [repeated.turn(number) for number in trained]
    spans = _marked_spans(template, messages, untrained)
    # Turns end as the last one does: one is enough, and each takes time.
    return [
        *(Turn(start, stop, stop) for start, stop in spans[:-1]),
        *(finder.marked(span, trained[-1:]) for span in spans[-1:]),
    ]


def _marked_spans(template: ChatTemplate, messages: list[Message], untrained: Collection[int]) -> list[Span]:
    """Return the spans that the template marks, without those of messages that are not trained."""
    text, spans = template.marked_text(messages)
    if not untrained:
        return spans
    mark = next(unseen(text))
    marked = [_everywhere(message, mark) if n in untrained else message for n, message in enumerate(messages)]
    other, others = template.marked_text(marked)
    if len(others) != len(spans):
        raise TemplateError("the spans of {% generation %} change with the contents of messages")
    return [span for span, (start, stop) in zip(spans, others, strict=True) if mark not in other[start:stop]]


def _everywhere(message: Message, mark: str) -> Message:
    """Return a message with marks around its texts and in each of its tool calls."""
    calls, content = message.get("tool_calls"), message.get("content")
    new = message | ({"tool_calls": other_calls(calls, mark)} if calls else {})
    if not content and calls:
        return new
    return new | {"content": with_texts(content, [mark + text + mark for text in texts_of(content)])}


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
