"""Chat templates: a conversation → text, and the spans of it that the model has to produce.

Spans are found by rendering variants of the conversation, not by the names or flags of tokens.
"""

import re
from bisect import bisect_left
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from jinja2 import Environment, TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from train_loop.data.text.messages import Message, Tools
from train_loop.errors import DataError

Span = tuple[int, int]
"""Characters [start, stop) of a text."""

# A template's arithmetic raises TypeError, for example on tool arguments that are a string, not an object.
REFUSED = (TemplateError, TypeError)
_LINKS = {"role", "content", "tool_call_id"}
"""Message keys that a template may ignore: for example, it can place a tool's result at its call, without the id."""
_THOUGHTS = {"reasoning", "reasoning_content", "thinking"}
"""Equivalent keys for an assistant's reasoning: transformers makes the value available under each of them."""
_LONGEST_TEXT = 1 << 20
"""Maximum characters of a rendered conversation, in addition to 100 times those of its messages."""
_PLAIN: list[Message] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


@dataclass(frozen=True)
class Rendered:
    """A conversation as text, with the spans that the model has to produce; a span may be empty."""

    text: str
    trained: list[Span]


@dataclass(frozen=True)
class ChatTemplate:
    """A Hugging Face chat template, its variables, and the pattern of tokens that can end a turn."""

    source: str
    variables: dict[str, Any]
    marker: re.Pattern[str]
    tools: Tools | None = None
    """Tools of the conversations to render."""

    def render(self, messages: list[Message], untrained: Collection[int] = ()) -> Rendered:
        """Render messages; the text after each generation prompt is trained. Raises TemplateError or TypeError.

        `untrained`: indices of assistant messages that are not trained.
        """
        if "endgeneration" in self.source:
            return self._render_marked(messages, untrained)
        text = self._text(messages)
        turns = [n for n, message in enumerate(messages) if message["role"] == "assistant" and n not in untrained]
        return Rendered(text, [self._answer(text, messages, turn) for turn in turns])

    @property
    def uses_tools(self) -> bool:
        """Return whether the template reads the tools of a conversation."""
        return "tools" in _names(self.source)

    def unused_key(self, messages: list[Message], text: str) -> tuple[int, str] | None:
        """Return the index and key of the first value that does not affect the rendered `text`; None if all do."""
        for number, message in enumerate(messages):
            strange = [key for key in message if key not in _names(self.source)]
            for key in [key for key in strange if message[key] not in ("", [], {})]:
                # A tool's result may name the tool, even if the template does not use the name.
                if key == "name" and message["role"] not in ("system", "user", "assistant"):
                    continue
                less = {name: value for name, value in message.items() if name != key}
                with suppress(*REFUSED):  # it fails without the key, so it uses the key
                    if self._text([*messages[:number], less, *messages[number + 1 :]]) == text:
                        return number, key
        return None

    def _render_marked(self, messages: list[Message], untrained: Collection[int]) -> Rendered:
        """Render messages with the spans that the template marks with {% generation %}."""
        texts, spans = render_jinja_template(
            [messages],
            self.tools,
            chat_template=self.source,
            return_assistant_tokens_mask=True,
            **self.variables,
        )
        text = _within_bounds(texts[0], messages)
        silent = [self._own(text, messages, turn) for turn in untrained]
        kept = [span for span in spans[0] if not any(span[0] < stop and start < span[1] for start, stop in silent)]
        return Rendered(text, kept)

    def _text(self, messages: list[Message], *, prompt: bool = False) -> str:
        texts, _ = render_jinja_template(
            [messages], self.tools, chat_template=self.source, add_generation_prompt=prompt, **self.variables
        )
        return _within_bounds(str(texts[0]), messages)

    def _answer(self, text: str, messages: list[Message], turn: int) -> Span:
        start, stop = self._own(text, messages, turn)
        return min(self._takes_over(text, messages, turn, start), stop), stop

    def _own(self, text: str, messages: list[Message], turn: int) -> Span:
        """Return the span that one message adds to the text, with the end of its turn.

        It is found by rendering another message in its place: the common prefix and suffix do not belong to the
        message.
        """
        # Render without later messages first: a template may write a tool's result into its call, or reject a result
        # without its call. But some templates render the last message differently, with its reasoning, or require a
        # user message.
        try:
            alone = self._text(messages[: turn + 1])
        except REFUSED:
            alone = None
        if alone is None or not text.startswith(alone):
            return self._own_among_others(text, messages, turn)
        start, stop, _ = self._changes(alone, messages[:turn], messages[turn], [])
        ending = alone[stop:].rstrip()
        return start, stop + len(ending) if ending else self._next_marker(text, messages, turn, stop)

    def _own_among_others(self, text: str, messages: list[Message], turn: int) -> Span:
        start, stop, shown = self._changes(text, messages[:turn], messages[turn], messages[turn + 1 :])
        if messages[turn].get("tool_calls") and turn + 1 < len(messages):
            # A template may write the results of a call into the assistant's turn; the model does not produce them.
            stop = max(start, min(stop, self._own(text, messages, turn + 1)[0]))
        if not shown:
            return start, stop
        ended = stop + self._ending(text[stop:], messages, turn)
        return start, ended if ended > stop else self._next_marker(text, messages, turn, stop)

    def _ending(self, rest: str, messages: list[Message], turn: int) -> int:
        """Return the length of the end of a turn at the start of `rest`, from a rendering without later messages.

        A template may write more after the last message than after others, so the common part counts, up to its last
        whole token.
        """
        for known in (messages[: turn + 1], _PLAIN):
            with suppress(*REFUSED):
                alone = self._text(known)
                ending = alone[self._changes(alone, known[:-1], known[-1], [])[1] :].rstrip()
                common = _shared(ending, rest)
                whole = [found.end() for found in self.marker.finditer(ending) if found.end() <= common]
                return common if common == len(ending) else max(whole, default=0)
        return 0

    def _next_marker(self, text: str, messages: list[Message], turn: int, stop: int) -> int:
        """Return the end of the tokens before the next message, or of the token that opens it, as both end this turn.

        Some templates end all turns but the last; others end a turn by the marker of the next role.
        """
        if turn + 1 == len(messages):
            return stop
        header, end = self._header(text, messages, turn + 1), stop
        while (marker := self.marker.match(text, end)) and marker.end() <= header:
            end = marker.end()
        # The model does not write the header of its own next message.
        if end == stop and messages[turn + 1]["role"] != "assistant" and (marker := self.marker.match(text, stop)):
            end = marker.end()
        return end

    def _header(self, text: str, messages: list[Message], turn: int) -> int:
        """Return the index at which the header of a message begins: what is before it at the start of a conversation.

        If the template rejects such a start, it is 0.
        """
        content = self._changes(text, messages[:turn], messages[turn], messages[turn + 1 :])[0]
        unseen = _unseen(text)
        try:
            before = self._text([_with_content(messages[turn], unseen)]).partition(unseen)[0]
        except REFUSED:
            return 0
        start = content - _shared(text[:content][::-1], before[::-1])
        # Tokens are whole: one that ends in the common part belongs to the text before.
        return next(
            (found.end() for found in self.marker.finditer(text) if found.start(1) < start < found.end()), start
        )

    def _changes(
        self, text: str, before: list[Message], message: Message, after: list[Message]
    ) -> tuple[int, int, bool]:
        """Return the span that changes with the content of a message, and whether the template shows the message."""
        unseen = _unseen(text)
        changed = self._text([*before, _with_content(message, unseen), *after])
        start = _shared(text, changed)
        stop = max(start, len(text) - _shared(text[::-1], changed[::-1]))
        return start, stop, stop > start or changed.startswith(unseen, start)

    def _takes_over(self, text: str, messages: list[Message], turn: int, start: int) -> int:
        """Return the index after the generation prompt, from which the model writes; `start` without a prompt."""
        try:
            before, prompt = (self._text(messages[:turn], prompt=with_prompt) for with_prompt in (False, True))
            header = prompt.removeprefix(before)
            if header and text.startswith(prompt):
                return len(prompt)
            # Earlier messages may render differently here, without their reasoning: search after the previous message.
            floor = self._own(text, messages, turn - 1)[1] if header and turn else start
        except REFUSED:  # some templates reject a conversation that no user message begins
            return start
        found = text.find(header, floor, start)
        return start if found < 0 else found + len(header)


