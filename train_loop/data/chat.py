"""Chat messages → tokens and labels, through the tokenizer's own chat template; loss only on what the model says."""

import logging
import re
from bisect import bisect_left
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from train_loop.data.dataset import IGNORE
from train_loop.data.tokenizer import TextTokenizer, load_tokenizer, read_object
from train_loop.errors import DataError

log = logging.getLogger(__name__)
Message = dict[str, Any]
Span = tuple[int, int]
"""Characters [start, stop) of a text."""

# TypeError is what a template's own arithmetic raises, say on tool arguments that are a string and not an object.
_REFUSED = (TemplateError, TypeError)
_LONGEST_TEXT = 1 << 20
"""Characters that a template may add to a conversation."""
_FORM = 'write {"role": "user", "content": "…"}'


@dataclass(frozen=True)
class Rendered:
    """A conversation as text, and the characters of it that the model has to produce."""

    text: str
    trained: list[Span]


@dataclass(frozen=True)
class ChatTemplate:
    """A Hugging Face chat template, its variables, and what matches an end-of-turn marker."""

    source: str
    variables: dict[str, str]
    marker: re.Pattern[str]

    def render(self, messages: list[Message]) -> Rendered:
        """Trained is what follows each generation prompt. Raises TemplateError or TypeError as the template does."""
        if "endgeneration" in self.source:
            return self._render_marked(messages)
        text = self._text(messages)
        turns = [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]
        spans = (self._answer(text, messages, turn) for turn in turns)
        return Rendered(text, [(start, stop) for start, stop in spans if start < stop])

    def _render_marked(self, messages: list[Message]) -> Rendered:
        """As the template itself marks it with {% generation %}."""
        texts, spans = render_jinja_template(
            [messages], chat_template=self.source, return_assistant_tokens_mask=True, **self.variables
        )
        return Rendered(_within_bounds(texts[0], messages), spans[0])

    def _text(self, messages: list[Message], *, prompt: bool = False) -> str:
        texts, _ = render_jinja_template(
            [messages], chat_template=self.source, add_generation_prompt=prompt, **self.variables
        )
        return _within_bounds(str(texts[0]), messages)

    def _answer(self, text: str, messages: list[Message], turn: int) -> Span:
        start, stop = self._own(text, messages, turn)
        return min(self._takes_over(text, messages, turn, start), stop), stop

    def _own(self, text: str, messages: list[Message], turn: int) -> Span:
        """What one message adds to the text, with its end-of-turn marker.

        It is found by rendering another in its place: what is alike before and behind is not its own.
        """
        # Best without what follows, as a tool's result may be written into its call, or refused without it. But some
        # templates write the last message in another way than all others, with its thoughts; or want a question in it.
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
            # The results of a call, should the template write them into its turn, are not the model's.
            stop = max(start, min(stop, self._own(text, messages, turn + 1)[0]))
        marker = self.marker.match(text, stop) if shown else None
        return start, marker.end() if marker else stop

    def _changes(
        self, text: str, before: list[Message], message: Message, after: list[Message]
    ) -> tuple[int, int, bool]:
        """Where the text is another with another content of a message, and whether it shows the message at all."""
        unseen = next(char for char in map(chr, range(0xE000, 0xF900)) if char not in text)  # for private use
        other = {key: message[key] for key in ("role", "name", "tool_call_id") if key in message} | {"content": unseen}
        changed = self._text([*before, other, *after])
        start = _shared(text, changed)
        stop = max(start, len(text) - _shared(text[::-1], changed[::-1]))
        return start, stop, stop > start or changed.startswith(unseen, start)

    def _takes_over(self, text: str, messages: list[Message], turn: int, start: int) -> int:
        """Where the model takes over: right behind the generation prompt; at `start` where there is none."""
        try:
            before, prompt = (self._text(messages[:turn], prompt=asked) for asked in (False, True))
            header = prompt.removeprefix(before)
            if header and text.startswith(prompt):
                return len(prompt)
            # What came before may read otherwise by now, its thoughts taken out: look behind the message before.
            floor = self._own(text, messages, turn - 1)[1] if header and turn else start
        except _REFUSED:  # some templates refuse what no user has begun
            return start
        found = text.find(header, floor, start)
        return start if found < 0 else found + len(header)


