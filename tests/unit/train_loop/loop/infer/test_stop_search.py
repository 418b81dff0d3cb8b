"""A search over random tokenizers and tokens: stop texts end rows where a plain decoding of all tokens shows them."""

import logging
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from tests.support.builders.searches import seeds
from tests.support.tokenizers.random_folders import write_random_tokenizer
from train_loop.data.text.tokenizer import TextTokenizer, load_tokenizer
from train_loop.errors import DataError
from train_loop.loop.infer.ends import Ends

PROMPTS = ["a word", "so", "a word.", "two"]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Hide what transformers logs of odd folders."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("seed", range(seeds(40, more=3000)))
def test_rows_end_where_a_plain_decoding_shows_the_stop_text(tmp_path: Path, seed: int) -> None:
    write_random_tokenizer(tmp_path / "folder", seed)
    try:
        tokenizer = load_tokenizer(str(tmp_path / "folder"), needs_eos=False)
    except DataError:
        return
    random = Random(seed)
    for _ in range(20):
        _compare(tokenizer, random)


def _compare(tokenizer: TextTokenizer, random: Random) -> None:
    prompt = tokenizer.encode_with_offsets(random.choice(PROMPTS))[0]
    ids = _generated(tokenizer, random)
    texts = [_text(tokenizer, prompt, ids[:size], special=True) for size in range(len(ids) + 1)]
    stops = tuple(_stop(tokenizer, texts[-1], random) for _ in range(2))
    # Later tokens may complete the character that ends a text.
    whole = [text.rstrip("\N{REPLACEMENT CHARACTER}") for text in texts]
    stopped = [size for size, text in enumerate(whole) if size and any(stop in text for stop in stops)]
    ends = Ends(frozenset(), stops, tokenizer)
    size = ends.find(ids, 0)
    assert size == (stopped[0] if stopped else None), (stops, texts[-1])
    if size is None:
        assert ends.text(ids) == _text(tokenizer, prompt, ids, special=False)
        return
    # Ranks look for ends after some tokens at a time.
    assert [ends.find(ids, start) for start in range(size)] == [size] * size
    place = min(whole[size].index(stop) for stop in stops if stop in whole[size])
    found, plain = str(ends.text(ids[:size])), _text(tokenizer, prompt, ids[:size], special=False)
    assert found == texts[size][:place] or plain != texts[size]
    # Bytes before and after a special token are not a character until it is removed.
    assert plain.startswith(found) or "\ufffd" in found + plain


def _generated(tokenizer: TextTokenizer, random: Random) -> list[int]:
    """Return random tokens, many of them added ones, or those of a text."""
    if random.random() < 0.3:
        return tokenizer.encode_with_offsets(random.choice(["a word, two", " a word\n\n<|im_end|> so", "é 👋 word"]))[0]
    known = sorted(tokenizer.tokenizer.get_vocab(with_added_tokens=True).values())
    added = sorted(tokenizer.added_tokens) or known
    return [random.choice(added if random.random() < 0.3 else known) for _ in range(random.randint(1, 12))]


def _stop(tokenizer: TextTokenizer, text: str, random: Random) -> str:
    """Return a part of a text, or an added token, or a word after a space."""
    start = random.randrange(len(text) or 1)
    part = text[start : start + random.randint(1, 6)]
    return random.choice([part, *tokenizer.added_tokens.values(), " word", " a"]) or "never"


def _text(tokenizer: TextTokenizer, prompt: list[int], ids: list[int], *, special: bool) -> str:
    """Return the text of tokens after a prompt."""
    before, whole = (
        tokenizer.tokenizer.decode(one, skip_special_tokens=not special) for one in (prompt, [*prompt, *ids])
    )
    return str(whole)[len(str(before)) :]
