"""Chat messages → tokens and labels, with the tokenizer's chat template; only the assistant's output is trained."""

import logging
import re
from bisect import bisect_left
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from train_loop.data.dataset import IGNORE
from train_loop.data.prepare.messages import Message, Tools, read_conversation, read_tools
from train_loop.data.prepare.tokenizer import TextTokenizer, load_tokenizer, read_object
from train_loop.errors import DataError
from train_loop.system.input_files import read_input

log = logging.getLogger(__name__)
Span = tuple[int, int]
"""Characters [start, stop) of a text."""

# A template's arithmetic raises TypeError, for example on tool arguments that are a string, not an object.
_REFUSED = (TemplateError, TypeError)
_LINKS = {"role", "content", "tool_call_id"}
"""Message keys that a template may ignore: for example, it can place a tool's result at its call, without the id."""
_THOUGHTS = {"reasoning", "reasoning_content", "thinking"}
"""Equivalent keys for an assistant's reasoning: transformers makes the value available under each of them."""
_LONGEST_TEXT = 1 << 20
"""Maximum characters of a rendered conversation, in addition to 100 times those of its messages."""


@dataclass(frozen=True)
class Rendered:
    """A conversation as text, with the spans that the model has to produce."""

    text: str
    trained: list[Span]


@dataclass(frozen=True)
class ChatTemplate:
    """A Hugging Face chat template, its variables, and the pattern of end-of-turn markers."""

    source: str
    variables: dict[str, str]
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
        spans = (self._answer(text, messages, turn) for turn in turns)
        return Rendered(text, [(start, stop) for start, stop in spans if start < stop])

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
                with suppress(*_REFUSED):  # it fails without the key, so it uses the key
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
        """Return the span that one message adds to the text, with its end-of-turn marker.

        It is found by rendering another message in its place: the common prefix and suffix do not belong to the
        message.
        """
        # Render without later messages first: a template may write a tool's result into its call, or reject a result
        # without its call. But some templates render the last message differently, with its reasoning, or require a
        # user message.
        try:
            alone = self._text(messages[: turn + 1])
        except _REFUSED:
            return self._own_among_others(text, messages, turn)
        if not text.startswith(alone):
            return self._own_among_others(text, messages, turn)
        start, stop, _ = self._changes(alone, messages[:turn], messages[turn], [])
        while marker := self.marker.match(alone, stop):
            stop = marker.end()
        return start, stop

    def _own_among_others(self, text: str, messages: list[Message], turn: int) -> Span:
        start, stop, shown = self._changes(text, messages[:turn], messages[turn], messages[turn + 1 :])
        if messages[turn].get("tool_calls") and turn + 1 < len(messages):
            # A template may write the results of a call into the assistant's turn; the model does not produce them.
            stop = max(start, min(stop, self._own(text, messages, turn + 1)[0]))
        marker = self.marker.match(text, stop) if shown else None
        return start, marker.end() if marker else stop

    def _changes(
        self, text: str, before: list[Message], message: Message, after: list[Message]
    ) -> tuple[int, int, bool]:
        """Return the span that changes with the content of a message, and whether the template shows the message."""
        unseen = next(char for char in map(chr, range(0xE000, 0xF900)) if char not in text)  # private use area
        other = {key: message[key] for key in ("role", "name", "tool_call_id") if key in message} | {"content": unseen}
        changed = self._text([*before, other, *after])
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
        except _REFUSED:  # some templates reject a conversation that no user message begins
            return start
        found = text.find(header, floor, start)
        return start if found < 0 else found + len(header)


@lru_cache(maxsize=4)
def _names(source: str) -> frozenset[str]:
    """Return every name and string in a template's code, including the message keys that it uses."""
    code = {value.strip("'\"") for _, kind, value in Environment().lex(source) if kind in ("name", "string")}
    return frozenset(code | _LINKS | (_THOUGHTS if code & _THOUGHTS else set()))


@lru_cache(maxsize=4)
def load_chat_template(folder: str) -> ChatTemplate:
    """Load the chat template of a tokenizer folder in Hugging Face's format. Raises DataError if it has none."""
    special = load_tokenizer(folder).special_tokens.values()
    config = _read(Path(folder, "special_tokens_map.json")) | _read(Path(folder, "tokenizer_config.json"))
    file = Path(folder, "chat_template.jinja")
    source = read_input(file).decode() if file.is_file() else _default(config.get("chat_template"))
    if source is None:
        raise DataError(
            f"the tokenizer in {folder} has no chat template, and messages need one; name the tokenizer of a chat "
            "model in model.tokenizer, or add a chat_template.jinja"
        )
    try:
        render_jinja_template([], chat_template=source)  # without a conversation, this only compiles it
    except (TemplateError, TypeError, ValueError, ArithmeticError) as error:
        raise DataError(f"the chat template in {folder} is not valid Jinja: {error}; copy it again") from error
    except (RecursionError, SyntaxError) as error:
        raise DataError(
            f"the chat template in {folder} is nested too deeply to be compiled; write it with fewer levels"
        ) from error
    variables = {key: _content(token) for key, token in config.items() if key.endswith("_token")}
    markers = "|".join(map(re.escape, sorted(special, key=len, reverse=True))) or "(?!)"
    return ChatTemplate(
        source, {key: text for key, text in variables.items() if text}, re.compile(rf"\s*(?:{markers})")
    )


