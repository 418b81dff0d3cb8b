"""Chat templates: a conversation → text, by transformers."""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import date, datetime, time
from functools import lru_cache
from typing import Any

from jinja2 import Environment, TemplateError

from train_loop.data.text.messages import THOUGHTS, Message, Tools
from train_loop.errors import DataError

Span = tuple[int, int]
"""Characters [start, stop) of a text."""

# A template's arithmetic raises TypeError, for example on tool arguments that are a string, not an object.
REFUSED = (TemplateError, TypeError)
_LINKS = {"role", "content", "tool_call_id"}
"""Message keys that a template may ignore: for example, it can place a tool's result at its call, without the id."""
_LONGEST_TEXT = 1 << 20
"""Maximum characters of a rendered conversation, in addition to 100 times those of its messages."""
_MOST_MESSAGES, _MOST_TIMES = 50_000, 100
"""Maximum messages that are rendered to encode a conversation: a constant, and a factor of its own number."""
_PRIVATE_USE = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))


@dataclass(frozen=True)
class ChatTemplate:
    """A Hugging Face chat template, its variables, and the added tokens, which can end a turn."""

    source: str
    variables: dict[str, Any]
    markers: tuple[str, ...]
    tools: Tools | None = None
    """Tools of the conversations to render."""
    rendered: Counter[str] = field(default_factory=Counter)
    """Messages that were rendered for one conversation."""

    def text(self, messages: list[Message], *, prompt: bool = False) -> str:
        """Return a conversation as text; `prompt`: with the generation prompt. Raises TemplateError or TypeError."""
        self._count(len(messages))
        texts, _ = _render(
            [messages], self.tools, chat_template=self.source, add_generation_prompt=prompt, **self.variables
        )
        return _within_bounds(str(texts[0]), messages)

    def marked_text(self, messages: list[Message]) -> tuple[str, list[Span]]:
        """Return a conversation as text, and the spans of it that the template marks with {% generation %}."""
        self._count(len(messages))
        texts, spans = _render(
            [messages], self.tools, chat_template=self.source, return_assistant_tokens_mask=True, **self.variables
        )
        return _within_bounds(texts[0], messages), spans[0]

    def _count(self, messages: int) -> None:
        """Raise DataError if a conversation takes too many renderings: no row may take minutes."""
        self.rendered["most"] = max(self.rendered["most"], messages)
        self.rendered["all"] += messages
        if self.rendered["all"] > _MOST_MESSAGES + _MOST_TIMES * self.rendered["most"]:
            raise DataError(
                f"the turns of {self.rendered['most']} messages can only be found by rendering them more than "
                f"{self.rendered['all'] // self.rendered['most']} times; split the conversation, or mark answers with "
                "{% generation %} in the template"
            )

    @property
    def marker(self) -> re.Pattern[str]:
        """Pattern of one added token, as its first group, with white space before it."""
        return _marker(self.markers)

    @property
    def longest_token(self) -> int:
        """Characters of the longest added token."""
        return max(map(len, self.markers), default=0)

    @property
    def marks_answers(self) -> bool:
        """Return whether the template marks the text that is trained."""
        return "endgeneration" in _code(self.source)[0]

    @property
    def is_timed(self) -> bool:
        """Return whether the template may write another text at another time."""
        return not {"strftime_now", "random"}.isdisjoint(_code(self.source)[0])

    @property
    def uses_tools(self) -> bool:
        """Return whether the template reads the tools of a conversation."""
        return "tools" in _names(self.source)

    def mentions(self, key: str) -> bool:
        """Return whether the template uses a message key anywhere."""
        return key in _names(self.source)


def unseen(text: str) -> Iterator[str]:
    """Yield the characters of the private use areas that a text lacks. Raises DataError after the last one."""
    used = set(text)
    yield from (char for area in _PRIVATE_USE for char in map(chr, area) if char not in used)
    raise DataError("the conversation has more messages and tool calls than Unicode has private characters; split it")


