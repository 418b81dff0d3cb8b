"""Turns of long conversations: a search for all together finds the same as one for each, in linear time."""

from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.support.builders.searches import seeds
from tests.support.tokenizers.chats import QWEN, assistant, user
from tests.support.tokenizers.tool_chats import (
    DEEPSEEK,
    GLM,
    HARMONY,
    MISTRAL,
    PROMPTED,
    RESULT,
    TOOLS,
    call,
    folder,
)
from train_loop.data.dataset import IGNORE
from train_loop.data.text.chat import encode_chat, load_chat_templates
from train_loop.data.text.chat_template import REFUSED
from train_loop.data.text.messages import Message, read_conversation
from train_loop.data.text.tokenizer import load_tokenizer
from train_loop.data.text.turn import TurnFinder
from train_loop.data.text.turns import find_turns
from train_loop.data.text.values import Values
from train_loop.errors import DataError

# Like Gemma 4's: results of a call are in its turn, before its text.
FOLDING = """{% set ns = namespace(on=false) %}{% for m in messages if m.role != 'tool' %}<|{{ m.role }}|>
{% for c in m.tool_calls or [] %}<|call|>{{ c.function.name }}{{ c.function.arguments | tojson }}<|done|>{% endfor %}
{%- if m.tool_calls %}{% set ns.on = false %}{% for r in messages %}
    {%- if r == m %}{% set ns.on = true %}{% elif r.role != 'tool' %}{% set ns.on = false %}
    {%- elif ns.on %}<|tool|>{{ m.tool_calls[0].function.name }}:{{ r.content }}<|done|>{% endif %}
{%- endfor %}{% endif %}
{{- m.content or '' }}{% if m.content or not m.tool_calls %}<|end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>
{% endif %}"""
# Calls are numbered, their arguments come before their names, and results repeat the names.
NUMBERED = """{% set ns = namespace(n=0) %}{% for m in messages %}<|{{ m.role }}|>
{% if m.thinking and not loop.last %}<think>{{ m.thinking }}</think>{% endif %}{{ m.content or '' }}
{%- for c in m.tool_calls or [] %}<|call|>{{ ns.n }}:{{ c.function.arguments | tojson }}:{{ c.function.name }}<|done|>
{%- set ns.n = ns.n + 1 %}{% endfor %}
{%- if m.role == 'tool' %} of {{ messages[loop.index0 - 1].tool_calls[0].function.name }}{% endif %}
{{- '<|end|>' if m.tool_calls or not loop.last else '' }}
{% endfor %}{% if add_generation_prompt %}<|assistant|>
{% endif %}"""
TEMPLATES = [GLM, HARMONY, MISTRAL, DEEPSEEK, PROMPTED, FOLDING, NUMBERED, QWEN]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    home = tmp_path_factory.mktemp("templates")
    return [folder(home / str(number), template) for number, template in enumerate(TEMPLATES)]


def conversation(random: Random) -> list[Message]:
    """Return rounds of questions, calls with results, and one answer or several."""
    messages, words = list[Message](), ["a", "b ", " c\n", "<x>", "user", "None", "<think>t</think>d", "{}"]
    for _ in range(random.randint(3, 6)):
        messages.append(user(random.choice(words)) | ({"name": "Bob"} if random.random() < 0.1 else {}))
        for _ in range(random.choice([0, 0, 1, 3])):
            made: Any = call({random.choice("ab"): random.choice([1, "x", "yy"])}, random.choice([None, "", "see"]))
            made["tool_calls"][0]["function"]["name"] = random.choice(["get", "put"])
            messages += [_thoughtful(random, made), RESULT | {"content": random.choice([*words, ""])}]
        answers = random.choice([1, 1, 1, 2])
        messages += [_thoughtful(random, assistant(random.choice([*words, ""]))) for _ in range(answers)]
    return messages


def _thoughtful(random: Random, message: Message) -> Message:
    return message | ({"thinking": random.choice(["so", " so\n"])} if random.random() < 0.2 else {})


@pytest.mark.parametrize("seed", range(seeds(60, more=2000)))
def test_turns_found_together_equal_turns_found_alone(folders: list[str], seed: int) -> None:
    random = Random(seed)
    template = load_chat_templates(random.choice(folders)).choose(TOOLS)
    messages = next(read_conversation(conversation(random)).forms)
    try:
        values = Values(template, messages, template.text(messages))
    except REFUSED:
        return
    finder = TurnFinder(template, messages, values.text)
    numbers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    try:
        expected = [finder.answer(number) for number in numbers]
    except REFUSED:
        return
    assert find_turns(values) == expected


# The two others write neither name nor content of a call, so that nothing tells its place.
@pytest.mark.parametrize("number", [n for n, one in enumerate(TEMPLATES) if one not in (MISTRAL, PROMPTED)])
def test_renderings_do_not_grow_with_a_conversation(folders: list[str], number: int) -> None:
    made = []
    for rounds in (8, 24):
        messages = [user("q"), *[one for n in range(rounds) for one in (call({"a": n}), RESULT)], assistant("a")]
        form = _form(folders[number], messages)
        template = load_chat_templates(folders[number]).choose(TOOLS)
        find_turns(Values(template, form, template.text(form)))
        made.append(template.rendered["all"] / len(messages))
    assert made[1] < made[0] * 1.2 < 100


def _form(name: str, messages: list[Message]) -> list[Message]:
    """Return the form of messages that a template writes without faults."""
    template = load_chat_templates(name).choose(TOOLS)
    for form in read_conversation(messages).forms:
        with suppress(*REFUSED):
            if not Values(template, form, template.text(form)).unused():
                return form
    raise AssertionError("no form fits")


def test_conversation_that_takes_too_many_renderings_is_refused(tmp_path: Path) -> None:
    # Each turn has another text around it, so that none is like an earlier one.
    template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ 'x' * loop.index }}{{ m.content }}{{ 'y' * loop.index }}<|end|>"
    )
    odd = folder(tmp_path, template + "{% endfor %}", eos="<|end|>")
    talk = [one for _ in range(150) for one in (user("q"), assistant("a"))]
    short = encode_chat(load_tokenizer(odd), load_chat_templates(odd), talk[:10], None)
    assert set(short.labels) != {IGNORE}
    with pytest.raises(DataError, match=r"^the turns of 300 messages can only be found by rendering them more than "):
        encode_chat(load_tokenizer(odd), load_chat_templates(odd), talk, None)
