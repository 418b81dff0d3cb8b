"""Chat templates from the files of a tokenizer folder, and conversations that a template rejects."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.tokenizers.chats import CHATML, assistant, user, write_tokenizer
from train_loop.data.text.chat import encode_chat, load_chat_templates
from train_loop.data.text.tokenizer import load_tokenizer
from train_loop.errors import DataError


def alter(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change tokenizer_config.json in place."""
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text())
    change(config)
    file.write_text(json.dumps(config))


@pytest.mark.parametrize(
    "template", [CHATML, [{"name": "tool_use", "template": "no"}, {"name": "default", "template": CHATML}]]
)
def test_template_is_read_from_the_config(tmp_path: Path, template: Any) -> None:
    write_tokenizer(tmp_path, template=None)
    alter(tmp_path, lambda config: config.update(chat_template=template))
    assert load_chat_templates(str(tmp_path)).choose(None).source == CHATML


def test_template_file_takes_precedence(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, template=CHATML)
    alter(tmp_path, lambda config: config.update(chat_template="old"))
    assert load_chat_templates(str(tmp_path)).choose(None).source == CHATML


def test_special_tokens_are_read_from_any_file(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, template="{{ bos_token }}{{ eos_token }}{{ unk_token }}{{ pad_token }}")
    alter(
        tmp_path, lambda config: config.update(bos_token={"__type": "AddedToken", "content": "<bos>"}, unk_token=None)
    )
    (tmp_path / "special_tokens_map.json").write_text('{"pad_token": {"content": "<pad>"}}')
    assert load_chat_templates(str(tmp_path)).choose(None).text([user("a")]) == "<bos></s><pad>"


def test_tokenizer_without_a_template_is_rejected(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, template=None)
    with pytest.raises(DataError, match="has no chat template, and messages need one; name the tokenizer of a chat"):
        load_chat_templates(str(tmp_path))
    alter(tmp_path, lambda config: config.update(chat_template=[{"name": "rag", "template": CHATML}]))
    with pytest.raises(DataError, match="has no chat template"):
        load_chat_templates(str(tmp_path))


def test_broken_template_is_rejected_at_once(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, template="{% for %}")
    with pytest.raises(DataError, match=r"is not valid Jinja: .*; copy it again"):
        load_chat_templates(str(tmp_path))


def test_unreadable_file_is_rejected(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, template=CHATML)
    (tmp_path / "special_tokens_map.json").write_text("{")
    with pytest.raises(DataError, match=r"special_tokens_map.json cannot be read: .*; save the tokenizer again"):
        load_chat_templates(str(tmp_path))


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ("hello", "messages must be a list or its JSON: Expecting value at column 1; correct the text 'hello'"),
        ('{"role": "user"}', r"messages must be a non-empty list, not \{'role': 'user'\}"),
        (None, "messages must be a non-empty list, not None"),
        ([], r"messages must be a non-empty list, not \[\]"),
        (["hello"], r"messages\[0\] must be an object, not 'hello'; write {\"role\": \"user\", \"content\": \"…\"}"),
        ([user("a"), {"from": "gpt", "value": "b"}], r"messages\[1\] has from and value, as in ShareGPT; rename"),
        ([{}], r"messages\[0\] must have a role, but has no keys"),
        ([{"role": 1, "content": "a"}], r"messages\[0\] must have text as role, not 1"),
        ([{"role": "user"}], r"messages\[0\] must have text as content, not None"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"messages\[0\] has a content part \{'type': 't"),
        ([{"role": "user", "content": []}], r"messages\[0\] has a list without parts as content; give it a part"),
        ([{"role": "user", "content": [{"type": "image"}]}], r"messages\[0\] has a content part of type 'image', but"),
        ([user("a"), assistant(None, tool_calls=[])], r"messages\[1\] must have text as content"),  # type: ignore[arg-type]
    ],
)
def test_invalid_conversation_is_rejected_with_the_reason(tmp_path: Path, messages: Any, reason: str) -> None:
    folder = write_tokenizer(tmp_path, template=CHATML)
    with pytest.raises(DataError, match=f"^{reason}"):
        encode_chat(load_tokenizer(folder), load_chat_templates(folder), messages, None)
