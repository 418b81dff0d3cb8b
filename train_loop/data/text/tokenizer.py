"""Hugging Face tokenizers, loaded by transformers and run by their Rust backend; and the training of new ones."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from tokenizers import Encoding, Tokenizer, decoders, models, pre_tokenizers, trainers

from train_loop.data.dataset import IGNORE
from train_loop.data.text.tokenizer_files import load_with_transformers
from train_loop.errors import DataError
from train_loop.run_dir import write_durably
from train_loop.spec.data import AddBos

END_OF_TEXT, MASK = "<|endoftext|>", "<|mask|>"
_LONGEST_REASON = 300
_PROBES = ("a", "Two words, 3 numbers.", "", " \n")


@dataclass(frozen=True)
class TextTokenizer:
    """A tokenizer of text, with the EOS token that ends every document."""

    tokenizer: Tokenizer
    end: int | None
    """EOS; None only for heads that do without."""
    bos: int | None
    prefix: tuple[int, ...]
    """Special tokens that the tokenizer writes before a text."""
    suffix: tuple[int, ...]
    """Special tokens that the tokenizer writes after a text."""
    templates: str | dict[str, str] | None
    """Chat template, or several by name."""
    variables: dict[str, Any]
    """Special tokens by name, for chat templates."""
    pad: int | None = None
    mask: int | None = None
    special: frozenset[int] = frozenset()
    """All special tokens that it names: those above, and others such as CLS and SEP."""
    add_bos: AddBos = "auto"

    @property
    def eos(self) -> int:
        """Return EOS, which ends every document of a language model."""
        assert self.end is not None, "load_tokenizer has required EOS"
        return self.end

    def adding_bos(self, rule: AddBos) -> "TextTokenizer":
        """Return a tokenizer whose documents begin with BOS as `data.add_bos` says. Raises DataError without BOS."""
        if rule == "auto":
            return self
        if self.bos is None:
            if rule is False:
                return self
            raise DataError("the tokenizer has no bos_token, which data.add_bos needs; name it, or set add_bos: auto")
        prefix = self.prefix[1:] if self.prefix[:1] == (self.bos,) else self.prefix
        return replace(self, prefix=(self.bos, *prefix) if rule else prefix, add_bos=rule)

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Return the token ids of each text, which end with EOS."""
        with _named_faults():
            encodings = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [self._document(encoding.ids, encoding.ids[-1:] == [self.eos]) for encoding in encodings]

    def encode_plainly(self, texts: list[str]) -> list[list[int]]:
        """Return the token ids of each text as transformers gives them, without EOS. Raises DataError without any."""
        with _named_faults():
            encodings = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        found = [[*self.before(encoding.ids), *encoding.ids, *self.suffix] for encoding in encodings]
        if not all(found):
            raise DataError("it has no tokens, and a row needs one at least")
        return found

    def encode_responses(self, pairs: list[tuple[str, str]]) -> list[tuple[list[int], list[int]]]:
        """Return token ids and labels of prompts with their responses; only response and EOS are trained.

        Prompt and response are tokenised as one text. A token that spans both belongs to the response.
        """
        with _named_faults():
            encodings = self.tokenizer.encode_batch(
                [prompt + response for prompt, response in pairs], add_special_tokens=False
            )
        rows = []
        for (prompt, response), encoding in zip(pairs, encodings, strict=True):
            offsets = self._own_offsets(encoding, prompt + response)
            is_ended = encoding.ids[-1:] == [self.eos] and offsets[-1][0] >= len(prompt)
            ids = self._document(encoding.ids, is_ended)
            untrained = len(self.before(encoding.ids)) + sum(stop <= len(prompt) for _, stop in offsets)
            rows.append((ids, [IGNORE] * untrained + ids[untrained:]))
        return rows

    def before(self, ids: list[int]) -> tuple[int, ...]:
        """Return the special tokens to write before the tokens of a text; none if it begins with them, or with BOS.

        A chat template has written them into such a text, as `apply_chat_template` tokenises it.
        """
        has_bos = self.bos in self.prefix and ids[:1] == [self.bos]
        return () if has_bos or tuple(ids[: len(self.prefix)]) == self.prefix else self.prefix

    def begins(self, text: str) -> bool:
        """Return whether a text begins itself with special tokens that are written before others."""
        return bool(self.prefix) and not self.before(self.encode_with_offsets(text)[0])

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the token ids of one text, without special tokens, and the characters [start, stop) of each token."""
        with _named_faults():
            encoding = self.tokenizer.encode(text, add_special_tokens=False)
        return encoding.ids, self._own_offsets(encoding, text)

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Return the text of token ids, with or without special tokens."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=not special))

    def _own_offsets(self, encoding: Encoding, text: str) -> list[tuple[int, int]]:
        """Return the characters of each token, for added tokens without the white space that they take in."""
        return [
            _stripped(text, span) if token in self.added_tokens else span
            for token, span in zip(encoding.ids, encoding.offsets, strict=True)
        ]

    @cached_property
    def added_tokens(self) -> dict[int, str]:
        """Texts of the tokens that are matched before all others, by id; they may be special or not."""
        return {number: token.content for number, token in self.tokenizer.get_added_tokens_decoder().items()}

    @cached_property
    def end_tokens(self) -> frozenset[int]:
        """Tokens that can end a turn: EOS, and all added tokens."""
        return frozenset({self.eos, *self.added_tokens})

    @cached_property
    def vocab(self) -> int:
        """Number of rows that an embedding needs: the highest token id + 1."""
        ids = self.tokenizer.get_vocab(with_added_tokens=True).values()
        return max(*ids, *self.prefix, *self.suffix, -1 if self.end is None else self.end) + 1

    def check_fits(self, vocab: int) -> None:
        """Raise DataError if a model with `vocab` tokens lacks a special token or a token of the base vocabulary.

        It may lack other added tokens: only text that contains them needs them.
        """
        remedy = f"raise vocab_size to {self.vocab}, or give the model's own tokenizer"
        highest = max(self.tokenizer.get_vocab(with_added_tokens=False).values(), default=-1)
        if highest >= vocab:
            raise DataError(
                f"the tokenizer's base vocabulary has token id {highest}, and the model has vocab_size={vocab}; "
                f"{remedy}"
            )
        for name, token in self._special_ids():
            if token >= vocab:
                text = self.tokenizer.id_to_token(token)
                raise DataError(
                    f"the tokenizer's {name} is {text!r} with token id {token}, and the model has vocab_size={vocab}; "
                    f"{remedy}"
                )

    def absent(self, vocab: int) -> dict[int, str]:
        """Return the added tokens that a model with `vocab` tokens lacks, by id."""
        return {token: text for token, text in sorted(self.added_tokens.items()) if token >= vocab}

    def why_absent(self, ids: Sequence[int], vocab: int) -> str | None:
        """Return the reason why a model with `vocab` tokens cannot be trained on these ids; None if it can."""
        token = -1 if self.vocab <= vocab else max(ids, default=-1)
        if token < vocab:
            return None
        return (
            f"it contains {self.tokenizer.id_to_token(token)!r}, which is token {token} and not in the model's "
            f"vocabulary of {vocab} tokens"
        )

    def _special_ids(self) -> Iterator[tuple[str, int]]:
        """Yield the name and id of each token that a tokenizer or an exported config uses whatever the text is."""
        for name, token in (("eos_token", self.end), ("bos_token", self.bos), ("pad_token", self.pad)):
            if token is not None:
                yield name, token
        for token in (*self.prefix, *self.suffix):
            yield "special token around each text", token

    def _document(self, ids: list[int], is_ended: bool) -> list[int]:
        """Return the ids of a text with the tokenizer's special tokens, ending with EOS.

        `is_ended`: the text itself ends with EOS and gets no second one, as in TRL.
        """
        after = () if is_ended and self.suffix == (self.eos,) else self.suffix
        whole = [*self.before(ids), *ids, *after]
        return whole if (is_ended and not after) or after[-1:] == (self.eos,) else [*whole, self.eos]


@lru_cache(maxsize=4)
def load_tokenizer(folder: str, *, needs_eos: bool = True) -> TextTokenizer:
    """Load a tokenizer folder as transformers does, without code from it. Raises DataError if it is unusable."""
    loaded = _load(Path(folder))
    backend = getattr(loaded, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise DataError(
            f"the tokenizer in {folder} ({type(loaded).__name__}) has no fast backend; save it as a fast tokenizer"
        )
    if needs_eos and not isinstance(loaded.eos_token_id, int):
        raise DataError(f"the tokenizer in {folder} has no eos_token; documents must end with one, so name it there")
    if not _has_words(backend):
        raise DataError(
            f"the tokenizer in {folder} ({type(loaded).__name__}) has only special tokens, so all text would be lost: "
            "its vocabulary file is absent or belongs to another class; save it again as a fast tokenizer"
        )
    with _named_faults():
        theirs = [list(loaded(text)["input_ids"]) for text in _PROBES]
    backend.no_truncation()
    backend.no_padding()
    # The special tokens that it would add are known from the probes, and it would trim spaces from token offsets.
    backend.post_processor = None
    prefix, suffix = _surroundings(theirs, [backend.encode(text, add_special_tokens=False).ids for text in _PROBES])
    return TextTokenizer(
        backend,
        loaded.eos_token_id,
        loaded.bos_token_id,
        prefix,
        suffix,
        loaded.chat_template,
        loaded.special_tokens_map,
        loaded.pad_token_id,
        loaded.mask_token_id,
        frozenset(token for token in loaded.all_special_ids if token is not None),
    )


def _has_words(tokenizer: Tokenizer) -> bool:
    """Return whether a vocabulary has more than special tokens.

    Classes of transformers make up the special ones if a folder lacks their files.
    """
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values()} | {"▁"}
    return not tokenizer.get_vocab(with_added_tokens=False).keys() <= special


@contextmanager
def _named_faults() -> Iterator[None]:
    """Raise DataError for a text that the tokenizer rejects: tokenizers raises no narrower type than Exception."""
    try:
        yield
    except MemoryError:
        raise
    except BaseException as error:
        if not _is_fault(error):
            raise
        raise DataError(f"the tokenizer rejects text: {_short(error)}; correct its files or the text") from error


def _is_fault(error: BaseException) -> bool:
    """Return whether a library raised an error: an Exception, or a panic of Rust code, whose class is private."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _load(folder: Path) -> Any:
    try:
        return load_with_transformers(folder)
    except (DataError, MemoryError):
        raise
    except BaseException as error:  # transformers and tokenizers raise no narrower type
        if not _is_fault(error):
            raise
        raise DataError(f"the tokenizer in {folder} cannot be read: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    """Return an error of transformers in one line, with the remedy."""
    if "trust_remote_code" in str(error):
        return "it needs code from its folder, which is not run; save it as a fast tokenizer"
    return f"{_short(error)}; save it again with transformers"


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:_LONGEST_REASON]


def _stripped(text: str, span: tuple[int, int]) -> tuple[int, int]:
    """Return a span without white space at its ends; unchanged if it holds nothing else."""
    start, stop = span
    own = text[start:stop]
    return (start + len(own) - len(own.lstrip()), stop - len(own) + len(own.rstrip())) if own.strip() else span


def _surroundings(theirs: list[list[int]], plain: list[list[int]]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the special tokens before and after each text, from probes with and without them. Raises DataError."""
    whole, own = theirs[0], plain[0]
    for start in range(len(whole) - len(own) + 1):
        prefix, suffix = whole[:start], whole[start + len(own) :]
        if all(found == [*prefix, *ids, *suffix] for found, ids in zip(theirs, plain, strict=True)):
            return tuple(prefix), tuple(suffix)
    raise DataError(
        "the tokenizer's Python class changes text or its tokens beyond special tokens at both ends; save it as a "
        "plain fast tokenizer"
    )


def train_tokenizer(texts: Iterator[str], *, vocab_size: int, folder: Path, masks: bool = False) -> None:
    """Train a byte-level BPE with exactly the model's vocabulary size and save it in Hugging Face's format.

    Sennrich et al. (2016), on bytes as in GPT-2. With `masks` it has a mask token. Raises DataError if the vocabulary
    cannot hold the 256 bytes and the special tokens.
    """
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = {"eos_token": END_OF_TEXT} | ({"mask_token": MASK} if masks else {})
    least = len(alphabet) + len(special)
    if vocab_size < least:
        raise DataError(
            f"vocab_size={vocab_size} is too small for a byte-level tokenizer; choose more than {least - 1}, "
            "or name a tokenizer in model.tokenizer"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[*special.values()], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    write_durably(folder / "tokenizer.json", tokenizer.to_str())
    config = {"tokenizer_class": "PreTrainedTokenizerFast"} | special
    write_durably(folder / "tokenizer_config.json", json.dumps(config, indent=2))
