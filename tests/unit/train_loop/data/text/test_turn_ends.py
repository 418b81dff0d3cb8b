"""Ends of turns are trained whatever the flags of their tokens say, or a run is warned.

Expected texts show trained text between ⟦ and ⟧.
"""

from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from tests.support.tokenizers.chats import CALL, CHATML, assistant, user
from tests.support.tokenizers.random_folders import NEXT_ROLE, TOOL_USE
from tests.support.tokenizers.turns import added, encoded, shown, write
from train_loop.data.prepare.boundaries import Boundaries
from train_loop.data.text.chat import encode_chat, load_chat_templates, read_template
from train_loop.data.text.tokenizer import load_tokenizer
from train_loop.errors import DataError

TALK = [user("a"), assistant("b"), user("c"), assistant("d")]
CHATML_TEXT = (
    "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n⟦b<|im_end|>⟧\n"
    "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n⟦d<|im_end|>⟧\n"
)
UNENDED = CHATML.replace("{{ message.content }}", "{% generation %}{{ message.content }}{% endgeneration %}")
NOT_LAST = CHATML.replace("<|im_end|>\n", "{% if not loop.last %}<|im_end|>\n{% endif %}")
FOOTER = CHATML + "{% if not add_generation_prompt %}<|endoftext|>{% endif %}"
ALWAYS_PROMPTED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}<|answer|>{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant{{ '\n' }}"
)
SPELLED = "{% for m in messages %}### {{ m.role }}: {{ m.content }} ### End\n{% endfor %}"


def warning(folder: str) -> str | None:
    ends = Boundaries(load_tokenizer(folder))
    ends.see(encoded(folder, TALK))
    return ends.sample_without_end


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("eos", ["<|im_end|>", "<|endoftext|>"])
def test_end_token_is_trained_whatever_its_flag(tmp_path: Path, special: bool, eos: str) -> None:
    tokens = added("<|im_start|>", "<|im_end|>", "<|endoftext|>", special=special)
    folder = write(tmp_path, CHATML, tokens=tokens, eos=eos)
    assert shown(folder, TALK) == CHATML_TEXT + ("<|endoftext|>" if eos == "<|endoftext|>" else "")
    assert warning(folder) is None


def test_end_token_of_the_base_vocabulary_is_trained(tmp_path: Path) -> None:
    words = ("<|im_start|>", "<|im_end|>")
    folder = write(tmp_path, CHATML, tokens=[], eos="<|im_end|>", words=words)
    assert shown(folder, TALK) == CHATML_TEXT


@pytest.mark.parametrize("special", [True, False])
def test_turn_that_the_next_role_ends_trains_its_marker(tmp_path: Path, special: bool) -> None:
    tokens = added("<|user|>", "<|assistant|>", "<|endoftext|>", special=special)
    folder = write(tmp_path, NEXT_ROLE, tokens=tokens, eos="<|endoftext|>")
    assert shown(folder, TALK) == "<|user|>\na<|assistant|>\n⟦b<|user|>⟧\nc<|assistant|>\n⟦d<|endoftext|>⟧"
    again = shown(folder, [user("a"), assistant("b"), assistant("c")])
    assert again == "<|user|>\na<|assistant|>\n⟦b⟧<|assistant|>\n⟦c<|endoftext|>⟧"


def test_end_that_only_inner_turns_have_is_trained(tmp_path: Path) -> None:
    tokens = added("<|im_start|>", "<|im_end|>", special=False)
    folder = write(tmp_path, NOT_LAST, tokens=tokens, eos="<|im_end|>")
    assert shown(folder, TALK) == CHATML_TEXT.removesuffix("\n")


def test_header_with_a_name_is_not_trained(tmp_path: Path) -> None:
    tokens = added("<|im_start|>", "<|im_end|>", special=True)
    template = NOT_LAST.replace("{{ message.role }}", "{{ message.name or message.role }}")
    folder = write(tmp_path, template, tokens=tokens, eos="<|im_end|>")
    found = shown(folder, [user("a"), assistant("b"), user("c") | {"name": "Bob"}, assistant("d")])
    assert "⟦b<|im_end|>⟧\n<|im_start|>Bob\nc" in found


def test_answer_begins_after_a_prompt_that_the_template_always_writes(tmp_path: Path) -> None:
    """As in Command R7B's template for tools, which ignores `add_generation_prompt`."""
    folder = write(
        tmp_path,
        ALWAYS_PROMPTED,
        tokens=added("<|im_start|>", "<|im_end|>", "<|answer|>", special=True),
        eos="<|im_end|>",
    )
    assert shown(folder, TALK) == (
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n⟦<|answer|>b<|im_end|>⟧\n"
        "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n⟦<|answer|>d<|im_end|>⟧\n"
        "<|im_start|>assistant\n<|im_end|>"
    )


