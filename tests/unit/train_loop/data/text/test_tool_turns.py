"""Turns with tool calls, in formats modelled on those of published models: what the model writes, and what it lacks.

Expected texts show trained text between ⟦ and ⟧.
"""

import re
from datetime import datetime, tzinfo
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from transformers.utils import chat_template_utils

from tests.support.tokenizers.chats import assistant, user
from tests.support.tokenizers.tool_chats import (
    DEEPSEEK,
    EOS,
    FOLDED,
    GLM,
    HARMONY,
    MARKERS,
    MISTRAL,
    PROMPTED,
    RESULT,
    TOOLS,
    call,
    folder,
)
from tests.support.tokenizers.turns import encoded, shown, write
from train_loop.data.prepare.boundaries import Boundaries
from train_loop.data.text.chat import left_out, load_chat_templates
from train_loop.data.text.tokenizer import load_tokenizer
from train_loop.errors import DataError


def trained(folder: str, messages: list[dict[str, Any]], tools: Any = None) -> list[str]:
    return re.findall("⟦(.*?)⟧", shown(folder, messages, tools).replace("⟧⟦", ""), re.DOTALL)


def test_call_without_an_end_trains_eos_or_the_marker_of_the_result(tmp_path: Path) -> None:
    glm = folder(tmp_path, GLM)
    assert trained(glm, [user("q"), call()]) == [f"<tool_call>get</tool_call>{EOS}"]
    assert trained(glm, [user("q"), call(), RESULT, assistant("a</think>")]) == [
        "<tool_call>get</tool_call><|observation|>",
        f"a</think>{EOS}",
    ]


@pytest.mark.parametrize(
    ("body", "ended"),
    [
        ("{% generation %}{{ m.content }}{% endgeneration %}<|end|>", False),
        ("{% generation %}{{ m.content }} END{% endgeneration %}<|end|>", True),
        ("{% generation %}{{ m.content }}<|end|>{% endgeneration %}", True),
    ],
)
def test_end_is_what_the_template_adds_to_the_answer(tmp_path: Path, body: str, ended: bool) -> None:
    template = "{% for m in messages %}<|" + "{{ m.role }}|>" + body + "{% endfor %}"
    marked = folder(tmp_path, template)
    # The answer itself ends with an added token, which is not the end of its turn.
    found = Boundaries(load_tokenizer(marked))
    found.see(encoded(marked, [user("q"), assistant("a</think>")]))
    assert (found.sample_without_end is None) is ended


def test_header_of_a_call_is_trained_in_its_own_turn_only(tmp_path: Path) -> None:
    harmony = folder(tmp_path, HARMONY, eos="<|return|>")
    first, second = " to=get<|message|>{}<|call|>", "<|channel|>final<|message|>b<|return|>"
    assert trained(harmony, [user("q"), call(), RESULT, assistant("b")]) == [first, second]
    assert trained(harmony, [user("q"), call()]) == [first]
    final = "<|channel|>final<|message|>a<|end|>"
    assert trained(harmony, [user("q"), assistant("a"), call(), RESULT, assistant("b")]) == [final, first, second]
    assert trained(harmony, [user("q"), call(content="why"), RESULT, assistant("b")]) == [first, second]


def test_call_is_trained_where_a_text_without_it_is_rejected(tmp_path: Path) -> None:
    mistral = folder(tmp_path, MISTRAL, eos="</s>")
    talk = [user("q"), call(), RESULT, assistant("a"), user("r"), call({"b": 2}), RESULT, assistant("c")]
    first, second = '[TOOL_CALLS]{"a": 1}</s>', '[TOOL_CALLS]{"b": 2}</s>'
    assert trained(mistral, talk, TOOLS) == [first, "a</s>", second, "c</s>"]
    quoted = [user("q"), call(), RESULT, assistant("a"), user(first), assistant("c")]
    assert trained(mistral, quoted, TOOLS) == [first, "a</s>", "c</s>"]


def test_generation_prompt_after_the_text_is_not_trained(tmp_path: Path) -> None:
    prompted = folder(tmp_path, PROMPTED, eos="<|end|>")
    talk = [user("q"), call(), RESULT, assistant("a"), user("r"), assistant("b")]
    assert trained(prompted, talk) == ['<|action|>{"a": 1}<|done|><|end|>', "a<|end|>", "b<|end|>"]


