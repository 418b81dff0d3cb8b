"""Chat rows: tokens equal those of transformers, and only the model's own words are trained.

Expected texts show trained text between ⟦ and ⟧.
"""

import re
import shutil
from collections.abc import Iterator
from functools import cache
from itertools import groupby
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from tests.support.tokenizers.chats import CALL, CHAT, CHATML, TEMPLATES, assistant, user, write_tokenizer
from train_loop.data.dataset import IGNORE
from train_loop.data.text.chat import encode_chat, left_out, load_chat_templates
from train_loop.data.text.tokenizer import TextTokenizer, load_tokenizer
from train_loop.data.text.turns import find_turns
from train_loop.data.text.values import Values
from train_loop.errors import DataError

ROOT = Path(mkdtemp())


@pytest.fixture(scope="module", autouse=True)
def clean_up() -> Iterator[None]:
    """Remove the tokenizers, which are written once for all examples of Hypothesis."""
    yield
    shutil.rmtree(ROOT)


@cache
def folder(name: str) -> str:
    source, bos, eos = TEMPLATES[name]
    return write_tokenizer(ROOT / name, template=source, bos=bos, eos=eos)


@cache
def peer(name: str) -> Any:
    return PreTrainedTokenizerFast.from_pretrained(folder(name))


def encode(name: str, messages: Any, system_prompt: str | None = None) -> tuple[list[int], list[int]]:
    return encode_chat(load_tokenizer(folder(name)), load_chat_templates(folder(name)), messages, system_prompt)[:2]


def decode(tokenizer: TextTokenizer, ids: list[int]) -> str:
    return tokenizer.tokenizer.decode(ids, skip_special_tokens=False)


def shown(name: str, messages: Any, system_prompt: str | None = None) -> str:
    """Return the decoded document, with trained text between ⟦ and ⟧."""
    ids, labels = encode(name, messages, system_prompt)
    assert all(label in (token, IGNORE) for token, label in zip(ids, labels, strict=True))
    text = ""
    for trained, run in groupby(zip(ids, labels, strict=True), lambda pair: pair[1] != IGNORE):
        part = decode(load_tokenizer(folder(name)), [token for token, _ in run])
        text += f"⟦{part}⟧" if trained else part
    return text


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "chatml",
            "<|im_start|>user\nHi?<|im_end|>\n<|im_start|>assistant\n⟦Hello!<|im_end|>⟧\n"
            "<|im_start|>user\nBye 👋<|im_end|>\n<|im_start|>assistant\n⟦So long 👋<|im_end|>⟧\n",
        ),
        (
            "marked",
            "<|im_start|>user\nHi?<|im_end|>\n<|im_start|>assistant\n⟦Hello!<|im_end|>⟧\n"
            "<|im_start|>user\nBye 👋<|im_end|>\n<|im_start|>assistant\n⟦So long 👋<|im_end|>⟧\n",
        ),
        (
            "qwen",
            "<|im_start|>user\nHi?<|im_end|>\n<|im_start|>assistant\n⟦Hello!<|im_end|>⟧\n"
            "<|im_start|>user\nBye 👋<|im_end|>\n"
            "<|im_start|>assistant\n⟦<think>\n\n</think>\n\nSo long 👋<|im_end|>⟧\n",
        ),
        (
            "llama",
            "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi?<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n⟦Hello!<|eot_id|>⟧"
            "<|start_header_id|>user<|end_header_id|>\n\nBye 👋<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n⟦So long 👋<|eot_id|>⟧",
        ),
        ("mistral", "<s>[INST] Hi? [/INST] ⟦Hello!</s>⟧[INST] Bye 👋 [/INST] ⟦So long 👋</s>⟧"),
        (
            "gemma",
            "<bos><start_of_turn>user\nHi?<end_of_turn>\n<start_of_turn>model\n⟦Hello!<end_of_turn>⟧\n"
            "<start_of_turn>user\nBye 👋<end_of_turn>\n<start_of_turn>model\n⟦So long 👋<end_of_turn>⟧\n<eos>",
        ),
        ("bare", "user: Hi?\nassistant: ⟦Hello!⟧\nuser: Bye 👋\nassistant: ⟦So long 👋⟧\n⟦</s>⟧"),
    ],
)
def test_assistant_turn_is_trained_with_its_end_token_only(name: str, expected: str) -> None:
    assert shown(name, CHAT) == expected


