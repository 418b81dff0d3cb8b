"""A search over random chat templates: each assistant turn is trained with its end, and nothing else is.

Template and expected text are made of the same parts; trained text is between ⟦ and ⟧.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tokenizers import AddedToken

from tests.support.builders.searches import seeds
from tests.support.tokenizers.turns import shown, write
from train_loop.data.text.messages import Message

EOS = "<|endoftext|>"
BASE = "<|base|>"
"""An end token of the base vocabulary, which is not an added token."""


@dataclass(frozen=True)
class Format:
    """The parts of a chat format."""

    start: str
    headers: dict[str, str]
    """Text before a message, by role."""
    ending: str
    """Text that ends a message."""
    gap: str
    """White space after a message."""
    only_inner: bool
    """Whether the last message has no end."""
    footer: str
    """Text after the last message."""
    marked: bool
    """Whether the template marks what is trained."""
    prompts: bool
    """Whether the template has a generation prompt."""
    call: tuple[str, str]
    """Text before and after the arguments of a tool call."""
    takes_space: bool
    """Whether the tokens of roles take in the white space after them."""

    @classmethod
    def draw(cls, random: Random) -> "Format":
        """Return a random format."""
        shape = random.choice(["<|im_start|>{}\n", "<|{}|>", "<|{}|>\n", "[{}] ", "### {}:\n"])
        roles = {"system": "system", "user": "user", "assistant": random.choice(["assistant", "model"]), "tool": "tool"}
        ending = random.choice(["<|im_end|>", "<|im_end|>", BASE, " ### End", "</s><|im_end|>", EOS, ""])
        return cls(
            start=random.choice(["", "", "<s>", "You are kind.\n"]),
            headers={role: shape.format(name) for role, name in roles.items()},
            ending=ending,
            gap=random.choice(["", "\n", "\n\n"]),
            only_inner=ending.startswith("<") and ending != BASE and random.random() < 0.3,
            footer=random.choice(["", "", "\n"]),
            marked=random.random() < 0.2,
            prompts=random.random() < 0.8,
            call=random.choice([("<|call|>", "<|done|>"), ("[CALL] ", ""), ("\n", "\n<|done|>")]),
            takes_space=shape.startswith("<|{}") and random.random() < 0.4,
        )

    @property
    def template(self) -> str:
        """The format as a Jinja template."""
        end = "{% if not loop.last %}" + self.ending + "{% endif %}" if self.only_inner else self.ending
        before, after = self.call
        calls = "{{ " + repr(before) + " }}{{ call.function.arguments | tojson }}{{ " + repr(after) + " }}"
        said = "{{ message.content or '' }}{% for call in message.tool_calls or [] %}" + calls + "{% endfor %}" + end
        if self.marked:
            marked = "{% generation %}" + said + "{% endgeneration %}"
            said = "{% if message.role == 'assistant' %}" + marked + "{% else %}" + said + "{% endif %}"
        header = "{{ {" + ", ".join(f"'{role}': {text!r}" for role, text in self.headers.items()) + "}[message.role]"
        header += " | replace(message.role, message.name or message.role) }}"
        body = "{% for message in messages %}" + header + said + "{{ " + repr(self.gap) + " }}{% endfor %}"
        prompt = "{% if add_generation_prompt %}{{ " + repr(self.headers["assistant"]) + " }}{% endif %}"
        parts = [self.start, body, "{{ " + repr(self.footer) + " }}", prompt if self.prompts else ""]
        return "".join("{{ " + repr(part) + " }}" if part == self.start else part for part in parts if part)

    def header(self, message: Message) -> str:
        """Return the text before a message."""
        return self.headers[message["role"]].replace(message["role"], str(message.get("name", message["role"])))

    def expected(self, messages: list[Message]) -> str:
        """Return the text of a conversation that ends with EOS, with trained text in ⟦⟧."""
        text = self.start
        for number, message in enumerate(messages):
            said = (message["content"] or "") + "".join(map(self._called, message.get("tool_calls", [])))
            text += self._seen(self.header(message))
            said = said.lstrip() if self.takes_space else said
            last = number + 1 == len(messages)
            end = "" if last and self.only_inner else self.ending
            if message["role"] != "assistant":
                text += said + end + self.gap
                continue
            following = None if last else messages[number + 1]
            text += self._turn(said, end, following)
        return text + self.footer

    def _seen(self, header: str) -> str:
        return header.rstrip() if self.takes_space else header

    def _called(self, call: dict[str, Any]) -> str:
        arguments = call["function"]["arguments"]
        return (arguments if isinstance(arguments, str) else json.dumps(arguments)).join(self.call)

    def _turn(self, said: str, end: str, following: Message | None) -> str:
        """Return an assistant's turn; if nothing ends it, the marker of the next role does."""
        header = "" if following is None else self.header(following)
        is_next = following is not None and following["role"] != "assistant" and header.startswith("<|")
        if end or self.marked or not is_next:
            return f"⟦{said}{end}⟧{self.gap}"
        marker = header[: header.index("|>") + 2]
        return f"⟦{said}{self.gap}{marker}⟧\0{marker}"


