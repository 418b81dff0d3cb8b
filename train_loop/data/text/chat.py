"""Chat messages → tokens and labels, with the tokenizer's chat template; only the assistant's output is trained."""

import logging
from collections import Counter
from dataclasses import dataclass, replace
from datetime import date
from functools import lru_cache
from typing import Any

from train_loop.data.text.chat_template import REFUSED, ChatTemplate, compile_template, dated
from train_loop.data.text.chat_tokens import ChatTokens, encode_turns, up_to_eos, with_bos
from train_loop.data.text.messages import (
    FLAGS,
    MEDIA,
    THOUGHTS,
    Conversation,
    Message,
    Tools,
    read_conversation,
    read_tools,
)
from train_loop.data.text.tokenizer import TextTokenizer, load_tokenizer
from train_loop.data.text.turns import find_turns
from train_loop.data.text.values import Value, Values
from train_loop.errors import DataError
from train_loop.run_dir import local_path
from train_loop.system.input_files import read_input

log = logging.getLogger(__name__)
_FAULTS = (AttributeError, ValueError, LookupError, ArithmeticError)
"""Exceptions of a template's own code."""


@dataclass(frozen=True)
class ChatTemplates:
    """The chat templates of a tokenizer by name, of which one fits a row."""

    by_name: dict[str, ChatTemplate]
    chosen: str | None
    """Name of the template for all rows; None to choose as transformers does."""

    def choose(self, tools: Tools | None) -> ChatTemplate:
        """Return the template for a row with or without tools: the rule of transformers' `get_chat_template`.

        Raises DataError if the tokenizer has none for it.
        """
        name = self.chosen or ("tool_use" if tools is not None and "tool_use" in self.by_name else "default")
        if name not in self.by_name:
            raise DataError("the tokenizer has no chat template named default; choose one with data.chat_template")
        return replace(self.by_name[name], tools=tools, rendered=Counter())

    @property
    def use_tools(self) -> bool:
        """Return whether the template for rows with tools reads them."""
        return self.choose([{}]).uses_tools


@lru_cache(maxsize=4)
def load_chat_templates(folder: str, chosen: str | None = None, day: date | None = None) -> ChatTemplates:
    """Load the chat templates of a tokenizer folder, or the one that `data.chat_template` names. Raises DataError.

    `chosen` is a template's name, or the URI of a Jinja file. `day`: the date that they write, by default today's.
    """
    tokenizer, place = load_tokenizer(folder), f" in {folder}"
    if chosen is not None and "/" in chosen:
        sources, place = {chosen: read_template(chosen)}, ""
    else:
        found = tokenizer.templates or {}
        sources = {"default": found} if isinstance(found, str) else found
    wanted = {"default", "tool_use"} if chosen is None else {chosen}
    used = {name: source for name, source in sources.items() if name in wanted}
    if not used:
        raise DataError(_missing(folder, chosen, sorted(sources)))
    markers = tuple(tokenizer.added_tokens.values())
    for name, source in used.items():
        compile_template(source, f"the chat template {name!r}{place}")
    return ChatTemplates(
        {name: ChatTemplate(dated(source, day), tokenizer.variables, markers) for name, source in used.items()}, chosen
    )


def _missing(folder: str, chosen: str | None, names: list[str]) -> str:
    if chosen is not None:
        return (
            f"the tokenizer in {folder} has no chat template named {chosen!r}; it has {', '.join(names) or 'none'}; "
            "correct data.chat_template, or give the file:// URI of a file"
        )
    if names:
        return (
            f"the tokenizer in {folder} has several chat templates and none named default; choose one of "
            f"{', '.join(names)} with data.chat_template"
        )
    return (
        f"the tokenizer in {folder} has no chat template, and messages need one; name the tokenizer of a chat "
        "model in model.tokenizer, add a chat_template.jinja, or set data.chat_template"
    )