@pytest.mark.parametrize("name", TEMPLATES)
def test_tokens_equal_those_of_transformers(name: str) -> None:
    theirs = peer(name).apply_chat_template(CHAT, return_dict=False)
    eos = peer(name).eos_token_id
    ends = [token for token in theirs if peer(name).decode(token).strip()][-1] == eos
    assert encode(name, CHAT)[0] == (theirs if ends else [*theirs, eos])


def test_token_that_overlaps_an_answer_is_trained() -> None:
    assert shown("mistral", [user("word"), assistant("word for word")]) == "<s>[INST] word [/INST]⟦ word for word</s>⟧"


def test_spaces_missing_from_tokenizer_offsets_are_trained(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path, template=CHATML, eos="<|im_end|>", trim=True)
    tokenizer = load_tokenizer(folder)
    _, labels, _ = encode_chat(tokenizer, load_chat_templates(folder), [user("a"), assistant("  ")], None)
    assert decode(tokenizer, [token for token in labels if token != IGNORE]) == "  <|im_end|>"


def test_text_removed_by_the_template_stays_removed() -> None:
    assert shown("llama", [user(" a "), assistant("  b\n\n")]).endswith("\n\n⟦b<|eot_id|>⟧")


@pytest.mark.parametrize("name", ["chatml", "qwen", "prompted"])
def test_generation_prompt_in_user_text_is_not_a_turn(name: str) -> None:
    pasted = "<|im_start|>assistant\nNo!<|im_end|>\n<|im_start|>assistant:<think><|im_start|>assistant\n"
    text = shown(name, [user(pasted), assistant("One"), user(pasted), assistant(pasted)])
    assert text.count("⟦") == text.count("⟧") == 2
    assert "⟦One<|im_end|>⟧" in text
    assert f"{pasted}<|im_end|>⟧" in text.split("One")[1]


def test_identical_answers_are_both_trained() -> None:
    text = shown("chatml", [user("user"), assistant("user"), user("user"), assistant("user")])
    assert text.count("<|im_start|>assistant\n⟦user<|im_end|>⟧\n") == 2
    assert text.count("⟦") == 2


def test_empty_answer_trains_its_end_token() -> None:
    assert shown("chatml", [user("a"), assistant(""), user("b"), assistant("")]).count("assistant\n⟦<|im_end|>⟧\n") == 2


def test_consecutive_answers_are_both_trained() -> None:
    turns = [user("a"), assistant("b"), assistant("c")]
    assert shown("chatml", turns).endswith("assistant\n⟦b<|im_end|>⟧\n<|im_start|>assistant\n⟦c<|im_end|>⟧\n")
    assert shown("qwen", turns).endswith(
        "assistant\n⟦b<|im_end|>⟧\n<|im_start|>assistant\n⟦<think>\n\n</think>\n\nc<|im_end|>⟧\n"
    )


def test_leading_answer_is_trained() -> None:
    assert shown("gemma", [assistant("a")]) == "<bos><start_of_turn>model\n⟦a<end_of_turn>⟧\n<eos>"
    assert shown("chatml", [assistant("a"), user("b")]).startswith(
        "<|im_start|>assistant\n⟦a<|im_end|>⟧\n<|im_start|>u"
    )


def test_thoughts_kept_by_the_template_are_trained() -> None:
    turns = [user("a"), assistant("b", reasoning_content="x"), user("c"), assistant("<think>\ny\n</think>\n\nd")]
    assert shown("qwen", turns) == (
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n⟦b<|im_end|>⟧\n"
        "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n⟦<think>\ny\n</think>\n\nd<|im_end|>⟧\n"
    )


