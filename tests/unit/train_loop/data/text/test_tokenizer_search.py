"""A search over random tokenizer folders: token ids equal those of transformers, or both refuse the folder."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.support.builders.searches import seeds
from tests.support.tokenizers.chats import assistant, user
from tests.support.tokenizers.random_folders import write_random_tokenizer
from train_loop.data.dataset import IGNORE
from train_loop.data.text.chat import encode_chat, load_chat_templates
from train_loop.data.text.tokenizer import TextTokenizer, load_tokenizer
from train_loop.errors import DataError

TEXTS = ["", "a word", " two  words\n", "x<|im_end|>y </s>", "<think>so</think> é", "<s>hi<eos>"]
TEXTS += ["\u200d👩\u200d🚀 e\u0301\u00a0\r\n\t", "a</s>\n", "</s>", "xtool<tool>y <tool> ", "▁w or"]
CHAT = [user("hi word\u00a0👩\u200d🚀 <s>"), assistant("a word "), user("so?"), assistant("<think>x</think>yes")]
TOOLS = [{"type": "function", "function": {"name": "sum"}}]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Hide what transformers logs of odd folders."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("seed", range(seeds(150, more=3000)))
def test_token_ids_equal_those_of_transformers(tmp_path: Path, seed: int) -> None:
    folder = tmp_path / "folder"
    write_random_tokenizer(folder, seed)
    try:
        peer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        peer(TEXTS)
    except Exception:
        with pytest.raises(DataError):
            load_tokenizer(str(folder))
        return
    if peer.eos_token_id is None:
        with pytest.raises(DataError, match="no eos_token"):
            load_tokenizer(str(folder))
        return
    _compare_texts(str(folder), peer)
    _compare_chats(str(folder), peer)


def _compare_texts(folder: str, peer: Any) -> None:
    ours, eos = load_tokenizer(folder), peer.eos_token_id
    bare = [peer(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
    whole = [peer(text)["input_ids"] for text in TEXTS]
    # "a word" has no special tokens of its own.
    before, after = _around(whole[1], bare[1])
    begins = [_begins(ids, before, peer.bos_token_id) for ids in bare]
    starts = [ids if begun else [*before, *ids] for ids, begun in zip(bare, begins, strict=True)]
    ended = [_ended(ids, after, eos, is_ended=own[-1:] == [eos]) for ids, own in zip(starts, bare, strict=True)]
    assert ours.encode(TEXTS) == ended
    assert _plain(ours, TEXTS) == [[*ids, *after] for ids in starts]
    unchanged = [ids for ids, begun in zip(whole, begins, strict=True) if not begun]
    assert [one for one, begun in zip(_plain(ours, TEXTS), begins, strict=True) if not begun] == unchanged
    assert bare[0] == []
    pairs = [(prompt, response) for prompt in TEXTS[:3] for response in TEXTS[3:]]
    found = [ids for ids, _ in ours.encode_responses(pairs)]
    assert found == ours.encode([prompt + response for prompt, response in pairs])
    assert ours.vocab == max(*peer.get_vocab().values(), *(token for ids in whole for token in ids)) + 1
    if peer.bos_token_id is not None:
        plain, bos = ours.encode(["a word"])[0], [peer.bos_token_id]
        has_bos = plain[:1] == bos
        assert ours.adding_bos(True).encode(["a word"]) == [plain if has_bos else bos + plain]
        assert ours.adding_bos(False).encode(["a word"]) == [plain[1:] if has_bos else plain]


def _around(whole: list[int], own: list[int]) -> tuple[list[int], list[int]]:
    """Return the special tokens before and after the own tokens of a text."""
    start = next(place for place in range(len(whole)) if whole[place:][: len(own)] == own)
    return whole[:start], whole[start + len(own) :]


def _begins(own: list[int], before: list[int], bos: int | None) -> bool:
    """Return whether a text itself begins with BOS, or with all special tokens that are written before texts."""
    return bool(before) and (own[: len(before)] == before or (bos in before and own[:1] == [bos]))


def _ended(ids: list[int], after: list[int], eos: int, *, is_ended: bool) -> list[int]:
    """Return token ids with the special tokens behind a text, and one EOS at the end."""
    if is_ended and after in ([], [eos]):
        return ids
    return [*ids, *after] if after[-1:] == [eos] else [*ids, *after, eos]


def _plain(ours: TextTokenizer, texts: list[str]) -> list[list[int]]:
    """Return the tokens of each text without EOS; none for a text without tokens."""
    found: list[list[int]] = []
    for text in texts:
        try:
            found += ours.encode_plainly([text])
        except DataError:
            found.append([])
    return found


def _compare_chats(folder: str, peer: Any) -> None:
    ours = load_tokenizer(folder)
    for tools in (None, TOOLS):
        try:
            theirs = peer.apply_chat_template(CHAT, tools=tools, return_dict=False)
        except Exception:
            with pytest.raises(DataError):
                load_chat_templates(folder).choose(tools)
            continue
        ids, labels, _ = encode_chat(ours, load_chat_templates(folder), CHAT, None, tools)
        text = peer.apply_chat_template(CHAT, tools=tools, tokenize=False)
        ends = peer(text.rstrip(), add_special_tokens=False)["input_ids"][-1:] == [peer.eos_token_id]
        assert ids == (theirs if ends else [*theirs, peer.eos_token_id])
        assert all(label in (token, IGNORE) for token, label in zip(ids, labels, strict=True))