def check_chat_template(folder: str) -> None:
    """Render the chat template of a folder once, as preparation will. Raises DataError if it is unusable."""
    template = load_chat_template(folder)
    try:
        template.render([{"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "Yes."}])
    except _REFUSED as error:
        # Some templates need another conversation, for example a system prompt: only real rows can show an error.
        log.debug("the chat template rejects a plain conversation: %s", error)
    except (AttributeError, ValueError, LookupError, ArithmeticError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"the chat template in {folder} fails: {error}; correct it or copy it again") from error


def encode_chat(
    tokenizer: TextTokenizer, template: ChatTemplate, messages: Any, system_prompt: str | None, tools: Any = None
) -> tuple[list[int], list[int]]:
    """Return the token ids of a conversation, ending with EOS, and their labels; all IGNORE if nothing is trained.

    `tools`: the row's cell of tools. Raises DataError, whose message is the reason alone, without the row.
    """
    conversation, template = read_conversation(messages), replace(template, tools=read_tools(tools))
    if system_prompt is not None and conversation.messages[0]["role"] != "system":
        conversation = conversation.after(system_prompt)
    turns, untrained = conversation.messages, conversation.untrained
    try:
        rendered = template.render(turns, untrained)
    except _REFUSED as error:
        raise DataError(
            f"the chat template rejects the messages: {error}; change the messages or the template"
        ) from error
    if (unused := template.unused_key(turns, rendered.text)) is not None:
        number, key = unused
        raise DataError(
            f"messages[{number - (len(turns) - len(messages))}] has the key {key!r:.60}, which the chat template does "
            "not use; remove it from the data, or use a template that does"
        )
    # Raises for a lone surrogate, which JSON can contain: the tokenizer's error would only name a type.
    rendered.text.encode()
    ids, labels, ended = _encode(tokenizer, rendered)
    if not ended:
        # The model learns to write EOS after its own last message, unless an end-of-turn marker ends that message.
        last_label = next((label for label in reversed(labels) if label != IGNORE), IGNORE)
        last = turns[-1]["role"] == "assistant" and len(turns) - 1 not in untrained
        last = last and last_label not in tokenizer.special_tokens
        ids.append(tokenizer.eos)
        labels.append(tokenizer.eos if last else IGNORE)
    return ids, labels


def _encode(tokenizer: TextTokenizer, rendered: Rendered) -> tuple[list[int], list[int], bool]:
    """Return token ids and labels of a text, and whether it ends with EOS; a token is trained if any of its text is."""
    trained = bytearray(len(rendered.text))
    for start, stop in rendered.trained:
        trained[start:stop] = b"\1" * (stop - start)
    ids, offsets = tokenizer.encode_with_offsets(rendered.text)
    labels = [token if 1 in trained[start:stop] else IGNORE for token, (start, stop) in zip(ids, offsets, strict=True)]
    end = len(rendered.text.rstrip())
    last = next((token for token, (start, _) in zip(ids[::-1], offsets[::-1], strict=True) if start < end), None)
    return ids, labels, last == tokenizer.eos


def _within_bounds(text: str, messages: list[Message]) -> str:
    # A template can multiply its input: limit its output to a multiple of that.
    most = _LONGEST_TEXT + 100 * sum(len(str(message)) for message in messages)
    if len(text) > most:
        raise DataError(
            f"the chat template makes {len(text)} characters of {len(messages)} messages, and at most {most} are "
            "allowed; correct the template"
        )
    return text


def _read(file: Path) -> dict[str, Any]:
    return read_object(file) if file.is_file() else {}


def _default(template: Any) -> str | None:
    """Return the template, or the template named `default` if there are several; None without one."""
    if isinstance(template, list):
        named = [one for one in template if isinstance(one, dict)]
        template = next((one.get("template") for one in named if one.get("name") == "default"), None)
    return template if isinstance(template, str) else None


def _content(token: Any) -> str | None:
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _shared(one: str, other: str) -> int:
    """Return the length of the common prefix, by bisection: Python compares slices fast and characters slowly."""
    lengths = range(min(len(one), len(other)) + 1)
    return bisect_left(lengths, True, key=lambda length: one[:length] != other[:length]) - 1