def test_end_of_the_text_does_not_hide_ends_of_turns(tmp_path: Path) -> None:
    tokens = added("<|im_start|>", "<|im_end|>", "<|endoftext|>", special=False)
    folder = write(tmp_path, FOOTER, tokens=tokens, eos="<|endoftext|>")
    assert shown(folder, TALK).startswith(CHATML_TEXT.split("⟦d")[0])


def test_end_in_plain_text_is_trained_before_eos(tmp_path: Path) -> None:
    folder = write(tmp_path, SPELLED, tokens=added("</s>", special=True), eos="</s>")
    assert shown(folder, TALK) == (
        "### user: a ### End\n### assistant: ⟦b ### End⟧\n### user: c ### End\n### assistant: ⟦d ### End⟧\n⟦</s>⟧"
    )


@pytest.mark.parametrize("eos", ["<|im_end|>", "<|endoftext|>"])
def test_template_that_marks_no_end_is_warned_of(tmp_path: Path, eos: str) -> None:
    tokens = added("<|im_start|>", "<|im_end|>", "<|endoftext|>", special=True)
    folder = write(tmp_path, UNENDED, tokens=tokens, eos=eos)
    sample = warning(folder)
    assert sample is not None
    assert "⟦b⟧<|im_end|>" in sample


def test_named_template_is_chosen_as_transformers_does(tmp_path: Path) -> None:
    tokens = added("<|im_start|>", "<|im_end|>", special=True)
    folder = write(tmp_path, {"default": CHATML, "tool_use": TOOL_USE}, tokens=tokens, eos="<|im_end|>")
    tools = [{"type": "function", "function": {"name": "sum"}}]
    peer: Any = PreTrainedTokenizerFast.from_pretrained(folder)
    for chosen in (None, tools):
        theirs = peer.apply_chat_template(TALK, tools=chosen, return_dict=False)
        assert encoded(folder, TALK, chosen).input_ids.tolist() == theirs
    assert load_chat_templates(folder).use_tools
    with pytest.raises(DataError, match="has no chat template named 'rag'; it has default, tool_use; correct data"):
        load_chat_templates(folder, "rag")
    named = load_chat_templates(folder, "tool_use")
    assert named.choose(None).source == TOOL_USE
    with pytest.raises(DataError, match=r"for example with columns.tools, or with data.chat_template: tool_use"):
        encoded(folder, [user("a"), assistant("b", tool_calls=CALL)])


def test_template_file_is_used_for_all_rows(tmp_path: Path) -> None:
    tokens = added("<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>", special=True)
    folder = write(tmp_path / "tokenizer", CHATML, tokens=tokens, eos="<|im_end|>")
    (tmp_path / "own.jinja").write_text(NEXT_ROLE)
    templates = load_chat_templates(folder, (tmp_path / "own.jinja").as_uri())
    assert templates.choose([{}]).source == templates.choose(None).source == NEXT_ROLE
    with pytest.raises(
        DataError, match=r"data.chat_template file:///nowhere/a.jinja cannot be read: .*; give the file://"
    ):
        load_chat_templates(folder, "file:///nowhere/a.jinja")


def test_template_that_is_not_used_may_be_broken(tmp_path: Path) -> None:
    tokens = added("<|im_start|>", "<|im_end|>", special=True)
    folder = write(tmp_path, {"tool_use": TOOL_USE, "rag": "{% for %}"}, tokens=tokens, eos="<|im_end|>")
    assert load_chat_templates(folder).choose([{}]).source == TOOL_USE
    with pytest.raises(DataError, match=r"has no chat template named default; choose one with data.chat_template"):
        encoded(folder, TALK)


@pytest.mark.parametrize(("content", "found"), [(b"\xef\xbb\xbf{{ 1 }}", "{{ 1 }}"), (b"", None)])
def test_template_file_without_byte_order_mark_and_content(tmp_path: Path, content: bytes, found: str | None) -> None:
    (tmp_path / "own.jinja").write_bytes(content)
    if found is not None:
        assert read_template(str(tmp_path / "own.jinja")) == found
        return
    with pytest.raises(DataError, match=r"own.jinja is empty; write a Jinja template to it"):
        read_template(str(tmp_path / "own.jinja"))


CALLS = """{% for m in messages %}{{ m.content }}
{% for call in m.tool_calls or [] %}{{ call.function.arguments | tojson }}{% endfor %}{% endfor %}"""