def test_thoughts_after_a_different_generation_prompt_are_trained() -> None:
    turns = [user("a"), assistant("b", reasoning="x"), user("<|im_start|>assistant\nc"), assistant("d", reasoning="y")]
    assert shown("forgetful", turns) == (
        "<|im_start|>user\na<|im_end|><|im_start|>assistant\n⟦b<|im_end|>⟧"
        "<|im_start|>user\n<|im_start|>assistant\nc<|im_end|><|im_start|>assistant\n⟦<think>y</think>d<|im_end|>⟧"
    )


def test_text_of_the_generation_prompt_is_not_trained() -> None:
    assert shown("prompted", [user("a"), assistant("<think>b")]).endswith("assistant:<think>⟦b<|im_end|>⟧")
    assert shown("prompted", [user("a"), assistant("b")]).endswith("assistant:⟦b<|im_end|>⟧")


@pytest.mark.parametrize("call", [{"content": None}, {}, {"content": ""}])
def test_tool_calls_are_trained_and_tool_results_are_not(call: dict[str, Any]) -> None:
    turns = [user("1+1"), {"role": "assistant", "tool_calls": CALL, **call}, {"role": "tool", "content": "2"}]
    turns += [assistant("two")]
    tool_call = '{"name": "sum", "arguments": {"a": 1}}'
    assert shown("qwen", turns) == (
        "<|im_start|>user\n1+1<|im_end|>\n"
        f"<|im_start|>assistant\n⟦<tool_call>\n{tool_call}\n</tool_call><|im_end|>⟧\n"
        "<|im_start|>user\n<tool_response>\n2\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n⟦<think>\n\n</think>\n\ntwo<|im_end|>⟧\n"
    )
    # This template rejects a conversation without the call.
    assert shown("mistral", turns) == (
        f'<s>[INST] 1+1 [/INST]⟦[TOOL_CALLS] [{{"type": "function", "function": {tool_call}}}]</s>⟧'
        "[TOOL_RESULTS] 2[/TOOL_RESULTS] ⟦two</s>⟧"
    )


def test_tool_result_within_the_turn_of_its_call_is_not_trained() -> None:
    turns = [user("a"), {"role": "assistant", "tool_calls": CALL}, {"role": "tool", "content": "2"}, assistant("two")]
    head = "<start_of_turn>user\na<end_of_turn><start_of_turn>assistant\n"
    tail = "<start_of_turn>assistant\n⟦two<end_of_turn>⟧"
    assert shown("folded", turns) == f"{head}⟦[call]⟧[result]2[end]{tail}"
    turns[1]["content"] = "so"
    assert "2" not in "".join(part.split("⟧")[0] for part in shown("folded", turns).split("⟦")[1:])


def test_all_end_markers_of_a_turn_are_trained() -> None:
    assert shown("double", [user("a"), assistant(""), user("b"), assistant("c")]) == (
        "<|im_start|>user\na</s><|im_end|><|im_start|>assistant⟦</s><|im_end|>⟧"
        "<|im_start|>user\nb</s><|im_end|><|im_start|>assistant⟦\nc</s><|im_end|>⟧"
    )


def test_empty_message_keys_are_dropped_and_empty_call_arguments_kept() -> None:
    full = {"name": None, "reasoning_content": None}
    turns = [user("a") | full | {"tool_calls": None}, assistant("b", **full, tool_calls=CALL)]
    assert encode("qwen", turns) == encode("qwen", [user("a"), assistant("b", tool_calls=CALL)])
    assert turns[0]["name"] is None
    call = [{"type": "function", "function": {"name": "sum", "arguments": {"a": 1, "b": None}}}]
    assert '"b": null' in shown("qwen", [user("a"), assistant("b", tool_calls=call)])


def test_system_prompt_is_added_to_conversations_without_one() -> None:
    assert shown("chatml", CHAT, "Be kind.").startswith("<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi?")
    own = [{"role": "system", "content": "Be brief."}, *CHAT]
    assert encode("chatml", own, "Be kind.") == encode("chatml", own)


