"""The mask of masked language models: a pure function of seed, sample, epoch and place in the sample."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from train_loop.data.columns import INPUT_IDS, LABELS
from train_loop.data.dataset import IGNORE, Dataset, Masking, Rows
from train_loop.data.order import Ids, scramble
from train_loop.data.text.tokenizer import TextTokenizer, load_tokenizer
from train_loop.errors import DataError
from train_loop.model.folder import model_shape, tokenizer_folder
from train_loop.spec import JobSpec, MaskedLmSpec

EVALUATION = -1
"""Epoch of evaluations, so that all of them have the same mask."""
_U64 = np.uint64
_STRIDE = _U64(0x9E3779B97F4A7C15)
"""Step of splitmix64 (Steele, Lea, Flood 2014) between two numbers of a stream."""


def mask_rows(rows: Rows | None, dataset: Dataset, epochs: Ids | int) -> Rows | None:
    """Return rows with masked tokens, which are the only labels; unchanged without a mask, or without rows.

    `epochs` has the epoch of each row.
    """
    rule = dataset.masking
    if rows is None or rule is None:
        return rows
    tokens = rows.input_ids
    places = np.arange(tokens.shape[1], dtype=_U64)
    first = scramble(_keys(rows.samples, epochs, rule.seed)[:, None] + places * _STRIDE)
    may_be = (places < rows.lengths[:, None]) & ~np.isin(tokens, rule.never)
    masked = may_be & (_uniform(first) < rule.probability)
    # Further numbers of the same place, which only masked tokens need.
    second = scramble(first[masked] + _STRIDE)
    third = scramble(second + _STRIDE)
    share, own = _uniform(second), tokens[masked]
    drawn = (_uniform(third) * rule.vocabulary).astype(tokens.dtype)
    inputs = tokens.copy()
    inputs[masked] = np.select([share < rule.replaced, share < rule.replaced + rule.random], [rule.token, drawn], own)
    labels = np.where(masked, tokens, IGNORE).astype(LABELS.dtype)
    return Rows({**rows.values, INPUT_IDS.name: inputs, LABELS.name: labels})


def _keys(samples: Ids, epochs: Ids | int, seed: int) -> NDArray[_U64]:
    """Return a key for each sample in its epoch."""
    whole = np.broadcast_to(np.asarray(epochs, np.int64), samples.shape)
    of_seed = scramble(np.array([seed % 2**64], _U64) + _STRIDE)
    return scramble(scramble(of_seed ^ samples.astype(_U64)) ^ whole.astype(_U64))


def _uniform(hashes: NDArray[_U64]) -> NDArray[np.float64]:
    """Return numbers in [0, 1) from the upper 53 bits of hashes."""
    return (hashes >> _U64(11)).astype(np.float64) * 2.0**-53


def masking_of(spec: JobSpec, tokenizer: Path | None) -> Masking | None:
    """Return the mask of a spec's data; None for other heads. `tokenizer` is the folder with which text is read.

    Raises DataError if the mask token, or the tokens that are never masked, are unknown.
    """
    mask = spec.model.masked
    if mask is None:
        return None
    folder = tokenizer or _tokenizer_of_tokens(spec)
    loaded = None if folder is None else load_tokenizer(str(folder), needs_eos=False)
    named, vocabulary = _named_tokens(mask, loaded, folder), model_shape(spec.model).vocab
    for token in (named[0], *(mask.special_tokens or ())):
        if token >= vocabulary:
            raise DataError(
                f"token {token} of model.head=masked_lm is not in the model's vocabulary of {vocabulary} tokens; raise "
                "vocab_size, or correct the token"
            )
    return Masking(
        seed=spec.data.seed,
        probability=mask.probability,
        replaced=mask.mask_replace_prob,
        random=mask.random_replace_prob,
        token=named[0],
        never=tuple(sorted(set(named))),
        vocabulary=vocabulary if loaded is None else min(vocabulary, loaded.vocab),
    )


def check_mask(spec: JobSpec, *, untrained: int | None) -> None:
    """Raise DataError if the tokens of a mask are unknown, or the model does not train the mask token.

    A tokenizer that is trained on the data will have them.
    """
    if spec.trains_tokenizer:
        return
    masking = masking_of(spec, tokenizer_folder(spec) if spec.data.reads_text else None)
    if masking is not None and masking.token == untrained:
        raise DataError(
            f"token {untrained} is both the mask token and pad_token_id of the model's config, which is not trained; "
            "correct one of them"
        )


def _named_tokens(mask: MaskedLmSpec, loaded: TextTokenizer | None, folder: Path | None) -> tuple[int, ...]:
    """Return the mask token, and after it the other tokens that are never masked. Raises DataError."""
    token = loaded.mask if mask.mask_token is None and loaded is not None else mask.mask_token
    if token is None or (loaded is None and mask.special_tokens is None):
        lacks = "a tokenizer is missing" if loaded is None else f"the tokenizer in {folder} has no mask_token"
        raise DataError(
            f"model.head=masked_lm needs a mask token and the tokens that are never masked, and {lacks}; name it in "
            "the tokenizer's files, or set mask_token and special_tokens in model.head: {masked_lm: …}"
        )
    return token, *(mask.special_tokens or ()), *(() if loaded is None else loaded.special)


def _tokenizer_of_tokens(spec: JobSpec) -> Path | None:
    """Return the tokenizer of tokenised rows; None if the model's folder has none."""
    try:
        return tokenizer_folder(spec)
    except DataError:
        if spec.model.tokenizer is not None:
            raise
        return None
