"""Hugging Face fast tokenizers, used without transformers; and the training of new ones."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from train_loop.data.dataset import IGNORE
from train_loop.errors import DataError
from train_loop.run_dir import write_durably
from train_loop.system.input_files import read_input

END_OF_TEXT = "<|endoftext|>"


@dataclass(frozen=True)
class TextTokenizer:
    """A tokenizer of text, with the EOS token that ends every document."""

    tokenizer: Tokenizer
    eos: int

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Return the token ids of each text, with EOS."""
        encodings = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [[*encoding.ids, self.eos] for encoding in encodings]

    def encode_responses(self, pairs: list[tuple[str, str]]) -> list[tuple[list[int], list[int]]]:
        """Return token ids and labels of prompts with their responses; only response and EOS are trained.

        Prompt and response are tokenised as one text. A token that spans both belongs to the response.
        """
        encodings = self.tokenizer.encode_batch(
            [prompt + response for prompt, response in pairs], add_special_tokens=False
        )
        rows = []
        for (prompt, _), encoding in zip(pairs, encodings, strict=True):
            ids = [*encoding.ids, self.eos]
            untrained = sum(stop <= len(prompt) for _, stop in encoding.offsets)
            rows.append((ids, [IGNORE] * untrained + ids[untrained:]))
        return rows

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the token ids of one text, without EOS, and the characters [start, stop) of each token."""
        encoding = self.tokenizer.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    @cached_property
    def special_tokens(self) -> dict[int, str]:
        """Texts of the special tokens, by id."""
        added = self.tokenizer.get_added_tokens_decoder()
        return {number: token.content for number, token in added.items() if token.special}

    def check_fits(self, vocab: int) -> None:
        """Raise DataError if the tokenizer has more tokens than a model with `vocab` tokens."""
        size = self.tokenizer.get_vocab_size()
        if size > vocab:
            raise DataError(
                f"the tokenizer has {size} tokens and the model vocab_size={vocab}; raise vocab_size to {size}, or "
                "give the model's own tokenizer"
            )


@lru_cache(maxsize=4)
def load_tokenizer(folder: str) -> TextTokenizer:
    """Load a tokenizer folder in Hugging Face's format. Raises DataError if it is invalid or has no EOS."""
    try:
        tokenizer = Tokenizer.from_buffer(read_input(Path(folder, "tokenizer.json")))
        config = read_object(Path(folder, "tokenizer_config.json"))
    except DataError:
        raise
    except Exception as error:  # tokenizers raises no narrower type
        raise DataError(
            f"the tokenizer in {folder} cannot be read: {error}; save it again with transformers"
        ) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    # The post-processor would only add special tokens, which are never requested, and trim spaces from token offsets.
    tokenizer.post_processor = None
    named = config.get("eos_token")
    word = named.get("content") if isinstance(named, dict) else named
    eos = tokenizer.token_to_id(word) if isinstance(word, str) and word else None
    if eos is None:
        raise DataError(f"the tokenizer in {folder} has no eos_token; documents must end with one, so name it there")
    return TextTokenizer(tokenizer, eos)


def read_object(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file of a tokenizer. Raises DataError for other content."""
    try:
        found = json.loads(read_input(file))
    except DataError:
        raise
    except (ValueError, OSError) as error:
        raise DataError(f"{file} cannot be read: {error}; save the tokenizer again with transformers") from error
    except RecursionError as error:
        raise DataError(f"{file} is nested too deeply to be read; save the tokenizer again") from error
    if not isinstance(found, dict):
        raise DataError(f"{file} holds a JSON {type(found).__name__}, not an object; save the tokenizer again")
    return found


def train_tokenizer(texts: Iterator[str], *, vocab_size: int, folder: Path) -> None:
    """Train a byte-level BPE with exactly the model's vocabulary size and save it in Hugging Face's format.

    Sennrich et al. (2016), on bytes as in GPT-2. Raises DataError if the vocabulary cannot hold the 256 bytes.
    """
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocab_size <= len(alphabet):
        raise DataError(
            f"vocab_size={vocab_size} is too small for a byte-level tokenizer; choose more than {len(alphabet)}, "
            "or name a tokenizer in model.tokenizer"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    write_durably(folder / "tokenizer.json", tokenizer.to_str())
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_OF_TEXT}
    write_durably(folder / "tokenizer_config.json", json.dumps(config, indent=2))
