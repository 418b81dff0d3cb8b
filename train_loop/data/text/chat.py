"""Chat messages → tokens and labels, with the tokenizer's chat template; only the assistant's output is trained."""

import logging
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from train_loop.data.dataset import IGNORE
from train_loop.data.text.chat_template import REFUSED, ChatTemplate, Rendered, compile_template, marker_of
from train_loop.data.text.messages import Tools, read_conversation, read_tools
from train_loop.data.text.tokenizer import TextTokenizer, load_tokenizer
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
        return replace(self.by_name[name], tools=tools)

    @property
    def use_tools(self) -> bool:
        """Return whether the template for rows with tools reads them."""
        return self.choose([{}]).uses_tools


@lru_cache(maxsize=4)
def load_chat_templates(folder: str, chosen: str | None = None) -> ChatTemplates:
    """Load the chat templates of a tokenizer folder, or the one that `data.chat_template` names. Raises DataError.

    `chosen` is a template's name, or the URI of a Jinja file.
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
    marker = marker_of(tokenizer.added_tokens.values())
    for name, source in used.items():
        compile_template(source, f"the chat template {name!r}{place}")
    return ChatTemplates(
        {name: ChatTemplate(source, tokenizer.variables, marker) for name, source in used.items()}, chosen
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
            template.render([{"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "Yes."}])
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
) -> tuple[list[int], list[int]]:
    """Return the token ids of a conversation, ending with EOS, and their labels; all IGNORE if nothing is trained.

    `tools`: the row's cell of tools. Raises DataError, whose message is the reason alone, without the row.
    """
    conversation, template = read_conversation(messages), templates.choose(read_tools(tools))
    if system_prompt is not None and conversation.messages[0]["role"] != "system":
        conversation = conversation.after(system_prompt)
    turns, untrained = conversation.messages, conversation.untrained
    try:
        rendered = template.render(turns, untrained)
    except DataError:
        raise
    except (*REFUSED, *_FAULTS, RecursionError) as error:
        raise DataError(
            f"the chat template rejects the messages: {error}; change the messages or the template"
        ) from error
    if (unused := template.unused_key(turns, rendered.text)) is not None:
        number, key = unused
        raise DataError(
            f"messages[{number - (len(turns) - len(messages))}] has the key {key!r:.60}, which the chat template does "
            f"not use; remove it from the data, or use a template that does{_advice(templates, key)}"
        )
    # Raises for a lone surrogate, which JSON can contain: the tokenizer's error would only name a type.
    rendered.text.encode()
    ends_with_answer = turns[-1]["role"] == "assistant" and len(turns) - 1 not in untrained
    return _with_bos(tokenizer, *_encode(tokenizer, rendered, ends_with_answer=ends_with_answer))


def _advice(templates: ChatTemplates, key: str) -> str:
    if key != "tool_calls" or "tool_use" not in templates.by_name or templates.chosen == "tool_use":
        return ""
    return ", for example with columns.tools, or with data.chat_template: tool_use"


def _encode(tokenizer: TextTokenizer, rendered: Rendered, *, ends_with_answer: bool) -> tuple[list[int], list[int]]:
    """Return the token ids of a text, with EOS, and their labels; a token is trained if any of its text is."""
    trained = bytearray(len(rendered.text))
    for start, stop in rendered.trained:
        trained[start:stop] = b"\1" * (stop - start)
    ids, offsets = tokenizer.encode_with_offsets(rendered.text)
    labels = [token if 1 in trained[start:stop] else IGNORE for token, (start, stop) in zip(ids, offsets, strict=True)]
    end = len(rendered.text.rstrip())
    last = next((token for token, (start, _) in zip(ids[::-1], offsets[::-1], strict=True) if start < end), None)
    if last == tokenizer.eos:
        return ids, labels
    # The model learns to write EOS after its own last message, unless another end token ends that message. If text
    # that the model does not write comes between them, it would never get there.
    reached = max((stop for _, stop in rendered.trained), default=0) >= end
    ended = next((label for label in reversed(labels) if label != IGNORE), IGNORE) in tokenizer.end_tokens
    eos_is_trained = ends_with_answer and reached and not ended
    return [*ids, tokenizer.eos], [*labels, tokenizer.eos if eos_is_trained else IGNORE]


def _with_bos(tokenizer: TextTokenizer, ids: list[int], labels: list[int]) -> tuple[list[int], list[int]]:
    """Apply `data.add_bos` to a conversation, whose BOS the chat template writes."""
    begins = tokenizer.bos is not None and ids[:1] == [tokenizer.bos]
    if tokenizer.add_bos is True and not begins:
        assert tokenizer.bos is not None, "checked by adding_bos"
        return [tokenizer.bos, *ids], [IGNORE, *labels]
    return (ids[1:], labels[1:]) if tokenizer.add_bos is False and begins else (ids, labels)