def test_end_of_document_is_trained_only_after_an_assistant_turn() -> None:
    assert shown("bare", [user("a"), assistant("b")]).endswith("assistant: ⟦b⟧\n⟦</s>⟧")
    assert shown("bare", [user("a"), assistant("b"), user("c")]).endswith("user: c\n</s>")
    assert shown("gemma", [user("a"), assistant("b")]).endswith("⟦b<end_of_turn>⟧\n<eos>")


def agrees(name: str, messages: list[dict[str, Any]], expected: list[tuple[str, bool]]) -> None:
    """Check text, tokens and each trained character against the expected ones."""
    template = load_chat_templates(folder(name)).choose(None)
    text = template.text(messages)
    assert text == "".join(text for text, _ in expected)
    starts = [sum(len(text) for text, _ in expected[:n]) for n in range(len(expected))]
    spans = [
        (start, start + len(text)) for start, (text, is_trained) in zip(starts, expected, strict=True) if is_trained
    ]
    assert [(turn.start, turn.stop) for turn in find_turns(Values(template, messages, text))] == spans
    ids, labels = encode(name, messages)
    assert ids == peer(name).apply_chat_template(messages, return_dict=False)
    trained = decode(load_tokenizer(folder(name)), [token for token in labels if token != IGNORE])
    assert trained == "".join(text for text, is_trained in expected if is_trained)


odd = ["<|im_start|>assistant\n", "<|im_end|>", "<|im_end|>\n<|im_start|>assistant\n", "assistant", "\n", " ", "\ue000"]
contents = st.lists(st.text(max_size=6) | st.sampled_from(odd), max_size=4).map("".join)
conversations = st.lists(st.tuples(st.sampled_from(["user", "assistant"]), contents), max_size=5).map(
    lambda turns: [{"role": role, "content": content} for role, content in [*turns, ("assistant", "end")]]
)


@given(messages=conversations)
@pytest.mark.parametrize("name", ["chatml", "marked"])
def test_any_conversation_trains_only_its_answers(name: str, messages: list[dict[str, Any]]) -> None:
    parts = [
        [
            (f"<|im_start|>{one['role']}\n", False),
            (f"{one['content']}<|im_end|>", one["role"] == "assistant"),
            ("\n", False),
        ]
        for one in messages
    ]
    agrees(name, messages, [part for turn in parts for part in turn])


@given(messages=conversations)
def test_mask_equals_that_of_transformers_if_the_template_marks_answers(messages: list[dict[str, Any]]) -> None:
    theirs = peer("marked").apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    for name in ("marked", "chatml"):
        _, labels = encode(name, messages)
        assert [int(label != IGNORE) for label in labels] == theirs["assistant_masks"]


def test_template_error_is_quoted_in_the_message() -> None:
    with pytest.raises(
        DataError, match=r"^the chat template rejects the messages: System role not supported; change the messages"
    ):
        encode("gemma", CHAT, "Be kind.")
    with pytest.raises(DataError, match="rejects the messages: user and assistant must take turns"):
        encode("mistral", [user("a"), user("b"), assistant("c")])


def test_template_that_raises_rejects_the_conversation() -> None:
    with pytest.raises(DataError, match=r"rejects the messages: .*str"):
        encode("qwen", [user("a"), assistant("b", reasoning_content=1)])


@pytest.mark.parametrize("name", ["chatml", "marked", "qwen", "llama", "double", "bare"])
@pytest.mark.parametrize("switch", [{"weight": 0}, {"weight": 0.0}, {"train": False}, {"weight": 0, "train": False}])
def test_assistant_message_with_weight_0_or_train_false_is_shown_and_not_trained(
    name: str, switch: dict[str, Any]
) -> None:
    whole = shown(name, CHAT)
    first, *_ = spans = re.findall("⟦(.*?)⟧", whole, re.DOTALL)
    assert shown(name, [CHAT[0], CHAT[1] | switch, *CHAT[2:]]) == whole.replace(f"⟦{first}⟧", first, 1)
    assert re.findall("⟦(.*?)⟧", shown(name, [*CHAT[:3], CHAT[3] | switch]), re.DOTALL) == spans[:1]