def call(arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "arguments": arguments}}


def test_tool_arguments_as_json_text_are_read_once(tmp_path: Path) -> None:
    folder = write(tmp_path, CALLS, tokens=added("</s>", special=True), eos="</s>")
    texts = [shown(folder, [user("a"), assistant("b", tool_calls=[call(form)])]) for form in ({"a": [1]}, '{"a": [1]}')]
    assert texts[0] == texts[1]
    assert '{"a": [1]}' in texts[0]
    assert "{}" in shown(folder, [user("a"), assistant("b", tool_calls=[call("")])])
    repeated = "that are not JSON: an object has the key 'a' 2 times"
    for wrong, reason in (
        ("{", "that are not JSON"),
        ('{"a": NaN}', "that are not JSON: NaN is not a number"),
        ('{"a": 1, "a": 2}', repeated),
        ("[1]", "which are not the JSON of an object"),
    ):
        with pytest.raises(DataError, match=rf"^messages\[1\] has tool arguments .*{reason}"):
            shown(folder, [user("a"), assistant("b", tool_calls=[call(wrong)])])


def test_bos_begins_documents_as_add_bos_says(tmp_path: Path) -> None:
    folder = write(
        tmp_path,
        "{{ bos_token }}" + CHATML,
        tokens=added("<s>", "<|im_start|>", "<|im_end|>", special=True),
        eos="<|im_end|>",
        bos_token="<s>",
    )
    tokenizer, templates = load_tokenizer(folder), load_chat_templates(folder)
    for rule, text, chat in (("auto", False, True), (True, True, True), (False, False, False)):
        ours = tokenizer.adding_bos(rule)  # type: ignore[arg-type]
        ids, labels, _ = encode_chat(ours, templates, TALK, None)
        assert (ids[0] == ours.bos, len(ids)) == (chat, len(labels))
        assert (ours.encode(["a"])[0][0] == ours.bos) is text
        (found,) = ours.encode_responses([("a", "b")])
        assert found[1][:-2] == [-100] * (2 if text else 1)


def test_missing_bos_is_rejected(tmp_path: Path) -> None:
    folder = write(tmp_path, None, tokens=added("</s>", special=True), eos="</s>")
    with pytest.raises(DataError, match=r"has no bos_token, which data.add_bos needs"):
        load_tokenizer(folder).adding_bos(True)
    assert load_tokenizer(folder).adding_bos(False).encode(["a"])[0][-1] == load_tokenizer(folder).eos


# Each part of a turn is marked on its own; the end also without content; and EOS after the last turn.
PARTED = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' %}{% if m.thinking %}{% generation %}<t>{{ m.thinking }}</t>{% endgeneration %}\n{% endif %}
{%- if m.content %}{% generation %}{{ m.content }}{% endgeneration %}{% endif %}
{%- generation %}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}
{% endfor %}{% generation %}<|endoftext|>{% endgeneration %}"""


@pytest.mark.parametrize(
    "wrong", [assistant("b"), assistant(""), assistant("b", thinking="t"), assistant("", tool_calls=CALL)]
)
@pytest.mark.parametrize("question", ["a", "b"])
def test_no_marked_part_of_an_untrained_turn_is_trained(tmp_path: Path, wrong: Any, question: str) -> None:
    tokens = added("<|im_start|>", "<|im_end|>", "<|endoftext|>", special=True)
    folder = write(tmp_path, PARTED, tokens=tokens, eos="<|endoftext|>")
    untrained = wrong | {"weight": 0}
    first = shown(folder, [user(question), untrained, user("c"), assistant("d")])
    assert first.partition("<|im_start|>user\nc")[0].count("⟦") == 0
    assert first.endswith("<|im_start|>assistant\n⟦d<|im_end|><|endoftext|>⟧")
    last = shown(folder, [user("c"), assistant("d"), user(question), untrained])
    assert last.count("⟦") == 1
    assert "⟦d<|im_end|>⟧" in last


def test_header_that_quotes_an_answer_is_not_trained(tmp_path: Path) -> None:
    # The number of messages changes the whole text with each message.
    quoting = "{{ messages | length }}{% for m in messages %}<|im_start|>{{ m.role }}"
    quoting += " re {{ messages[loop.index0 - 1].content if loop.index0 }}\n{{ m.content }}\n{% endfor %}"
    tokens = added("<|im_start|>", "<|endoftext|>", special=True)
    folder = write(tmp_path, quoting, tokens=tokens, eos="<|endoftext|>")
    with pytest.raises(DataError, match=r"the content of messages\[1\] occurs again after it; mark it with"):
        shown(folder, TALK)
