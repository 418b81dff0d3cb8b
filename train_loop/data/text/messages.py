"""Chat messages in the data: their format, and the flags that exclude messages from training."""

import json
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from train_loop.data.strict_json import read_json
from train_loop.data.text.content import problem_of, replaced
from train_loop.errors import DataError

Message = dict[str, Any]
Tools = list[dict[str, Any]]
THOUGHTS = frozenset({"reasoning", "reasoning_content", "thinking"})
"""Equivalent keys for an assistant's reasoning: transformers makes the value available under each of them."""
MEDIA = frozenset({"audio", "audios", "image", "images", "video", "videos"})
FLAGS = frozenset(
    {"loss", "loss_scale", "loss_weight", "mask", "train_detail", "trainable", "training", "training_detail"}
)
"""Keys of other tools that set whether a message is trained, or which part of it."""
_FORM = 'write {"role": "user", "content": "…"}'
_SWITCHES: dict[str, tuple[type, ...]] = {"weight": (int, float), "train": (bool,)}
"""Keys that set whether a message is trained: OpenAI's `weight` (0 or 1) and axolotl's `train` (false or true)."""


@dataclass(frozen=True)
class Conversation:
    """The messages of a row, without training flags and null keys; content may be absent beside tool calls."""

    messages: list[Message]
    """Arguments of tool calls are objects."""
    given: list[Message]
    """The same with arguments as in the row, which may be JSON text."""
    untrained: frozenset[int]
    """Indices of assistant messages that are not trained."""

    def after(self, system_prompt: str) -> "Conversation":
        """Return the conversation with a system message in front; unchanged if it begins with one."""
        if self.messages[0]["role"] in ("system", "developer"):
            return self
        first = {"role": "system", "content": system_prompt}
        untrained = frozenset(number + 1 for number in self.untrained)
        return Conversation([first, *self.messages], [first, *self.given], untrained)

    @property
    def forms(self) -> Iterator[list[Message]]:
        """Yield the messages in each form that a template may need, the usual one first.

        Tool calls are as in the row, or in OpenAI's format. Their arguments are objects, or text for templates that
        join texts. Empty content of a message with tool calls is as in the row, absent if it is null there, as
        transformers leaves null keys out; or it is null, or empty text.
        """
        forms = [self.messages]
        if any(_calls(message) for message in self.messages):
            forms += [[_with_text(message) for message in self.given]]
            forms += [[_with_functions(message) for message in form] for form in forms]
        yield from forms
        if any(not message.get("content") and message.get("tool_calls") for message in self.messages):
            for empty in (None, ""):
                yield from ([_with_empty(message, empty) for message in form] for form in forms)

    @property
    def notations(self) -> set[str]:
        """Python's notation of values that a template should write as JSON text, or not at all."""
        found = {"None"} if any(message.get("content") is None for message in self.messages) else set()
        calls = (call["arguments"] for message in self.messages for call in _calls(message))
        return found | {str(arguments) for arguments in calls if arguments}


def read_conversation(cell: Any) -> Conversation:
    """Return the conversation of a row, from its messages or their JSON. Raises DataError."""
    messages = _decoded(cell, "messages")
    if not isinstance(messages, list) or not messages:
        raise DataError(f"messages must be a non-empty list, not {messages!r:.60}; {_FORM}")
    given, untrained = list[Message](), set[int]()
    for number, message in enumerate(messages):
        problem = _problem(message)
        if problem:
            raise DataError(f"messages[{number}] {problem}; {_FORM}")
        own = {key: value for key, value in message.items() if value is not None}
        if not _is_trained(own, number) and own["role"] == "assistant":
            untrained.add(number)
        given.append({key: value for key, value in own.items() if key not in _SWITCHES})
    messages = [_with_objects(message, number) for number, message in enumerate(given)]
    return Conversation(messages, given, frozenset(untrained))


def read_tools(cell: Any) -> Tools | None:
    """Return the tools of a row, from a list or its JSON; None without tools. Raises DataError."""
    tools = _decoded(cell, "tools")
    if tools is None:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise DataError(f"tools must be a list of objects, not {tools!r:.60}")
    return tools


def _decoded(cell: Any, name: str) -> Any:
    """Return a cell, or the value of its JSON text; None for empty text. Raises DataError."""
    try:
        return cell if not isinstance(cell, str) else read_json(cell) if cell.strip() else None
    except ValueError as error:
        raise DataError(f"{name} must be a list or its JSON: {error}; correct the text {cell!r:.60}") from error


