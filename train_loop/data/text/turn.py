"""The text of one message in a rendered conversation: what the model has to write, and the end of its turn.

It is found by rendering variants of the conversation, not by the names or flags of tokens.
"""

from bisect import bisect_left
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from jinja2 import TemplateError

from train_loop.data.text.chat_template import REFUSED, ChatTemplate, Span, other_calls, renamed, unseen
from train_loop.data.text.content import replaced
from train_loop.data.text.messages import Message, with_content

_PLAIN: list[Message] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


class Turn(NamedTuple):
    """The text of the model in one turn: characters [start, stop) of a text, of which [end, stop) end the turn.

    The end is empty if nothing in the text ends the turn.
    """

    start: int
    end: int
    stop: int


@dataclass(frozen=True)
class TurnFinder:
    """A search for the text of single messages."""

    template: ChatTemplate
    messages: list[Message]
    text: str
    """The rendered messages."""

    def answer(self, number: int) -> Turn:
        """Return what the model writes of an assistant message: its text after the generation prompt."""
        own = self.own(number)
        prompt = self._generation_prompt(number, before=own.start)
        start = own.start if prompt is None else min(prompt[1], own.stop)
        return Turn(start, max(start, own.end), own.stop)

    def marked(self, span: Span, numbers: Sequence[int]) -> Turn:
        """Return the turn of a span that the template marks, which may belong to one of some messages."""
        start, stop = span
        with suppress(*REFUSED):
            for own in map(self.own, numbers):
                if overlap(span, own):
                    return Turn(start, max(start, min(own.end, stop)), stop)
        return Turn(start, start, stop)  # any part of it may be the end

    def own(self, number: int) -> Turn:
        """Return the text that one message adds, with the end of its turn."""
        # Render without later messages first: a template may write a tool's result into its call, or reject a result
        # without its call. But some templates render the last message differently, with its reasoning, or require a
        # user message.
        alone = self._alone(number)
        if alone is not None:
            with suppress(*REFUSED):
                start, end, _ = self._change(alone, number)
                if end <= _shared(self.text, alone):
                    return self._ended(number, (start, end), alone[end:])
        try:
            start, end, is_shown = self._change_within(number)
        except REFUSED:
            if alone is None:
                raise
            return self._found(alone, number)
        if not is_shown:
            return Turn(start, end, end)
        return self._ended(number, (start, end), self._known_ending(number))

    def _ended(self, number: int, body: Span, known: str) -> Turn:
        """Return the turn of a message's text, whose end is a known one or the next marker.

        A template may write more after the last message than after others, so the common part counts, up to its last
        whole token.
        """
        (start, end), known = body, known.rstrip()
        common = _shared(known, self.text[end:])
        if common < len(known):
            tokens = self.template.marker.finditer(known)
            common = max((token.end() for token in tokens if token.end() <= common), default=0)
        return Turn(start, end, end + common if common else self._next_marker(number, end))

    def _alone(self, number: int, content: str | None = None) -> str | None:
        """Return the text without later messages, with another content; None if the template rejects that."""
        message = self.messages[number]
        new = {} if content is None else {"content": replaced(message.get("content"), content)}
        with suppress(*REFUSED):
            return self.template.text([*self.messages[:number], message | new])
        return None

    def _change(self, text: str, number: int, later: Sequence[Message] = (), *, calls: bool = False) -> "_Change":
        """Return what changes in a text with a message: common prefix and suffix are not the message's.

        `calls`: whether only the message's tool calls are others, and not its content.
        """
        mark, message = next(unseen(text)), self.messages[number]
        other = message | {"tool_calls": other_calls(message["tool_calls"], mark)} if calls else None
        changed = self.template.text([*self.messages[:number], other or with_content(message, mark), *later])
        start = _shared(text, changed)
        stop = max(start, len(text) - _shared(text[::-1], changed[::-1]))
        is_shown = stop > start or changed.startswith(mark, start)
        # The first token that changed does so as a whole. Of the last one, the common part is the end of the turn.
        start = self.token_around(text, start)[0]
        return _Change(start, stop, is_shown)

    def _change_within(self, number: int) -> "_Change":
        """Return what changes with a message in the whole text, without the results of its tool calls."""
        change = self._change(self.text, number, self.messages[number + 1 :])
        if self.messages[number].get("tool_calls") and number + 1 < len(self.messages):
            # A template may write the results of a call into the assistant's turn; the model does not produce them.
            stops = [change.stop, self._content_start(number + 1), self._before_results(number)]
            # The message's own text may come after the results, and its calls are before them.
            calls = self._alone(number, content="")
            if calls is not None and self.text.startswith(calls.rstrip()):
                stops.append(len(calls.rstrip()))
            return change._replace(stop=max(change.start, min(stops)))
        return change

    def _before_results(self, number: int) -> int:
        """Return where the results of a message's tool calls begin in its turn; the text's length if they do not."""
        rest = number + 1
        while rest < len(self.messages) and self.messages[rest]["role"] not in ("user", "assistant"):
            rest += 1
        mark, message = next(unseen(self.text)), self.messages[number]
        last = message | {"tool_calls": renamed(message["tool_calls"], mark, len(message["tool_calls"]) - 1)}
        try:
            named = self.template.text([*self.messages[:number], last, *self.messages[number + 1 :]]).find(mark)
            without = self.template.text([*self.messages[: number + 1], *self.messages[rest:]])
        except REFUSED:
            return len(self.text)
        place = self.token_around(self.text, _shared(self.text, without))[0]
        return place if 0 <= named < place else len(self.text)

    def token_around(self, text: str, place: int) -> Span:
        """Return the token that begins before a place and ends after it; without one, the place twice."""
        reach = self.template.longest_token
        found = self.template.marker.finditer(text, max(0, place - reach), place + reach)
        return next((token.span(1) for token in found if token.start(1) < place < token.end()), (place, place))

    def _content_start(self, number: int) -> int:
        alone = self._alone(number)
        if alone is not None and self.text.startswith(alone):
            return self._change(alone, number).start
        return self._change(self.text, number, self.messages[number + 1 :]).start

    def _found(self, alone: str, number: int) -> Turn:
        """Return the turn of a message that is in the whole text as it is in the one without later messages.

        A template may reject a tool's result without its call, and write the tools before the last question.
        """
        floor = self.own(number - 1).stop if number else 0
        # A template may leave out the content beside tool calls in all messages but the last.
        for last in (alone, self._alone(number, content="")):
            if last is not None:
                start, end, _ = self._change(last, number)
                place = self.text.find(last[start:end], floor)
                if place >= 0:
                    return self._ended(number, (place, place + end - start), last[end:])
        return self._called(alone, number, floor)

    def _called(self, alone: str, number: int, floor: int) -> Turn:
        """Return the turn of a message with tool calls from its generation prompt and the ends of its calls."""
        if self.messages[number].get("tool_calls"):
            start, end, _ = self._change(self.text, number, self.messages[number + 1 :], calls=True)
            prompt = self._generation_prompt(number, before=start, floor=floor)
            if prompt is not None and prompt[0] < prompt[1]:
                known = alone[self._change(alone, number, calls=True).stop :]
                return self._ended(number, (prompt[1], end), known)
        raise TemplateError(f"the text of messages[{number}] changes with later messages")

    def _known_ending(self, number: int) -> str:
        """Return the end of a message as the last one, or of a plain one if the template rejects that."""
        for known in (self.messages[: number + 1], _PLAIN):
            with suppress(*REFUSED):
                alone = self.template.text(known)
                finder = TurnFinder(self.template, known, alone)
                return alone[finder._change(alone, len(known) - 1).stop :]
        return ""

    def _next_marker(self, number: int, stop: int) -> int:
        """Return the end of the tokens before the next message, or of the token that opens it, as both end this turn.

        Some templates end all turns but the last; others end a turn by the marker of the next role.
        """
        if number + 1 == len(self.messages):
            return stop
        marker, end = self.template.marker, stop
        header = self._header(number + 1, stop)
        while (found := marker.match(self.text, end)) and found.end() <= header:
            end = found.end()
        # The model does not write the header of its own next message.
        if end > stop or self.messages[number + 1]["role"] == "assistant":
            return end
        found = marker.match(self.text, stop)
        return found.end() if found is not None and found.end() <= self._first_of_content(number + 1) else end

    def _first_of_content(self, number: int) -> int:
        """Return where a message's content begins; the text's length if the template does not tell."""
        with suppress(*REFUSED):
            return self._content_start(number)
        return len(self.text)

    def _header(self, number: int, floor: int) -> int:
        """Return the index at or after `floor` at which the header of a message begins.

        That of an assistant's message begins with the generation prompt; others have the header of a first message.
        It is 0 if the template rejects such a conversation.
        """
        try:
            content = self._content_start(number)
            if self.messages[number]["role"] == "assistant":
                prompt = self._generation_prompt(number, before=content, floor=floor)
                if prompt is not None and prompt[0] < prompt[1]:
                    return prompt[0]
            mark = next(unseen(self.text))
            before = self.template.text([with_content(self.messages[number], mark)]).partition(mark)[0]
        except REFUSED:
            return 0
        start = content - _shared(self.text[:content][::-1], before[::-1])
        # A token that ends in the common part belongs to the text before.
        return self.token_around(self.text, start)[1]

    def _generation_prompt(self, number: int, *, before: int, floor: int | None = None) -> Span | None:
        """Return the span of the generation prompt of an assistant message; None if it is not found.

        It is at or after `floor`, by default the end of the previous message, and ends at or before `before`.
        """
        # After an answer, a template may write something else before the prompt.
        last = max((n for n in range(number) if self.messages[n]["role"] != "assistant"), default=number - 1) + 1
        earlier, prompt = self.prompt(last)
        if prompt and last == number and self.text.startswith(earlier + prompt):
            return len(earlier), len(earlier) + len(prompt)
        if not prompt and last == number and len(earlier) <= before and self._is_always_prompted(number, earlier):
            return len(earlier), len(earlier)
        try:
            if floor is None:
                # Earlier messages may render differently without later ones, for example without their reasoning.
                floor = self.own(number - 1).stop if prompt and number else before
        except REFUSED:
            return None
        start = self.text.find(prompt, floor, before)
        return None if start < 0 else (start, start + len(prompt))

    def _is_always_prompted(self, number: int, earlier: str) -> bool:
        """Return whether the text before an answer ends with a prompt that is not there before a user's message."""
        if not earlier or not self.text.startswith(earlier):
            return False
        question: Message = {"role": "user", "content": next(unseen(self.text))}
        with suppress(*REFUSED):
            return not self.template.text([*self.messages[:number], question]).startswith(earlier)
        return False

    def prompt(self, number: int) -> tuple[str, str]:
        """Return the text before a message, and the generation prompt after it; empty if the template rejects them."""
        try:
            earlier = self.template.text(self.messages[:number])
            prompted = self.template.text(self.messages[:number], prompt=True)
        except REFUSED:  # some templates reject a conversation that no user message begins
            return "", ""
        return (earlier, prompted.removeprefix(earlier)) if prompted.startswith(earlier) else ("", prompted)


class _Change(NamedTuple):
    """Characters [start, stop) of a text that change with a message, and whether the text shows the message."""

    start: int
    stop: int
    is_shown: bool


def overlap(one: Sequence[int], other: Sequence[int]) -> bool:
    """Return whether two spans overlap; each begins with its first index and ends with its last."""
    return one[0] < other[-1] and other[0] < one[-1]


def _shared(one: str, other: str) -> int:
    """Return the length of the common prefix, by bisection: Python compares slices fast and characters slowly."""
    lengths = range(min(len(one), len(other)) + 1)
    return bisect_left(lengths, True, key=lambda length: one[:length] != other[:length]) - 1
