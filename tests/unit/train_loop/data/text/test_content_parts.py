"""Content as a list of text parts, and messages as JSON text: they are trained as transformers renders them."""

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.support.builders.searches import seeds
from tests.support.tokenizers.chats import CHATML, assistant, user
from tests.support.tokenizers.tool_chats import folder
from tests.support.tokenizers.turns import shown
from train_loop.data.text.chat import left_out, load_chat_templates
from train_loop.errors import DataError

# Like Qwen2.5-VL's: text, or the joined texts of parts.
PARTS = """{% for m in messages %}<|{{ m.role }}|>
{% if m.content is string %}{{ m.content }}{% else %}
{%- for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|end|>
{% endfor %}{% if add_generation_prompt %}<|assistant|>
{% endif %}"""
# Like Gemma 3's: parts are trimmed.
TRIMMED = PARTS.replace("part.text }}", "part.text | trim }}")


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


@pytest.mark.parametrize("template", [PARTS, TRIMMED])
@pytest.mark.parametrize("seed", range(seeds(20, more=500)))
def test_text_parts_are_trained_as_their_text(tmp_path: Path, template: str, seed: int) -> None:
    random, name = Random(seed), folder(tmp_path, template, eos="<|end|>")
    texts = [random.choices(["a", "b b", "<|user|>", "é"], k=random.randint(1, 3)) for _ in range(8)]
    roles = ["user", "assistant"] * 4
    plain = [{"role": role, "content": "".join(its)} for role, its in zip(roles, texts, strict=True)]
    split = [
        one | ({"content": parts(*its)} if random.random() < 0.7 else {}) for one, its in zip(plain, texts, strict=True)
    ]
    found = shown(name, split)
    assert found == shown(name, plain)
    peer: Any = AutoTokenizer.from_pretrained(name)
    assert found.replace("⟦", "").replace("⟧", "") == peer.apply_chat_template(split, tokenize=False)
    assert shown(name, json.dumps(split)) == found


def test_parts_in_pythons_notation_are_refused(tmp_path: Path) -> None:
    name = folder(tmp_path, CHATML)
    with pytest.raises(
        DataError, match=r"^the chat template writes the content parts of messages\[0\] as a list in Pyth"
    ):
        shown(name, [user("x") | {"content": parts("a")}, assistant("b")])
    quoted = str(parts("a"))
    assert quoted in shown(name, [user(quoted), assistant("b")])


def test_template_that_rejects_parts_names_the_remedy(tmp_path: Path) -> None:
    name = folder(tmp_path, "{% for m in messages %}{{ '<|user|>' + m.content }}{% endfor %}")
    with pytest.raises(
        DataError, match=r"^the chat template rejects the messages: .*; write content as text, not as parts"
    ):
        shown(name, [user("x") | {"content": parts("a")}, assistant("b")])


def test_part_that_the_template_leaves_out_is_refused_in_an_answer(tmp_path: Path) -> None:
    name = folder(
        tmp_path, "{% for m in messages %}<|{{ m.role }}|>{{ m.content[0].text }}<|end|>{% endfor %}", eos="<|end|>"
    )
    assert "⟦a<|end|>⟧" in shown(
        name, [user("x") | {"content": parts("q")}, {"role": "assistant", "content": parts("a")}]
    )
    lost = [{"role": "user", "content": parts("q")}, {"role": "assistant", "content": parts("a", "b")}]
    with pytest.raises(DataError, match=r"^the chat template leaves out the content of messages\[1\]"):
        shown(name, lost)
    lost[1]["content"], lost[0]["content"] = parts("a"), parts("q", "r")
    assert left_out(load_chat_templates(name), lost, None) == "the content of messages[0] (role user)"


def test_other_keys_of_a_part_are_reported(tmp_path: Path) -> None:
    name = folder(tmp_path, PARTS, eos="<|end|>")
    talk = [{"role": "user", "content": [parts("q")[0] | {"cache_control": {}}, parts("r")[0]]}, assistant("b")]
    assert left_out(load_chat_templates(name), talk, None) == "the content.cache_control of messages[0] (role user)"


def test_untrained_parts_of_marked_templates_are_not_trained(tmp_path: Path) -> None:
    start, stop = PARTS.index("{% if m.content"), PARTS.index("\n{% endfor %}{% if add")
    body = PARTS[start:stop]
    both = (
        "{% if m.role == 'assistant' %}{% generation %}" + body + "{% endgeneration %}{% else %}" + body + "{% endif %}"
    )
    name = folder(tmp_path, PARTS[:start] + both + PARTS[stop:], eos="<|end|>")
    talk = [user("q"), {"role": "assistant", "content": parts("a", "b"), "weight": 0}, user("r"), assistant("c")]
    assert "⟦c<|end|>⟧" in shown(name, talk)
    assert "⟦ab" not in shown(name, talk)