def has_text_arguments(cell: Any) -> bool:
    """Return whether a tool call of a row's messages has its arguments as JSON text. Raises DataError."""
    messages = _decoded(cell, "messages")
    found = [message for message in messages if isinstance(message, dict)] if isinstance(messages, list) else []
    return any(isinstance(call["arguments"], str) for message in found for call in _calls(message))


def _calls(message: Message) -> list[dict[str, Any]]:
    """Return the functions that a message calls and that have arguments."""
    calls = message.get("tool_calls")
    calls = [call for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
    functions = [call["function"] if isinstance(call.get("function"), dict) else call for call in calls]
    return [function for function in functions if "arguments" in function]


def _with_objects(message: Message, number: int) -> Message:
    """Return a message whose tool calls have objects as arguments: most templates would quote JSON text again."""
    if not any(isinstance(call["arguments"], str) for call in _calls(message)):
        return message
    copy: Message = deepcopy(message)
    for call in _calls(copy):
        if isinstance(call["arguments"], str):
            call["arguments"] = _read_arguments(call["arguments"], number)
    return copy


def _with_functions(message: Message) -> Message:
    """Return a message whose tool calls name their function within `function`."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return message | {
        "tool_calls": [
            {"type": "function", "function": call} if isinstance(call, dict) and "function" not in call else call
            for call in calls
        ]
    }


def _with_empty(message: Message, content: str | None) -> Message:
    """Return a message with another content if it has tool calls and nothing else."""
    return message if message.get("content") or not message.get("tool_calls") else {**message, "content": content}


def _with_text(message: Message) -> Message:
    """Return a message whose tool calls have JSON text as arguments; text of the row is unchanged."""
    copy: Message = deepcopy(message)
    for call in _calls(copy):
        if not isinstance(call["arguments"], str):
            call["arguments"] = json.dumps(call["arguments"], ensure_ascii=False)
    return copy


def _read_arguments(text: str, number: int) -> dict[str, Any]:
    try:
        found = read_json(text) if text.strip() else {}
    except ValueError as error:
        raise DataError(
            f"messages[{number}] has tool arguments that are not JSON: {error}; write an object or its JSON"
        ) from error
    if not isinstance(found, dict):
        raise DataError(
            f"messages[{number}] has tool arguments {text!r:.60}, which are not the JSON of an object; write an object"
        )
    return found


def _problem(message: Any) -> str | None:
    if not isinstance(message, dict):
        return f"must be an object, not {message!r:.60}"
    role, content = message.get("role"), message.get("content")
    if role is not None and not isinstance(role, str):
        return f"must have text as role, not {role!r:.60}"
    if role is None and {"from", "value"} <= message.keys():
        return (
            "has from and value, as in ShareGPT; rename them to role and content, human to user, and gpt to assistant"
        )
    if role is None:
        return f"must have a role, but has {', '.join(message) or 'no keys'}"
    if not isinstance(message.get("tool_calls") or [], list):
        return f"must have a list as tool_calls, not {message['tool_calls']!r:.60}"
    if content is None and message.get("function_call"):
        return "has function_call, an older format of OpenAI; write tool_calls"
    if content is None and role == "assistant" and message.get("tool_calls"):
        return None
    return problem_of(content)


def _is_trained(message: Message, number: int) -> bool:
    """Return the training flag of a message; True without a flag. Raises DataError for an invalid flag."""
    switches = {key: message[key] for key in _SWITCHES if key in message}
    for key, value in switches.items():
        if type(value) not in _SWITCHES[key] or value not in (0, 1):
            choices = "false or true" if key == "train" else "0 or 1"
            raise DataError(f"messages[{number}] has {key} {value!r:.60}; expected {choices}")
    if len(set(map(bool, switches.values()))) > 1:
        raise DataError(f"messages[{number}] has weight and train that contradict each other; remove one")
    on = all(switches.values())
    if switches and on and message["role"] != "assistant":
        key = next(iter(switches))
        raise DataError(
            f"messages[{number}] of role {message['role']!r:.60} has {key} {switches[key]!r}, but only messages of the "
            f"assistant are trained; remove {key}"
        )
    return on


def with_content(message: Message, content: str) -> Message:
    """Return a message with another content, and with the keys that a header may show."""
    return {key: message[key] for key in ("role", "name", "tool_call_id") if key in message} | {
        "content": replaced(message.get("content"), content)
    }