def clean(text: str) -> str:
    """Leave out a marker that the turn before has trained."""
    while "\0" in text:
        before, _, after = text.partition("\0")
        marker = after[: after.index("|>") + 2]
        text = before + after.removeprefix(marker).replace(marker, "", 1)
    return text


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("templates")


def write_format(folder: Path, form: Format, random: Random) -> str:
    roles = [f"<|{role}|>" for role in ("user", "assistant", "model", "system", "tool", "Bob")]
    names = ["<|im_start|>", "<|im_end|>", "</s>", "<s>", EOS, "<|call|>", "<|done|>"]
    tokens = [AddedToken(name, special=random.random() < 0.5, normalized=False) for name in names]
    tokens += [AddedToken(role, special=True, normalized=False, rstrip=form.takes_space) for role in roles]
    return write(folder, form.template, tokens=tokens, eos=EOS, words=(BASE,))


def conversation(random: Random, form: Format) -> list[Message]:
    """Return a conversation whose last message is the assistant's."""
    words = [
        "yes",
        "no",
        "user",
        "a b",
        "model",
        "<x>",
        "5 + 5",
        "é👋",
        *([" so", "\n\nso"] if form.takes_space else []),
    ]
    roles = [*(["system"] if random.random() < 0.3 else [])]
    for _ in range(random.randint(1, 4)):
        roles += ["user", *(["call", "tool"] if random.random() < 0.3 else []), "assistant"]
        roles += ["assistant"] if random.random() < 0.1 else []
    if random.random() < 0.1:
        roles[-1] = "call"
    return [_message(random, role, random.choice(words)) for role in roles]


def _message(random: Random, role: str, content: str) -> Message:
    if role == "call":
        arguments = random.choice(['{"a": 1}', {"a": 1}, {}, '{"b": [true, null]}'])
        calls = [{"type": "function", "function": {"name": "f", "arguments": arguments}}] * random.randint(1, 2)
        return {"role": "assistant", "content": random.choice([None, "", content]), "tool_calls": calls}
    named = {"name": "Bob"} if role == "user" and random.random() < 0.1 else {}
    return {"role": role, "content": content, **named}


@pytest.mark.parametrize("seed", range(seeds(100, more=3000)))
def test_assistant_turns_are_trained_with_their_ends(home: Path, seed: int) -> None:
    random = Random(seed)
    form = Format.draw(random)
    messages = conversation(random, form)
    folder = write_format(home / str(seed), form, random)
    system = "Be kind." if random.random() < 0.2 else None
    found = shown(folder, messages, system=system)
    if system is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    text = clean(form.expected(messages))
    ends = "" if form.only_inner else form.ending
    if not text.rstrip().removesuffix("⟧").endswith(EOS):
        # The model learns EOS after its last turn if no end token ends that turn.
        trains_eos = not ends.endswith("|>") or ends == BASE
        text += f"⟦{EOS}⟧" if trains_eos else EOS
    assert found.replace("⟧⟦", "") == text.replace("⟧⟦", "")
