"""A search over random chat templates: each assistant turn is trained with its end, and nothing else is.

Template and expected text are made of the same parts; trained text is between ⟦ and ⟧.
"""

from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.support.builders.searches import seeds
from train_loop.data.prepare.boundaries import mark_trained
from train_loop.data.prepare.packing import Document
from train_loop.data.text.chat import encode_chat, load_chat_templates
from train_loop.data.text.messages import Message
from train_loop.data.text.tokenizer import load_tokenizer

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

    @classmethod
    def draw(cls, random: Random) -> "Format":
        """Return a random format."""
        shape = random.choice(["<|im_start|>{}\n", "<|{}|>", "<|{}|>\n", "[{}] ", "### {}:\n"])
        roles = {"system": "system", "user": "user", "assistant": random.choice(["assistant", "model"])}
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
        )

    @property
    def template(self) -> str:
        """The format as a Jinja template."""
        end = "{% if not loop.last %}" + self.ending + "{% endif %}" if self.only_inner else self.ending
        said = "{{ message.content }}" + end
        if self.marked:
            marked = "{% generation %}" + said + "{% endgeneration %}"
            said = "{% if message.role == 'assistant' %}" + marked + "{% else %}" + said + "{% endif %}"
        header = "{{ {" + ", ".join(f"'{role}': {text!r}" for role, text in self.headers.items()) + "}[message.role] }}"
        body = "{% for message in messages %}" + header + said + "{{ " + repr(self.gap) + " }}{% endfor %}"
        prompt = "{% if add_generation_prompt %}{{ " + repr(self.headers["assistant"]) + " }}{% endif %}"
        parts = [self.start, body, "{{ " + repr(self.footer) + " }}", prompt if self.prompts else ""]
        return "".join("{{ " + repr(part) + " }}" if part == self.start else part for part in parts if part)

    def expected(self, messages: list[Message]) -> str:
        """Return the text of a conversation that ends with EOS, with trained text in ⟦⟧."""
        text = self.start
        for number, message in enumerate(messages):
            text += self.headers[message["role"]].replace("\0", "")
            last = number + 1 == len(messages)
            end = "" if last and self.only_inner else self.ending
            if message["role"] != "assistant":
                text += message["content"] + end + self.gap
                continue
            following = "" if last else messages[number + 1]["role"]
            text += self._turn(message["content"], end, None if last else self.headers[following], following)
        return text + self.footer

    def _turn(self, content: str, end: str, header: str | None, following: str) -> str:
        """Return an assistant's turn; if nothing ends it, the marker of the next role does."""
        if end or self.marked or header is None or following == "assistant" or not header.startswith("<|"):
            return f"⟦{content}{end}⟧{self.gap}"
        marker = header[: header.index("|>") + 2]
        return f"⟦{content}{self.gap}{marker}⟧\0{marker}"


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


def write(folder: Path, template: str, random: Random) -> str:
    words = [*pre_tokenizers.ByteLevel.alphabet(), BASE]
    tokenizer = Tokenizer(models.BPE(vocab={word: n for n, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = ["<|im_start|>", "<|im_end|>", "</s>", "<s>", EOS, "<|user|>", "<|assistant|>", "<|model|>", "<|system|>"]
    tokenizer.add_tokens([AddedToken(name, special=random.random() < 0.5, normalized=False) for name in names])
    peer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, chat_template=template)
    peer.save_pretrained(folder)
    return str(folder)


def conversation(random: Random) -> list[Message]:
    """Return a conversation whose last message is the assistant's."""
    roles = [*(["system"] if random.random() < 0.3 else [])]
    for _ in range(random.randint(1, 3)):
        roles += ["user", "assistant"]
        roles += ["assistant"] if random.random() < 0.1 else []
    words = ["yes", "no", "user", "a b", "model", "<x>", "5 + 5", "é👋"]
    return [{"role": role, "content": random.choice(words)} for role in roles]


@pytest.mark.parametrize("seed", range(seeds(200, more=3000)))
def test_assistant_turns_are_trained_with_their_ends(home: Path, seed: int) -> None:
    random = Random(seed)
    form, messages = Format.draw(random), conversation(random)
    folder = write(home / str(seed), form.template, random)
    ids, labels = encode_chat(load_tokenizer(folder), load_chat_templates(folder), messages, None)
    shown = mark_trained(load_tokenizer(folder), Document(np.asarray(ids), np.asarray(labels)))
    text = clean(form.expected(messages))
    ends = "" if form.only_inner else form.ending
    if not text.rstrip().removesuffix("⟧").endswith(EOS):
        # The model learns EOS after its last turn if no end token ends that turn.
        trains_eos = not ends.endswith("|>") or ends == BASE
        text += f"⟦{EOS}⟧" if trains_eos else EOS
    assert shown.replace("⟧⟦", "") == text.replace("⟧⟦", "")
