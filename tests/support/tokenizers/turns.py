"""Tokenizers with a chat template of a test, and the trained text of conversations encoded with them."""

from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from train_loop.data.prepare.boundaries import mark_trained
from train_loop.data.prepare.packing import Document
from train_loop.data.text.chat import encode_chat, load_chat_templates
from train_loop.data.text.tokenizer import load_tokenizer


def write(
    folder: Path, template: Any, *, tokens: list[AddedToken], eos: str, words: tuple[str, ...] = (), **more: Any
) -> str:
    """Write a tokenizer of bytes, words and added tokens, as transformers does; return its folder."""
    alphabet = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *words]
    tokenizer = Tokenizer(models.BPE(vocab={word: n for n, word in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(tokens)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos, chat_template=template, **more).save_pretrained(
        folder
    )
    return str(folder)


def added(*names: str, special: bool) -> list[AddedToken]:
    """Return added tokens."""
    return [AddedToken(name, special=special, normalized=False) for name in names]


def encoded(folder: str, messages: Any, tools: Any = None, system: str | None = None) -> Document:
    """Return a conversation as it is trained; `system`: the spec's system prompt."""
    ids, labels, ends = encode_chat(load_tokenizer(folder), load_chat_templates(folder), messages, system, tools)
    return Document(np.asarray(ids), np.asarray(labels), ends=ends)


def shown(folder: str, messages: Any, tools: Any = None, system: str | None = None) -> str:
    """Return the text of a conversation, with trained text between ⟦ and ⟧."""
    return mark_trained(load_tokenizer(folder), encoded(folder, messages, tools, system))
