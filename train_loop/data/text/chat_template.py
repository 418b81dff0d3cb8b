"""Chat templates: a conversation → text, by transformers, and the message values that the text lacks."""

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from jinja2 import Environment, TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

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
_PRIVATE_USE = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))


@dataclass(frozen=True)
class ChatTemplate:
    """A Hugging Face chat template, its variables, and the added tokens, which can end a turn."""

    source: str
    variables: dict[str, Any]
    markers: tuple[str, ...]
    tools: Tools | None = None
    """Tools of the conversations to render."""

    def text(self, messages: list[Message], *, prompt: bool = False) -> str:
        """Return a conversation as text; `prompt`: with the generation prompt. Raises TemplateError or TypeError."""
        texts, _ = render_jinja_template(
            [messages], self.tools, chat_template=self.source, add_generation_prompt=prompt, **self.variables
        )
        return _within_bounds(str(texts[0]), messages)

    def marked_text(self, messages: list[Message]) -> tuple[str, list[Span]]:
        """Return a conversation as text, and the spans of it that the template marks with {% generation %}."""
        texts, spans = render_jinja_template(
            [messages], self.tools, chat_template=self.source, return_assistant_tokens_mask=True, **self.variables
        )
        return _within_bounds(texts[0], messages), spans[0]

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
    def uses_tools(self) -> bool:
        """Return whether the template reads the tools of a conversation."""
        return "tools" in _names(self.source)

    def unused_values(self, messages: list[Message], text: str) -> list[tuple[int, str]]:
        """Return the message's index and the key of each value that `text` lacks.

        Reasoning may be absent: templates leave out that of earlier turns.
        """
        suspects = [
            *((number, key) for number, message in enumerate(messages) for key in self._strange_keys(message)),
            *self._unmarked_values(messages, text),
        ]
        return [suspect for suspect in sorted(set(suspects)) if self._is_unused(messages, text, *suspect)]

    def mentions(self, key: str) -> bool:
        """Return whether the template uses a message key anywhere."""
        return key in _names(self.source)

    def _strange_keys(self, message: Message) -> Iterator[str]:
        """Yield the keys with a value that the template never mentions."""
        for key, value in message.items():
            # A tool's result may name the tool, even if the template does not use the name.
            names_tool = key == "name" and message["role"] not in ("system", "user", "assistant")
            if not self.mentions(key) and value not in ("", [], {}, None) and not names_tool:
                yield key

    def _unmarked_values(self, messages: list[Message], text: str) -> list[tuple[int, str]]:
        """Return the contents and tool calls whose marks are absent after all of them were marked and rendered once."""
        marks, marked = unseen(text), [dict(message) for message in messages]
        found: dict[tuple[int, str], str] = {}
        for number, message in enumerate(messages):
            if (message.get("content") or "").strip():
                found[number, "content"] = mark = next(marks)
                marked[number]["content"] = message["content"].rstrip() + mark
            if message.get("tool_calls"):
                found[number, "tool_calls"] = mark = next(marks)
                marked[number]["tool_calls"] = _renamed(message["tool_calls"], mark)
        try:
            shown = self.text(marked)
        except REFUSED:
            return list(found)
        return [value for value, mark in found.items() if mark not in shown]

    def _is_unused(self, messages: list[Message], text: str, number: int, key: str) -> bool:
        other = {name: value for name, value in messages[number].items() if name != key}
        if key == "content":
            other[key] = next(unseen(text))
        with suppress(*REFUSED):  # it fails without the value, so it uses the value
            return self.text([*messages[:number], other, *messages[number + 1 :]]) == text
        return False


def unseen(text: str) -> Iterator[str]:
    """Yield the characters of the private use areas that a text lacks."""
    return (char for area in _PRIVATE_USE for char in map(chr, area) if char not in text)


def compile_template(source: str, named: str) -> None:
    """Compile a template, called `named` in errors. Raises DataError if it is not valid Jinja."""
    try:
        render_jinja_template([], chat_template=source)  # without a conversation, this only compiles it
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


def _renamed(calls: Any, mark: str) -> Any:
    """Return tool calls whose names end with a mark; as they are if their form is unknown."""
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        return calls
    nested = [call["function"] if isinstance(call.get("function"), dict) else None for call in calls]
    return [
        {**call, "name": f"{call.get('name')}{mark}"}
        if function is None
        else {**call, "function": {**function, "name": f"{function.get('name')}{mark}"}}
        for call, function in zip(calls, nested, strict=True)
    ]


def _within_bounds(text: str, messages: list[Message]) -> str:
    # A template can multiply its input: limit its output to a multiple of that.
    most = _LONGEST_TEXT + 100 * sum(len(str(message)) for message in messages)
    if len(text) > most:
        raise DataError(
            f"the chat template makes {len(text)} characters of {len(messages)} messages, and at most {most} are "
            "allowed; correct the template"
        )
    return text
