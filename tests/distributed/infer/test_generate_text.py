"""Generation after texts and conversations: prompts, texts and log probabilities are those of transformers."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.ranks.infer_runs import infer_rows, save_model
from tests.support.ranks.ranks import ranks_of_any_number
from tests.support.tokenizers.chats import TEMPLATES, assistant, user, write_tokenizer

NEW = 12
CHATS = [[user("Hi?")], [user("Count"), assistant("1 2"), user("on, please")], [user("a word")]]
Call = Callable[..., Any]


@pytest.fixture(scope="module")
def call_ranks() -> Iterator[Call]:
    with ranks_of_any_number(2) as call:
        yield call


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a model that has a tokenizer, conversations, and the texts of their first messages."""
    folder = tmp_path_factory.mktemp("text")
    template, bos, eos = TEMPLATES["qwen"]
    write_tokenizer(folder / "model", template=template, bos=bos, eos=eos)
    words = len(AutoTokenizer.from_pretrained(folder / "model"))
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    heads = {"num_key_value_heads": 2, "head_dim": 8}
    save_model(folder / "model", {"model_type": "qwen3", "vocab_size": words, "eos_token_id": None} | sizes | heads)
    rows = [{"chat": chat, "text": chat[0]["content"]} for chat in CHATS]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def job(data: Path, columns: dict[str, str], output: str = "generate", **generation: Any) -> dict[str, Any]:
    of_tokens = {"generation": {"max_new_tokens": NEW} | generation} if output == "generate" else {}
    return {
        "model": {"path": str(data / "model"), "dtype": "fp32"},
        "data": {"train": {"path": str(data / "rows.jsonl")}, "columns": columns, "sequence_length": 128},
        "infer": {"output": output, "batch_size": 2} | of_tokens,
    }


def plain(data: Path) -> tuple[Any, Any]:
    return AutoModelForCausalLM.from_pretrained(data / "model").eval(), AutoTokenizer.from_pretrained(data / "model")


def answers(data: Path, prompts: list[list[int]]) -> list[list[int]]:
    model, tokenizer = plain(data)
    found = []
    for ids in prompts:
        more = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": 0}
        out = model.generate(torch.tensor([ids]), max_new_tokens=NEW, do_sample=False, **more)
        found.append(out[0, len(ids) :].tolist())
    return found


def test_answers_to_conversations_equal_those_of_transformers(data: Path, tmp_path: Path, call_ranks: Call) -> None:
    _, tokenizer = plain(data)
    prompts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"] for chat in CHATS]
    expected = answers(data, prompts)
    _, found = call_ranks(2, infer_rows, job(data, {"messages": "chat"}), tmp_path)
    assert [json.loads(row["chat"]) for row in found] == CHATS
    assert [row["tokens"] for row in found] == [len(ids) for ids in prompts]
    assert [row["generated_tokens"] for row in found] == expected
    assert [row["generated"] for row in found] == [tokenizer.decode(ids, skip_special_tokens=True) for ids in expected]


def test_text_ends_before_a_stop_text(data: Path, tmp_path: Path, call_ranks: Call) -> None:
    _, tokenizer = plain(data)
    whole = answers(data, [tokenizer(chat[0]["content"])["input_ids"] for chat in CHATS])
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in whole]
    stop = texts[2][2:4]
    assert stop.isascii(), "a part of a character is no text"
    _, found = call_ranks(2, infer_rows, job(data, {"text": "text"}, stop=[stop, "never"]), tmp_path)
    assert [row["generated"] for row in found] == [text.split(stop)[0] for text in texts]
    assert found[2]["finish_reason"] == "stop"
    for row, ids in zip(found, whole, strict=True):
        size = next((n for n in range(1, len(ids) + 1) if stop in tokenizer.decode(ids[:n])), len(ids))
        assert row["generated_tokens"] == ids[:size]


def test_logprobs_of_conversations_are_those_of_the_whole_text(data: Path, tmp_path: Path, call_ranks: Call) -> None:
    model, tokenizer = plain(data)
    _, found = call_ranks(2, infer_rows, job(data, {"messages": "chat"}, "logprobs"), tmp_path)
    for row, chat in zip(found, CHATS, strict=True):
        ids = torch.tensor(tokenizer.apply_chat_template(chat)["input_ids"])
        with torch.no_grad():
            every = model(ids[None]).logits[0, :-1].log_softmax(-1)
        np.testing.assert_allclose(row["logprobs"], every.gather(1, ids[1:, None])[:, 0], rtol=0, atol=1e-5)


def test_conversation_with_the_answer_is_refused(data: Path, tmp_path: Path, call_ranks: Call) -> None:
    file = data / "answered.jsonl"
    file.write_text(json.dumps({"chat": [user("Hi?"), assistant("Hello!")]}) + "\n")
    raw = job(data, {"messages": "chat"})
    raw["data"]["train"] = {"path": str(file)}
    with pytest.raises(AssertionError, match="the last message is of the assistant, whose next message is to be"):
        call_ranks(1, infer_rows, raw, tmp_path)
