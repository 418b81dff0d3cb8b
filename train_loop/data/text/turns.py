"""What the model has to write in a rendered conversation: all turns of the assistant."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from jinja2 import TemplateError

from train_loop.data.text.bodies import Bodies, find_bodies
from train_loop.data.text.chat_template import ChatTemplate, Span, other_calls, unseen
from train_loop.data.text.messages import Message
from train_loop.data.text.turn import Turn, TurnFinder

_MANY = 3
"""Turns from which on it is faster to find them together."""


def find_turns(
    template: ChatTemplate, messages: list[Message], text: str, untrained: Collection[int] = ()
) -> list[Turn]:
    """Return what the model writes in a conversation, in order. Raises TemplateError or TypeError.

    `text`: the rendered messages. `untrained`: indices of assistant messages that are not trained.
    """
    finder = TurnFinder(template, messages, text)
    trained = [n for n, message in enumerate(messages) if message["role"] == "assistant" and n not in untrained]
    if not template.marks_answers:
        return _repeated(finder, trained) or [finder.answer(number) for number in trained]
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
    """Return a message with a mark at the ends of its content and in each of its tool calls."""
    calls = message.get("tool_calls")
    new = message | ({"tool_calls": other_calls(calls, mark)} if calls else {})
    return new | {"content": mark + (message["content"] or "") + mark} if message["content"] or not calls else new


def _repeated(finder: TurnFinder, numbers: Sequence[int]) -> list[Turn] | None:
    """Return the turns of a long conversation from the first turn of each kind; None if that is not possible."""
    if len(numbers) < _MANY:
        return None
    for with_thoughts in (True, False):
        bodies = find_bodies(finder.template, finder.messages, finder.text, numbers, with_thoughts=with_thoughts)
        if bodies is not None:
            return _Repeated(finder, bodies, with_thoughts).turns(numbers)
    return None


@dataclass(frozen=True)
class _Repeated:
    """Turns like earlier ones: an equal text after an answer ends it equally, and a prompt is equal for all answers."""

    finder: TurnFinder
    bodies: Bodies
    with_thoughts: bool
    """Whether the bodies hold the reasoning."""
    ends: dict[tuple[bool, str], int] = field(default_factory=dict)
    """Lengths of ends, by whether tools are called and the text up to the next content."""
    prompts: dict[tuple[str, bool], str] = field(default_factory=dict)
    """Generation prompts by role of the message before and whether it calls tools."""

    def turns(self, numbers: Sequence[int]) -> list[Turn] | None:
        """Return the turns of some answers; None if one is unlike what it is alone."""
        found = [self._turn(number) for number in numbers]
        turns = [turn for turn in found if turn is not None]
        return turns if len(turns) == len(found) else None

    def _turn(self, number: int) -> Turn | None:
        start, end = self.bodies.answers[number]
        start = self.finder.token_around(self.finder.text, start)[0]
        kind = bool(self.finder.messages[number].get("tool_calls")), self.bodies.texts[number]
        if kind not in self.ends:
            own = self.finder.own(number)
            if own.end != end or (self.with_thoughts and own.start != start):
                return None
            self.ends[kind] = own.stop - own.end
        turn = Turn(start, end, end + self.ends[kind])
        after = self._after_prompt(number, turn)
        if after is None:
            return turn if self.with_thoughts else None
        return turn._replace(start=after)

    def _after_prompt(self, number: int, turn: Turn) -> int | None:
        """Return where the model starts to write a turn; None without a prompt."""
        before = self.bodies.ends.get(number - 1)
        if before is None:
            return self.finder.answer(number).start
        previous = self.finder.messages[number - 1]
        kind = previous["role"], bool(previous.get("tool_calls"))
        if kind not in self.prompts:
            self.prompts[kind] = self.finder.prompt(number)[1]
        prompt = self.prompts[kind]
        start = self.finder.text.find(prompt, before, turn.start + len(prompt)) if prompt else -1
        return None if start < 0 else min(start + len(prompt), turn.stop)