def dated(source: str, day: date | None) -> str:
    """Return a template that writes the date of a day; unchanged if it writes none, or `day` is None.

    The template sets `strftime_now` to a look-up of its own formats: the renderer of transformers takes no clock.
    """
    names, strings = _code(source)
    if day is None or "strftime_now" not in names:
        return source
    written = {one: datetime.combine(day, time()).strftime(one) for one in sorted(strings) if "%" in one}
    return f"{{% set strftime_now = {written!r}.get %}}\n{source}"  # the line's end is part of the tag


def _render(conversations: list[list[Message]], *arguments: Any, **named: Any) -> Any:
    """Call `render_jinja_template` of transformers, which only jobs with conversations import."""
    from transformers.utils.chat_template_utils import render_jinja_template  # noqa: PLC0415 - it takes a second

    return render_jinja_template(conversations, *arguments, **named)


def compile_template(source: str, named: str) -> None:
    """Compile a template, called `named` in errors. Raises DataError if it is not valid Jinja."""
    try:
        _render([], chat_template=source)  # without a conversation, this only compiles it
    except (TemplateError, TypeError, ValueError, ArithmeticError) as error:
        raise DataError(f"{named} is not valid Jinja: {error}; copy it again") from error
    except (RecursionError, SyntaxError) as error:
        raise DataError(f"{named} is nested too deeply to be compiled; write it with fewer levels") from error


@lru_cache(maxsize=4)
def _marker(tokens: tuple[str, ...]) -> re.Pattern[str]:
    longest_first = sorted(filter(None, tokens), key=len, reverse=True)
    return re.compile(rf"\s*({'|'.join(map(re.escape, longest_first)) or '(?!)'})")


@lru_cache(maxsize=4)
def _code(source: str) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names and the strings in a template's code."""
    tokens = [(kind, value.strip("'\"")) for _, kind, value in Environment().lex(source)]
    names, strings = (frozenset(value for kind, value in tokens if kind == wanted) for wanted in ("name", "string"))
    return names, strings


@lru_cache(maxsize=4)
def _names(source: str) -> frozenset[str]:
    """Return every name and string in a template's code, including the message keys that it uses."""
    code = frozenset().union(*_code(source))
    return code | _LINKS | (THOUGHTS if code & THOUGHTS else frozenset())


def renamed(calls: Any, mark: str, place: int) -> Any:
    """Return tool calls of which one has a name that begins with a mark; as they are if their form is unknown."""
    if not isinstance(calls, list) or not isinstance(calls[place], dict):
        return calls
    call, function = calls[place], calls[place].get("function")
    if isinstance(function, dict):
        new = {**call, "function": {**function, "name": f"{mark}{function.get('name')}"}}
    else:
        new = {**call, "name": f"{mark}{call.get('name')}"}
    return [*calls[:place], new, *calls[place + 1 :]]


def other_calls(calls: Any, mark: str) -> Any:
    """Return tool calls with a mark as their only argument, or after the names of those without arguments."""
    new = calls
    for place, call in enumerate(calls):
        function = call.get("function", call) if isinstance(call, dict) else {}
        if isinstance(function, dict) and "arguments" in function:
            other = {**function, "arguments": mark if isinstance(function["arguments"], str) else {mark: mark}}
            other = {**call, "function": other} if "function" in call else other
            new = [*new[:place], other, *new[place + 1 :]]
        else:
            new = renamed(new, mark, place)
    return new


def _within_bounds(text: str, messages: list[Message]) -> str:
    # A template can multiply its input: limit its output to a multiple of that.
    most = _LONGEST_TEXT + 100 * sum(len(str(message)) for message in messages)
    if len(text) > most:
        raise DataError(
            f"the chat template makes {len(text)} characters of {len(messages)} messages, and at most {most} are "
            "allowed; correct the template"
        )
    return text