@lru_cache(maxsize=4)
def load_chat_template(folder: str) -> ChatTemplate:
    """The chat template of a tokenizer folder as Hugging Face writes it. Raises DataError where it has none."""
    special = load_tokenizer(folder).special_tokens.values()
    config = _read(Path(folder, "special_tokens_map.json")) | _read(Path(folder, "tokenizer_config.json"))
    file = Path(folder, "chat_template.jinja")
    source = file.read_text() if file.is_file() else _default(config.get("chat_template"))
    if source is None:
        raise DataError(
            f"the tokenizer in {folder} has no chat template, and messages need one; name the tokenizer of a chat "
            "model in model.tokenizer, or add a chat_template.jinja"
        )
    try:
        render_jinja_template([], chat_template=source)  # of no conversation: this compiles it
    except (TemplateError, TypeError, ValueError, ArithmeticError) as error:
        raise DataError(f"the chat template in {folder} is no Jinja: {error}; copy it again") from error
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
    """Render the chat template of a folder once, as preparation will. Raises DataError for one that cannot be used."""
    template = load_chat_template(folder)
    try:
        template.render([{"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "Yes."}])
    except _REFUSED as error:
        # Some templates want other conversations, say with a system prompt: only rows can say.
        log.debug("the chat template refuses a plain conversation: %s", error)
    except (AttributeError, ValueError, LookupError, ArithmeticError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"the chat template in {folder} fails: {error}; correct it or copy it again") from error


def encode_chat(
    tokenizer: TextTokenizer, template: ChatTemplate, messages: Any, system_prompt: str | None
) -> tuple[list[int], list[int]]:
    """Token ids of a conversation, ending with EOS, and their labels. Raises DataError with the reason alone."""
    conversation = _checked(messages)
    if system_prompt is not None and conversation[0]["role"] != "system":
        conversation.insert(0, {"role": "system", "content": system_prompt})
    try:
        rendered = template.render(conversation)
    except _REFUSED as error:
        raise DataError(f"the chat template refuses it: {error}; change the messages or the template") from error
    if not rendered.trained:
        raise DataError("there is nothing to train on, as it has no assistant turn; add one or leave it out")
    # Half of a character, which JSON can write, is told here; the tokenizer would only name a type.
    rendered.text.encode()
    ids, labels, ended = _encode(tokenizer, rendered)
    if not ended:
        # To end is for the model to say after its own last words, where no end-of-turn marker says so already.
        said = next((label for label in reversed(labels) if label != IGNORE), IGNORE)
        last = conversation[-1]["role"] == "assistant" and said not in tokenizer.special_tokens
        ids.append(tokenizer.eos)
        labels.append(tokenizer.eos if last else IGNORE)
    return ids, labels


def _encode(tokenizer: TextTokenizer, rendered: Rendered) -> tuple[list[int], list[int], bool]:
    """Token ids and labels of a text, and whether it ends with EOS; a token is trained where any of it is."""
    trained = bytearray(len(rendered.text))
    for start, stop in rendered.trained:
        trained[start:stop] = b"\1" * (stop - start)
    ids, offsets = tokenizer.encode_with_offsets(rendered.text)
    labels = [token if 1 in trained[start:stop] else IGNORE for token, (start, stop) in zip(ids, offsets, strict=True)]
    end = len(rendered.text.rstrip())
    last = next((token for token, (start, _) in zip(ids[::-1], offsets[::-1], strict=True) if start < end), None)
    return ids, labels, last == tokenizer.eos


def _checked(messages: Any) -> list[Message]:
    """Messages without their own empty keys, which mean none. Raises DataError."""
    if not isinstance(messages, list) or not messages:
        raise DataError(f"messages must be a list of at least one, and is {messages!r:.60}; {_FORM}")
    for number, message in enumerate(messages):
        problem = _problem(message)
        if problem:
            raise DataError(f"messages[{number}] {problem}; {_FORM}")
    return [{key: value for key, value in message.items() if value is not None} for message in messages]


def _problem(message: Any) -> str | None:
    if not isinstance(message, dict):
        return f"must be an object, and is {message!r:.60}"
    role, content = message.get("role"), message.get("content")
    if role is not None and not isinstance(role, str):
        return f"must have a text as role, and has {role!r:.60}"
    if role is None:
        return f"must have a role, and has {', '.join(message) or 'no keys'}"
    if content is None and role == "assistant" and message.get("tool_calls"):
        return None
    return None if isinstance(content, str) else f"must have a text as content, and has {content!r:.60}"


def _within_bounds(text: str, messages: list[Message]) -> str:
    # A template may multiply text: it stays within a multiple of what it was given.
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
    """One template, or that of several which is named default."""
    if isinstance(template, list):
        named = [one for one in template if isinstance(one, dict)]
        template = next((one.get("template") for one in named if one.get("name") == "default"), None)
    return template if isinstance(template, str) else None


def _content(token: Any) -> str | None:
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _shared(one: str, other: str) -> int:
    """The length of the common prefix, by bisection: Python compares slices fast and characters slowly."""
    lengths = range(min(len(one), len(other)) + 1)
    return bisect_left(lengths, True, key=lambda length: one[:length] != other[:length]) - 1
