"""Tiny Hugging Face model folders, with and without a tokenizer."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from tests.support.builders.specs import TINY


def write_model(folder: Path, *, file_size: str = "1GB", dtype: torch.dtype = torch.float32, **config: Any) -> Path:
    """Write a folder with random weights as transformers does, in several files above `file_size`."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**(TINY | config)))
    model.to(dtype).save_pretrained(folder, max_shard_size=file_size)
    return folder


def write_tokenizer(folder: Path, *, words: int = 300) -> None:
    """Write a tokenizer of single bytes, padded to `words` words, as transformers does."""
    names = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<end>", *(f"<extra {n}>" for n in range(words - 257))]
    tokenizer = Tokenizer(models.BPE(vocab={name: n for n, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(folder)