@pytest.mark.parametrize("content", [None, ""])
@pytest.mark.parametrize("arguments", [{"a": 1}, '{"a": 1}'])
def test_each_form_of_a_call_is_written_as_the_template_can(tmp_path: Path, content: Any, arguments: Any) -> None:
    deepseek = folder(tmp_path / "deepseek", DEEPSEEK)
    assert trained(deepseek, [user("q"), call(arguments, content)]) == ['get {"a": 1}<|end|>']
    prompted = folder(tmp_path / "prompted", PROMPTED, eos="<|end|>")
    assert trained(prompted, [user("q"), call(arguments, content)]) == ['<|action|>{"a": 1}<|done|><|end|>']


def test_python_notation_is_avoided(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.arguments }}"
    printed = folder(tmp_path, template + "{% endfor %}<|end|>{% endfor %}", eos="<|end|>")
    assert shown(printed, [user("None"), call('{"a": true}')]) == 'None<|end|>⟦{"a": true}<|end|>⟧'
    assert shown(printed, [user("{'a': 1}"), call({"a": 1}, "b")]) == "{'a': 1}<|end|>⟦b{\"a\": 1}<|end|>⟧"


def test_value_that_the_model_has_to_write_is_not_left_out(tmp_path: Path) -> None:
    deepseek = folder(tmp_path / "deepseek", DEEPSEEK)
    with pytest.raises(
        DataError, match=r"^the chat template leaves out the tool_calls of messages\[1\] \(role assistant\) beside its"
    ):
        encoded(deepseek, [user("q"), call(content="so")])
    mute = folder(tmp_path / "mute", "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}")
    with pytest.raises(
        DataError, match=r"^the chat template leaves out the content of messages\[1\] \(role assistant\); remove it"
    ):
        encoded(mute, [user("q"), assistant("a")])
    encoded(mute, [user("q"), assistant("a", weight=0), user("r")])


def test_other_values_that_are_left_out_are_told(tmp_path: Path) -> None:
    mistral, talk = folder(tmp_path, MISTRAL, eos="</s>"), [user("q"), call(content="so"), RESULT, assistant("a")]
    assert trained(mistral, talk, TOOLS) == ['[TOOL_CALLS]{"a": 1}</s>', "a</s>"]
    templates = load_chat_templates(mistral)
    assert left_out(templates, talk, None) == "the content of messages[1] (role assistant) beside its tool_calls"
    assert left_out(templates, [user("q"), call(), RESULT, assistant("a")], None) is None


def test_system_prompt_that_the_template_leaves_out_is_refused(tmp_path: Path) -> None:
    template = GLM.replace("messages %}\n", "messages if m.role != 'system' %}\n", 1)
    glm = folder(tmp_path, template)
    with pytest.raises(DataError, match=r"^the chat template does not use a system message; remove data.system_prompt"):
        encoded(glm, [user("q"), assistant("a")], system="Be kind.")
    own = [{"role": "developer", "content": "x"}, user("q"), assistant("a")]
    assert shown(glm, own, system="Be kind.") == shown(glm, own)


@pytest.mark.parametrize("content", ["yes", "  yes", "\n\nyes"])
def test_token_that_takes_in_white_space_is_not_trained(tmp_path: Path, content: str) -> None:
    tokens = [AddedToken(name, rstrip=True, special=True) for name in ("<|user|>", "<|assistant|>", "<|end|>")]
    template = "{% for m in messages %}<|" + "{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    template += "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    phi = write(tmp_path, template, tokens=tokens, eos="<|end|>")
    assert trained(phi, [user("q"), assistant(content)]) == ["yes<|end|>"]
    ((ids, labels),) = load_tokenizer(phi).encode_responses([("q<|assistant|>", content)])
    assert [label for label in labels if label != -100] == ids[2:]


def test_tools_and_marks_are_read_as_transformers_reads_them(tmp_path: Path) -> None:
    named = write(tmp_path, {"default": GLM, "tool_use": MISTRAL}, tokens=MARKERS, eos="</s>")
    templates = load_chat_templates(named)
    assert templates.choose([]).source == MISTRAL
    commented = folder(tmp_path / "commented", "{# {% generation %}{% endgeneration %} #}" + GLM)
    assert trained(commented, [user("q"), assistant("a")]) == [f"a{EOS}"]