@pytest.mark.parametrize("switch", [{"weight": 1}, {"weight": 1.0}, {"train": True}, {"weight": None, "train": None}])
def test_assistant_message_with_weight_1_or_train_true_is_trained(switch: dict[str, Any]) -> None:
    messages = [*CHAT[:1], CHAT[1] | switch, *CHAT[2:]]
    assert encode("chatml", messages) == encode("chatml", CHAT)
    # OpenAI accepts a weight of 0 in any message.
    assert encode("chatml", [CHAT[0] | {"weight": 0}, *messages[1:]]) == encode("chatml", CHAT)


@given(messages=conversations, data=st.data())
@pytest.mark.parametrize("name", ["chatml", "marked"])
def test_only_selected_messages_are_trained(name: str, messages: list[dict[str, Any]], data: st.DataObject) -> None:
    choice = st.lists(st.booleans(), min_size=len(messages), max_size=len(messages))
    on = [chosen and one["role"] == "assistant" for chosen, one in zip(data.draw(choice), messages, strict=True)]
    chosen = [
        one | ({"train": turn} if one["role"] == "assistant" else {}) for one, turn in zip(messages, on, strict=True)
    ]
    ids, labels = encode(name, chosen)
    assert ids == encode(name, messages)[0]
    trained = decode(load_tokenizer(folder(name)), [token for token in labels if token != IGNORE])
    assert trained == "".join(f"{one['content']}<|im_end|>" for one, turn in zip(messages, on, strict=True) if turn)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (assistant("b", weight=0.5), r"messages\[1\] has weight 0.5; expected 0 or 1"),
        (assistant("b", weight=True), r"messages\[1\] has weight True; expected 0 or 1"),
        (assistant("b", train="no"), r"messages\[1\] has train 'no'; expected false or true"),
        (assistant("b", weight=1, train=False), r"messages\[1\] has weight and train that contradict each other"),
        (
            user("b") | {"train": True},
            r"messages\[1\] of role 'user' has train True, but only messages of the assistant",
        ),
        (assistant("b", tool_calls=CALL), r"messages\[1\] has the key 'tool_calls', which the chat template"),
    ],
)
def test_unsupported_message_key_is_rejected_by_name(message: dict[str, Any], reason: str) -> None:
    with pytest.raises(DataError, match=f"^{reason}"):
        encode("chatml", [user("a"), message, assistant("c")], "Be brief.")


@pytest.mark.parametrize(("key", "value"), [("timestamp", 17), ("id", "x"), ("mood", {"a": 1}), ("name", "Ann")])
def test_other_key_that_the_template_does_not_use_is_reported(key: str, value: Any) -> None:
    plain = [user("a"), assistant("b")]
    keyed = [message | {key: value} for message in plain]
    assert encode("chatml", keyed) == encode("chatml", plain)
    assert left_out(load_chat_templates(folder("chatml")), keyed, None) == f"the {key} of messages[0] (role user)"


@pytest.mark.parametrize("key", ["loss", "trainable", "images"])
def test_key_that_may_change_what_is_trained_is_rejected(key: str) -> None:
    with pytest.raises(DataError, match=rf"^messages\[1\] has the key '{key}', which the chat template does not use"):
        encode("chatml", [user("a"), assistant("b") | {key: False if key == "loss" else [1]}])


def test_used_empty_and_linking_message_keys_are_accepted() -> None:
    encode("chatml", [user("a"), assistant("b", tool_calls=[], refusal="", annotations=None)])
    encode("qwen", [user("a"), assistant("b", thinking="so"), user("c"), assistant("d", reasoning_content="x")])
    result = {"role": "tool", "name": "sum", "tool_call_id": "1", "content": "2"}
    encode("qwen", [user("a"), assistant("", tool_calls=CALL), result, assistant("b")])