def marker_of(tokens: Collection[str]) -> re.Pattern[str]:
    """Return the pattern of one of the tokens, as its first group, with white space before it."""
    longest_first = sorted(filter(None, tokens), key=len, reverse=True)
    return re.compile(rf"\s*({'|'.join(map(re.escape, longest_first)) or '(?!)'})")


def compile_template(source: str, named: str) -> None:
    """Compile a template, called `named` in errors. Raises DataError if it is not valid Jinja."""
    try:
        render_jinja_template([], chat_template=source)  # without a conversation, this only compiles it
    except (TemplateError, TypeError, ValueError, ArithmeticError) as error:
        raise DataError(f"{named} is not valid Jinja: {error}; copy it again") from error
    except (RecursionError, SyntaxError) as error:
        raise DataError(f"{named} is nested too deeply to be compiled; write it with fewer levels") from error


@lru_cache(maxsize=4)
def _names(source: str) -> frozenset[str]:
    """Return every name and string in a template's code, including the message keys that it uses."""
    code = {value.strip("'\"") for _, kind, value in Environment().lex(source) if kind in ("name", "string")}
    return frozenset(code | _LINKS | (_THOUGHTS if code & _THOUGHTS else set()))


def _within_bounds(text: str, messages: list[Message]) -> str:
    # A template can multiply its input: limit its output to a multiple of that.
    most = _LONGEST_TEXT + 100 * sum(len(str(message)) for message in messages)
    if len(text) > most:
        raise DataError(
            f"the chat template makes {len(text)} characters of {len(messages)} messages, and at most {most} are "
            "allowed; correct the template"
        )
    return text


def _with_content(message: Message, content: str) -> Message:
    """Return a message with another content, and with the keys that a header may show."""
    return {key: message[key] for key in ("role", "name", "tool_call_id") if key in message} | {"content": content}


def _unseen(text: str) -> str:
    """Return a character of the private use area that a text lacks."""
    return next(char for char in map(chr, range(0xE000, 0xF900)) if char not in text)


def _shared(one: str, other: str) -> int:
    """Return the length of the common prefix, by bisection: Python compares slices fast and characters slowly."""
    lengths = range(min(len(one), len(other)) + 1)
    return bisect_left(lengths, True, key=lambda length: one[:length] != other[:length]) - 1