def read_template(uri: str) -> str:
    """Return the chat template in a file, without a byte order mark. Raises DataError, also for an empty file."""
    try:
        if source := read_input(local_path(uri)).decode("utf-8-sig"):
            return source
        raise DataError(f"data.chat_template {uri} is empty; write a Jinja template to it")
    except DataError:
        raise
    except (OSError, ValueError) as error:
        raise DataError(f"data.chat_template {uri} cannot be read: {error}; give the file:// URI of a file") from error


def check_chat_template(folder: str, chosen: str | None = None) -> None:
    """Render the chat templates of a folder once, as preparation will. Raises DataError if one is unusable."""
    for name, template in load_chat_templates(folder, chosen).by_name.items():
        try:
            own = replace(template, rendered=Counter())
            own.text([{"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "Yes."}])
        except REFUSED as error:
            # Some templates need another conversation, for example a system prompt: only real rows can show an error.
            log.debug("the chat template rejects a plain conversation: %s", error)
        except DataError:
            raise
        except _FAULTS as error:
            raise DataError(
                f"the chat template {name!r} in {folder} fails: {error}; correct it or copy it again"
            ) from error


def encode_chat(
    tokenizer: TextTokenizer, templates: ChatTemplates, messages: Any, system_prompt: str | None, tools: Any = None
) -> ChatTokens:
    """Return the tokens of a conversation.

    `tools`: the row's cell of tools. Raises DataError, whose message is the reason alone, without the row.
    """
    conversation, template, values = _rendered(templates, messages, system_prompt, tools)
    turns, text = values.messages, values.text
    try:
        trained = find_turns(values, conversation.untrained)
    except DataError:
        raise
    except (*REFUSED, *_FAULTS, RecursionError) as error:
        raise DataError(
            f"the chat template does not show which text the model writes: {error}; mark it with {{% generation %}} in "
            "the template"
        ) from error
    if template.is_timed and template.text(turns) != text:
        if template.text(turns) != template.text(turns):
            raise DataError("the chat template writes another text each time; remove the time from it")
        return encode_chat(tokenizer, templates, messages, system_prompt, tools)  # another day has begun
    ends_with_answer = turns[-1]["role"] == "assistant" and len(turns) - 1 not in conversation.untrained
    if not template.marks_answers:
        trained = up_to_eos(tokenizer, text, trained)
    return encode_turns(tokenizer, text, trained, ends_with_answer=ends_with_answer)


def encode_whole(
    tokenizer: TextTokenizer, templates: ChatTemplates, messages: Any, system_prompt: str | None, tools: Any = None
) -> list[int]:
    """Return the token ids of a conversation, of which nothing is trained: as its template ends it, without EOS."""
    _, _, values = _rendered(templates, messages, system_prompt, tools)
    return _encoded(tokenizer, values.text)


def encode_prompt(
    tokenizer: TextTokenizer, templates: ChatTemplates, messages: Any, system_prompt: str | None, tools: Any = None
) -> list[int]:
    """Return the token ids of a conversation with the template's generation prompt, after which the model answers.

    Raises DataError also if the last message is the assistant's.
    """
    _, template, values = _rendered(templates, messages, system_prompt, tools)
    if values.messages[-1]["role"] == "assistant":
        raise DataError(
            "the last message is of the assistant, whose next message is to be generated; remove it, or add a message "
            "of the user"
        )
    return _encoded(tokenizer, template.text(values.messages, prompt=True))


def _encoded(tokenizer: TextTokenizer, text: str) -> list[int]:
    ids, _ = tokenizer.encode_with_offsets(text)
    return with_bos(tokenizer, ChatTokens(ids, ids, frozenset())).ids


def _rendered(
    templates: ChatTemplates, messages: Any, system_prompt: str | None, tools: Any
) -> tuple[Conversation, ChatTemplate, Values]:
    """Return a row's conversation, its template, and its text. Raises DataError for a value that the text lacks."""
    conversation, template, added = _read(templates, messages, system_prompt, tools)
    values, unused = _render(template, conversation)
    if values.printed is not None:
        raise DataError(
            f"the chat template writes the content parts of messages[{values.printed - added}] as a list in Python's "
            "notation; write the content as text, or use a template that reads parts"
        )
    for number, key, _ in unused:
        if _needs(template, conversation, number, key) or number < added:
            raise DataError(_unused(templates, template, values.messages, number, key, added))
    # Raises for a lone surrogate, which JSON can contain: the tokenizer's error would only name a type.
    values.text.encode()
    return conversation, template, values


def left_out(templates: ChatTemplates, messages: Any, system_prompt: str | None, tools: Any = None) -> str | None:
    """Return a value of a conversation that the template leaves out, as part of a sentence; None if it has all.

    Raises DataError if the conversation cannot be encoded.
    """
    conversation, template, added = _read(templates, messages, system_prompt, tools)
    values, unused = _render(template, conversation)
    return next((_described(values.messages, number, key, added) for number, key, _ in unused), None)


def _read(
    templates: ChatTemplates, messages: Any, system_prompt: str | None, tools: Any
) -> tuple[Conversation, ChatTemplate, int]:
    """Return a row's conversation, its template, and the number of messages that `system_prompt` adds."""
    own = read_conversation(messages)
    whole = own if system_prompt is None else own.after(system_prompt)
    return whole, templates.choose(read_tools(tools)), len(whole.messages) - len(own.messages)


def _render(template: ChatTemplate, conversation: Conversation) -> tuple[Values, list[Value]]:
    """Return the form of a conversation that a template writes best, and the values that its text lacks.

    Raises DataError if the template rejects all forms.
    """
    best: tuple[Values, list[Value]] | None = None
    least, fault = (0, 0), None
    for form in conversation.forms:
        try:
            values = Values(template, form, template.text(form))
        except DataError:
            raise
        except (*REFUSED, *_FAULTS, RecursionError) as error:
            fault = fault or error
            continue
        unused = values.unused()
        faults = len(unused), sum(values.text.count(notation) for notation in conversation.notations)
        if best is None or faults < least:
            best, least = (values, unused), faults
        if least == (0, 0):
            break
    if best is None:
        parts = any(isinstance(message.get("content"), list) for message in conversation.messages)
        remedy = "write content as text, not as parts" if parts else "change the messages"
        raise DataError(f"the chat template rejects the messages: {fault}; {remedy} or the template") from fault
    return best


def _needs(template: ChatTemplate, conversation: Conversation, number: int, key: str) -> bool:
    """Return whether a row cannot be trained without a value: it is what the model writes or sees, or is a flag."""
    message = conversation.messages[number]
    is_answer = message["role"] == "assistant" and number not in conversation.untrained
    if template.mentions(key):
        return is_answer and (key == "tool_calls" or (key == "content" and not message.get("tool_calls")))
    return key in MEDIA | FLAGS or (is_answer and key in THOUGHTS | {"tool_calls"})


def _described(turns: list[Message], number: int, key: str, added: int) -> str:
    beside = {"content": "tool_calls", "tool_calls": "content"}.get(key, "")
    where = f"messages[{number - added}]" if number >= added else "the system message of data.system_prompt"
    return f"the {key:.60} of {where} (role {turns[number]['role']:.60})" + (
        f" beside its {beside}" if turns[number].get(beside) else ""
    )


def _unused(
    templates: ChatTemplates, template: ChatTemplate, turns: list[Message], number: int, key: str, added: int
) -> str:
    """Return the reason why a row with a value that the template does not use is refused."""
    if number < added:
        return "the chat template does not use a system message; remove data.system_prompt, or choose another template"
    advice = ""
    if key == "tool_calls" and "tool_use" in templates.by_name and templates.chosen != "tool_use":
        advice = ", for example with columns.tools, or with data.chat_template: tool_use"
    fault = f"messages[{number - added}] has the key {key!r:.60}, which the chat template does not use"
    if key in FLAGS:
        return f"{fault}, and which may exclude it from training; write train: false or true, or remove it"
    if key in MEDIA:
        return f"{fault}; only text can be trained: remove the key or the row"
    if template.mentions(key):
        fault = f"the chat template leaves out {_described(turns, number, key, added)}"
    return f"{fault}; remove it from the data, or use a template that does{advice}"