def test_result_within_a_turn_is_not_trained_whatever_else_changes(tmp_path: Path) -> None:
    source = FOLDED.replace("{% generation %}", "").replace("{%- generation %}", "").replace("{% endgeneration %}", "")
    folded = folder(tmp_path, source, eos="<|end|>")
    talk = [user("q"), call() | {"thinking": "so"}, RESULT, assistant("a"), user("r"), assistant("b")]
    assert "result" not in "".join(trained(folded, talk))
    assert trained(folded, talk)[0].startswith("<|call|>get<|done|>")


def test_marked_text_of_an_untrained_message_is_not_trained(tmp_path: Path) -> None:
    folded = folder(tmp_path, FOLDED, eos="<|end|>")
    spans = trained(folded, [user("q"), call(content="Wrong") | {"weight": 0}, RESULT, assistant("a")])
    assert "Wrong" not in "".join(spans)
    assert spans[-1] == "a<|end|>"


def test_thoughts_that_later_answers_drop_do_not_hide_a_call(tmp_path: Path) -> None:
    harmony = folder(tmp_path, HARMONY, eos="<|return|>")
    one = " to=get<|message|>{}<|call|>"
    talk = [user("q"), call(content="I look"), RESULT, call(content="again"), RESULT, assistant("b")]
    assert trained(harmony, talk) == [one, one, "<|channel|>final<|message|>b<|return|>"]


def test_second_call_that_is_left_out_is_refused(tmp_path: Path) -> None:
    harmony, both = folder(tmp_path, HARMONY, eos="<|return|>"), call()
    both["tool_calls"] = both["tool_calls"] * 2
    with pytest.raises(DataError, match=r"^the chat template leaves out the tool_calls of messages\[1\]"):
        encoded(harmony, [user("q"), both, RESULT, assistant("b")])


def test_beginning_of_the_last_answer_that_is_left_out_is_told(tmp_path: Path) -> None:
    template = "{% for m in messages %}<|" + "{{ m.role }}|>{{ m.content.split('</think>')[-1] }}<|end|>{% endfor %}"
    templates = load_chat_templates(folder(tmp_path, template, eos="<|end|>"))
    talk = [user("q"), assistant("h</think>a"), user("r"), assistant("h</think>b")]
    assert left_out(templates, talk, None) == "the beginning of the content of messages[3] (role assistant)"
    assert left_out(templates, [*talk[:3], assistant("b")], None) is None


def test_template_that_writes_the_time_is_refused_if_the_text_changes(tmp_path: Path) -> None:
    timed = folder(tmp_path / "timed", "{{ strftime_now('%H:%M:%S.%f') }}" + GLM)
    with pytest.raises(DataError, match=r"^the chat template writes another text each time; remove the time from it"):
        encoded(timed, [user("q"), assistant("a")])
    dated = folder(tmp_path / "dated", "{{ strftime_now('%Y') }}" + GLM)
    assert trained(dated, [user("q"), assistant("a")]) == [f"a{EOS}"]


def test_row_at_midnight_has_one_date(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    days = chain([1] * 3, repeat(2))

    class Clock(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> "Clock":
            return cls(2026, 1, next(days), tzinfo=tz)

    monkeypatch.setattr(chat_template_utils, "datetime", Clock)
    dated = folder(tmp_path, "{{ strftime_now('%d') }}" + GLM)
    assert shown(dated, [user("q"), assistant("a")]) == f"02<|user|>q<|assistant|>⟦a{EOS}⟧"


def test_token_in_the_next_content_does_not_end_a_turn(tmp_path: Path) -> None:
    plain = folder(tmp_path, "{% for m in messages %}{{ m.content }}\n{% endfor %}")
    assert trained(plain, [user("q"), assistant("a"), user("<|end|> is?"), assistant("b")]) == ["a", "b", EOS]


def test_older_and_flat_calls(tmp_path: Path) -> None:
    mistral = folder(tmp_path, MISTRAL, eos="</s>")
    flat = {"role": "assistant", "content": "", "tool_calls": [{"name": "get", "arguments": {"a": 1}}]}
    assert trained(mistral, [user("q"), flat], TOOLS) == ['[TOOL_CALLS]{"a": 1}</s>']
    old = {"role": "assistant", "content": None, "function_call": {"name": "get", "arguments": "{}"}}
    with pytest.raises(DataError, match=r"^messages\[1\] has function_call, an older format of OpenAI; write tool_"):
        encoded(mistral, [user("q"), old])
    with pytest.raises(DataError, match=r"^messages\[1\] must have a list as tool_calls, not '\[\]'"):
        encoded(mistral, [user("q"), assistant("a", tool_calls="[]")])
